"""A sharded optimizer makes the numbers of a whole one, with its state divided by the replicas."""

import pytest
import torch
from checkpoints import assert_same_bits
from shards import Mixed, on_ranks, settings, state
from torch import nn

from hpc_train.comm.loopback import LoopbackCollective, run_ranks
from hpc_train.errors import UserError
from hpc_train.pipeline.layers import LayerSpec
from hpc_train.tasks.regression import Regression
from hpc_train.training.layout import Layout
from hpc_train.training.parity import compare
from hpc_train.training.sharded import divide

ADAMW, SGD = ({"name": "adamw"}, {"name": "sgd"})


@pytest.fixture(autouse=True)
def _threads():
    """Workers set torch's threads, which are the process's."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def trained(num_ranks, chosen, steps=4, hosts=None):
    """Each rank's parameters and outcomes after some steps."""
    return on_ranks(num_ranks, lambda run: (run.train(steps).parameters(), run.outcomes), chosen, hosts=hosts)


@pytest.mark.parametrize("optimizer", [ADAMW, SGD])
@pytest.mark.parametrize(
    ("replicas", "hosts"), [(1, None), (2, None), (3, None), (4, None), (2, (0, 0)), (3, (0, 0, 1))]
)
def test_the_same_bits_as_the_whole_optimizer(replicas, hosts, optimizer):
    """Sums have the same bits, pieces begin at multiples of 16 elements, and the update is elementwise."""
    whole = trained(replicas, settings(False, optimizer=optimizer), hosts=hosts)
    sharded = trained(replicas, settings(True, optimizer=optimizer), hosts=hosts)
    for parameters, outcomes in sharded:
        assert_same_bits(parameters, whole[0][0])
        for mine, expected in zip(outcomes, whole[0][1], strict=True):
            assert mine.loss == expected.loss
            assert mine.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)


@pytest.mark.parametrize("stages", [1, 2])
def test_state_has_the_same_bits_by_the_same_names(stages):
    whole = state(2 * stages, lambda run: run.train(3), settings(False, stages=stages))
    sharded = state(2 * stages, lambda run: run.train(3), settings(True, stages=stages))
    assert "optimizer/layers.3.1.weight/exp_avg" in whole
    assert "optimizer/layers.1.none/step" in whole
    assert_same_bits(sharded, whole)


@pytest.mark.parametrize(("optimizer", "numbers"), [(ADAMW, 2), (SGD, 1)])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_memory_of_state_is_divided_by_the_replicas(replicas, optimizer, numbers):
    def body(run):
        return run.train(1).state_bytes(), [len(b.buffer) for b in run.worker.reducer.buckets]

    in_bytes = on_ranks(replicas, body, settings(True, optimizer=optimizer, bucket_bytes="1MB"))
    held = [num_bytes for num_bytes, _ in in_bytes]
    elements = sum(p.numel() for p in Mixed().plain_model().parameters() if p.requires_grad)
    assert sum(held) == 4 * numbers * elements
    assert in_bytes[0][1] == [pytest.approx(elements, rel=0.02)]  # one bucket, and hardly any gaps
    assert max(held) <= 4 * numbers * (elements / replicas + 1024)  # shards are cut by blocks


def test_clipping_is_by_the_norm_of_all_shards():
    chosen = [settings(sharded, optimizer={"name": "sgd", "clip_norm": 0.05}) for sharded in (False, True)]
    whole, sharded = (trained(3, one) for one in chosen)
    assert whole[0][1][0].grad_norm > 0.05
    for parameters, outcomes in sharded:
        assert outcomes == sharded[0][1]
        for name, expected in whole[0][0].items():
            torch.testing.assert_close(parameters[name], expected, rtol=1e-6, atol=1e-7)


def test_the_norm_is_that_of_all_stages_and_shards():
    whole = trained(2, settings(False))
    sharded = trained(4, settings(True, stages=2))
    norms = [outcome.grad_norm for outcome in whole[0][1]]
    for _, outcomes in sharded:
        assert [outcome.grad_norm for outcome in outcomes] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("hosts", [None, (0, 0, 1)])
def test_gaps_between_parameters_stay_zero(monkeypatch, wire, hosts):
    """What lies in them is summed and sent along, but must not count, nor spoil the scale of a block.

    A collective may leave anything outside of the shard, and this one does.
    """
    reduce_scatter = LoopbackCollective.reduce_scatter_

    def reduce_scatter_and_spoil(self, buffer, *more):
        reduce_scatter(self, buffer, *more)
        shard = self.shard(buffer.numel())
        buffer[: shard.start] = buffer[shard.stop :] = 7.0

    monkeypatch.setattr(LoopbackCollective, "reduce_scatter_", reduce_scatter_and_spoil)

    def body(run):
        run.train(2).train(1, factor=float("nan")).train(1)
        run.backward()
        in_gaps = []
        for bucket in run.worker.reducer.buckets:
            gap = torch.ones_like(bucket.buffer)
            for slot in bucket.slots:
                begin = slot.view.storage_offset() - bucket.buffer.storage_offset()
                gap[begin : begin + slot.view.numel()] = 0
            run.worker.optimizer.share()
            assert gap.any()
            in_gaps.append(float((bucket.buffer * gap).abs().sum()))
        return sum(in_gaps), [outcome.finite for outcome in run.outcomes]

    expected = 0.0, [True, True, False, True, True]
    assert on_ranks(3, body, settings(True, wire=wire), hosts=hosts) == [expected] * 3


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8"])
def test_lossy_wires_leave_all_replicas_with_the_same_bits(wire):
    exact, *_ = trained(3, settings(True, optimizer=SGD))
    lossy = trained(3, settings(True, optimizer=SGD, wire=wire))
    for parameters, outcomes in lossy:
        assert_same_bits(parameters, lossy[0][0])
        assert outcomes == lossy[0][1]
        assert outcomes[-1].grad_norm == pytest.approx(exact[1][-1].grad_norm, rel=2e-2)
    assert any(not torch.equal(exact[0][name], p) for name, p in lossy[0][0].items())


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(("num_ranks", "stages"), [(3, 1), (4, 2)])
def test_parity_with_plain_pytorch(num_ranks, stages, wire, feedback):
    task = Regression(samples=40, inputs=6, hidden=48, depth=3)
    chosen = settings(True, stages=stages, wire=wire, error_feedback=feedback, optimizer={"clip_norm": 0.1})

    def body(world):
        return compare(chosen, task, world, Layout(chosen, task, world), steps=3)

    differences, *_ = run_ranks(num_ranks, body)
    assert [d.quantity for d in differences] == ["loss", "gradients", "parameters"]
    assert all(difference.holds for difference in differences), differences


def test_sums_after_backward_are_the_same():
    assert_same_bits(
        trained(2, settings(True, overlap=False))[1][0], trained(2, settings(True, overlap=True))[1][0]
    )


def test_a_skipped_step_changes_nothing_and_counts_as_none():
    def body(run):
        run.train(2)
        before = run.parameters()
        run.train(1, factor=float("inf"))
        assert_same_bits(run.parameters(), before)
        run.train(1)
        return run.outcomes[2].finite

    whole = state(3, body, settings(False))
    sharded = state(3, body, settings(True))
    assert sharded["optimizer/layers.0.weight/step"] == 3
    assert_same_bits(sharded, whole)
    assert on_ranks(3, body, settings(True)) == [False] * 3


def test_gradients_are_whole_when_they_are_asked_for():
    def body(run):
        run.backward()
        run.worker.complete_gradients()
        gradients = {n: p.grad.clone() for n, p in run.worker.parameters.items() if p.requires_grad}
        run.worker.update(run.outcomes[0], 0.01)
        assert all(p.grad is None for p in run.worker.parameters.values())
        return gradients, run.parameters()

    def plain(run):
        run.backward()
        gradients = {n: p.grad.clone() for n, p in run.worker.parameters.items() if p.requires_grad}
        run.worker.update(run.outcomes[0], 0.01)
        return gradients, run.parameters()

    expected = on_ranks(3, plain, settings(False))[0]
    for gradients, parameters in on_ranks(3, body, settings(True)):
        assert_same_bits(gradients, expected[0])
        assert_same_bits(parameters, expected[1])


def test_more_replicas_than_there_is_to_divide():
    """A bucket of one block is one replica's; the others update nothing, and take part."""
    task = Regression(inputs=6, hidden=4, depth=1)

    def body(run):
        for _ in range(3):
            generator = torch.Generator().manual_seed(run.worker.place.replica)
            samples = torch.randn(2, 6, generator=generator), torch.randn(2, 1, generator=generator)
            run.worker.update(run.worker.backward([samples], 6), 0.01)
        return run.parameters(), run.state_bytes(), sorted(run.worker.take_state())

    whole = on_ranks(3, body, settings(False), task)
    sharded = on_ranks(3, body, settings(True), task)
    assert [num_bytes > 0 for _, num_bytes, _ in sharded] == [True, False, False]
    for parameters, _, _ in sharded:
        assert_same_bits(parameters, whole[0][0])
    assert sorted(name for _, _, names in sharded for name in names) == whole[0][2]


def test_a_stage_without_anything_to_train():
    class Half(Regression):
        def layers(self):
            return [LayerSpec(nn.Identity, cost=1.0), LayerSpec(lambda: nn.Linear(6, 1), cost=1.0)]

    def body(run):
        samples = torch.ones(2, 6), torch.zeros(2, 1)
        outcome = run.worker.backward([samples], 4)
        run.worker.update(outcome, 0.01)
        return outcome.grad_norm > 0, sorted(run.worker.take_state())

    ranks = on_ranks(4, body, settings(True, stages=2), Half())
    assert [grows for grows, _ in ranks] == [True] * 4
    assert [len(names) for _, names in ranks] == [
        0,
        2 + 3,
        0,
        3,
    ]  # the model and bias's state, weight's state


@pytest.mark.parametrize("optimizer", [ADAMW, SGD])
@pytest.mark.parametrize("bucket_bytes", [7_000, 1_000_000])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_optimizer_moves_to_other_buckets(replicas, bucket_bytes, optimizer):
    """As `gradients.tune` wants it, in the middle of a run."""

    def body(run):
        run.train(2)
        buckets = len(run.worker.reducer.buckets)
        other = settings(True, bucket_bytes=bucket_bytes).gradients
        run.worker.sum_by(other)
        assert replicas == 1 or len(run.worker.reducer.buckets) != buckets
        run.train(2)

    whole, sharded = (state(replicas, body, settings(sh, optimizer=optimizer)) for sh in (False, True))
    assert_same_bits(sharded, whole)


def test_things_are_divided_evenly_whatever_their_order():
    assert divide([], 3) == []
    assert divide([5, 5, 5], 2) == [0, 1, 0]
    assert divide([9, 1, 1, 1, 0], 2) == [0, 1, 1, 1, 1]


class Gapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 8)[:, ::2])

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (lambda: nn.Linear(6, 1).double(), "parameter layers.0.bias is torch.float64, and a sharded"),
        (lambda: nn.Linear(6, 1).bfloat16(), "is torch.bfloat16, and a sharded optimizer is for float32"),
        (Gapped, r"parameter layers.0.weight of shape \[6, 4\] has gaps in its memory \(strides \[8, 2\]\)"),
    ],
)
def test_what_has_no_pieces_is_refused(layer, words):
    class Odd(Regression):
        def layers(self):
            return [LayerSpec(layer, cost=1.0)]

    with pytest.raises(UserError, match=words) as caught:
        on_ranks(2, lambda run: None, settings(True), Odd())
    assert "optimizer.sharded=false" in str(caught.value)
    on_ranks(2, lambda run: None, settings(False), Odd())

"""Gradient sums beside backward, against one process with all samples."""

import copy
import threading
import warnings

import pytest
import torch
from torch import nn

from hpc_train.comm.interface import Wire
from hpc_train.comm.loopback import run_ranks
from hpc_train.errors import PeerLost, UserError
from hpc_train.gradients.reducer import Reducer
from hpc_train.grid import Grid

CPU = torch.device("cpu")


class Tied(nn.Module):
    """One matrix, used first and last."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.outward = nn.Linear(6, 6)
        self.outward.weight = self.inward.weight

    def forward(self, x):
        return self.outward(self.middle(self.inward(x).tanh()).tanh())


class Branching(nn.Module):
    """The middle layer is used for some inputs only: a branch that depends on the data."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        if x[0, 0] > 0:
            x = self.sometimes(x).tanh()
        return self.last(x)


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def frozen():
    model = plain()
    model[2].weight.requires_grad_(False)
    return model


def conv():
    layers = nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), *layers).to(memory_format=torch.channels_last)


def two_dtypes():
    return nn.Sequential(nn.Linear(6, 6), ToDouble(), nn.Linear(6, 3).double())


class ToDouble(nn.Module):
    def forward(self, x):
        return x.double()


MODELS = [plain, Tied, frozen, conv, Branching, two_dtypes]


def samples(num):
    return torch.randn(num, 6, generator=torch.Generator().manual_seed(1))


def backward(model, batch):
    if len(batch):
        model(batch).square().sum().backward()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def alone(model, batches):
    """The gradients of one process that runs all the batches."""
    model = copy.deepcopy(model)
    for batch in batches:
        backward(model, batch)
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    return gradients(model)


def build(make):
    torch.manual_seed(0)
    return make()


def summed(model, passes_by_rank, steps=1, wrap=lambda collective: collective, **options):
    """The gradients of each rank after its passes; the same samples in every step."""

    def body(world):
        mine = copy.deepcopy(model)
        collective = wrap(world.collective(Grid(world.size, 1), CPU))
        reducer = Reducer(list(mine.named_parameters()), collective, **{"bucket_bytes": 64, **options})
        for _ in range(steps):
            reducer.begin(len(passes_by_rank[world.rank]))
            for batch in passes_by_rank[world.rank]:
                backward(mine, batch)
            reducer.finish()
        reducer.close()
        return gradients(mine)

    return run_ranks(len(passes_by_rank), body, timeout_s=30)


def assert_same(ranks, expected, **tolerance):
    for found in ranks:
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], **tolerance)


class Recorded:
    """A collective that notes which buffer is summed in which thread, and can stop there."""

    def __init__(self, inner, threaded=True, on_sum=lambda: None):
        self._inner = inner
        self._on_sum = on_sum
        self.threaded = threaded
        self.sums = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def sum_(self, buffer, wire):
        self._on_sum()
        self._inner.sum_(buffer, wire)
        self.sums.append((buffer.data_ptr(), threading.current_thread().name))


@pytest.mark.filterwarnings("ignore:no gradient for")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [64, 2**20])
@pytest.mark.parametrize("make", MODELS)
def test_sums_are_those_of_one_process(make, bucket_bytes, overlap):
    model = build(make)
    batches = list(samples(12).split(2))
    shares = [batches[:2], batches[2:4], batches[4:]]
    ranks = summed(model, shares, steps=2, bucket_bytes=bucket_bytes, overlap=overlap)
    # fp32 sums in another order; fp64 gradients travel as fp32
    assert_same(ranks, alone(model, batches), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:no gradient for")
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("passes", [(3, 1), (1, 3), (4, 0), (0, 4), (0, 0)])
def test_shares_may_differ_and_be_zero(make, passes):
    model = build(make)
    batches = list(samples(2 * sum(passes)).split(2)) if sum(passes) else []
    shares = [batches[: passes[0]], batches[passes[0] :]]
    assert_same(summed(model, shares, steps=2), alone(model, batches), rtol=1e-5, atol=1e-5)


def test_all_ranks_end_with_the_same_bits():
    first, *others = summed(build(plain), list(samples(12).view(3, 2, 2, 6)), wire=Wire.FP16)
    assert_same(others, first, rtol=0, atol=0)


def test_fp16_wire_rounds_by_its_eleven_bits():
    model = build(plain)
    batches = list(samples(12).split(2))
    shares = [batches[:3], batches[3:]]
    found = summed(model, shares, wire=Wire.FP16, bucket_bytes=2**20)[0]
    expected = alone(model, batches)
    contributions = [alone(model, share) for share in shares]
    worst = 0.0
    for name, exact in expected.items():
        # each contribution is rounded once, and the sum once, by half of 2^-10 of its value
        bound = 2**-11 * (sum(c[name].abs() for c in contributions) + exact.abs()) * 1.01 + 1e-6
        assert ((found[name] - exact).abs() <= bound).all()
        worst = max(worst, float(((found[name] - exact).abs() / bound).max()))
    assert worst > 0.1  # it did travel in 16 bits


def test_channels_last_gradients_keep_their_layout():
    """A gradient with other strides than its parameter makes torch warn, and work slower."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in summed(build(conv), list(samples(8).view(2, 2, 2, 6)), steps=2):
            assert found["1.weight"].is_contiguous(memory_format=torch.channels_last)


def test_buckets_are_summed_while_backward_still_runs():
    """Backward of the first layer waits here until the bucket of the last layer is summed."""

    def body(world):
        model = copy.deepcopy(original)
        done = threading.Event()
        collective = Recorded(world.collective(Grid(2, 1), CPU))
        reducer = Reducer(list(model.named_parameters()), collective, bucket_bytes=64)
        sum_ = collective.sum_

        def sum_and_tell(buffer, wire):
            sum_(buffer, wire)
            done.set()

        collective.sum_ = sum_and_tell
        seen = []
        model[0].register_full_backward_hook(lambda *_: seen.append(done.wait(20)))
        reducer.begin(1)
        backward(model, samples(2).requires_grad_())
        reducer.finish()
        reducer.close()
        return seen, {name for _, name in collective.sums}

    original = build(plain)
    assert run_ranks(2, body, timeout_s=60) == [([True], {"gradient sums"})] * 2


def test_without_a_thread_the_main_one_sums():
    collectives = []

    def wrap(collective):
        collectives.append(Recorded(collective, threaded=False))
        return collectives[-1]

    model = build(plain)
    batches = list(samples(4).split(2))
    ranks = summed(model, [batches[:1], batches[1:]], wrap=wrap)
    assert_same(ranks, alone(model, batches), rtol=1e-5, atol=1e-6)
    assert {name for c in collectives for _, name in c.sums} == {"rank 0", "rank 1"}


@pytest.mark.parametrize("overlap", [True, False])
def test_the_order_is_fixed_whatever_backward_meets_first(overlap):
    """Rank 0 uses layer a then b, rank 1 the other way round: their backward passes do the same."""

    def body(world):
        layers = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}
        collective = Recorded(world.collective(Grid(2, 1), CPU))
        named = [(f"{n}.{k}", p) for n, layer in layers.items() for k, p in layer.named_parameters()]
        reducer = Reducer(named, collective, bucket_bytes=256, overlap=overlap)
        order = "ab" if world.rank == 0 else "ba"
        for _ in range(3):
            reducer.begin(1)
            x = samples(2)
            for name in order:
                x = layers[name](x)
            x.sum().backward()
            reducer.finish()
        reducer.close()
        buffers = [bucket.buffer.data_ptr() for bucket in reducer.buckets]
        return len(buffers), [buffers.index(pointer) for pointer, _ in collective.sums]

    assert run_ranks(2, body, timeout_s=30) == [(2, [0, 1] * 3)] * 2


def test_a_parameter_without_gradient_is_told_once_and_counts_as_zero():
    """horovod#564: a branch that one rank does not take made all ranks wait for ever."""
    model = build(Branching)
    taken = next(x for x in samples(50).split(1) if model.first(x)[0, 0] > 0)
    not_taken = next(x for x in samples(50).split(1) if model.first(x)[0, 0] <= 0)
    with pytest.warns(UserWarning, match=r"sometimes\.weight, sometimes\.bias in .* of replica 1") as told:
        ranks = summed(model, [[taken], [not_taken]], steps=3)
    assert len(told) == 1
    assert_same(ranks, alone(model, [taken, not_taken]), rtol=1e-5, atol=1e-6)


def test_a_rank_without_passes_is_no_reason_to_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summed(build(plain), [[samples(2)], []])


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_that_somebody_else_made_are_taken(overlap):
    """zero_grad() drops the views, and hooks of users put gradients of their own in their place."""
    model = build(plain)

    def body(world):
        mine = copy.deepcopy(model)
        collective = world.collective(Grid(2, 1), CPU)
        reducer = Reducer(list(mine.named_parameters()), collective, bucket_bytes=64, overlap=overlap)
        for _ in range(2):
            reducer.begin(2)
            backward(mine, samples(2))
            mine.zero_grad(set_to_none=True)  # drops the first pass
            mine[0].weight.grad = torch.ones_like(mine[0].weight)
            backward(mine, samples(2))
            reducer.finish()
        reducer.close()
        return gradients(mine)

    expected = {name: 2 * g for name, g in alone(model, [samples(2)]).items()}
    expected["0.weight"] += 2
    assert_same(run_ranks(2, body, timeout_s=30), expected, rtol=1e-5, atol=1e-6)


def test_more_passes_than_expected_raise_instead_of_spoiling_the_sum():
    def body(world):
        mine = copy.deepcopy(model)
        reducer = Reducer(list(mine.named_parameters()), world.collective(Grid(2, 1), CPU))
        reducer.begin(1)
        backward(mine, samples(2))
        backward(mine, samples(2))
        with pytest.raises(RuntimeError, match=r"4\.bias, 4\.weight.* had more gradients than the 1 passes"):
            reducer.finish()
        reducer.finish()  # the sum itself is whole
        reducer.close()
        return gradients(mine)

    model = build(plain)
    assert_same(run_ranks(2, body, timeout_s=30), alone(model, [samples(2)] * 2), rtol=1e-5, atol=1e-6)


def test_late_gradients_are_added_by_a_second_round():
    def body(world):
        mine = copy.deepcopy(model)
        reducer = Reducer(list(mine.named_parameters()), world.collective(Grid(2, 1), CPU), bucket_bytes=64)
        reducer.begin(1)
        for _ in range(1 + 2 * world.rank):
            backward(mine, samples(2))
        late = reducer.take_late()
        reducer.finish()
        reducer.add_late(late)
        reducer.close()
        return len(late), gradients(mine)

    model = build(plain)
    (none, first), (all_of_them, second) = run_ranks(2, body, timeout_s=30)
    assert (none, all_of_them) == (0, 6)
    assert_same([first, second], alone(model, [samples(2)] * 4), rtol=1e-5, atol=1e-5)


def test_a_lost_peer_is_raised_by_finish_and_close_still_ends():
    def body(world):
        def fail():
            raise PeerLost([1], "sum")

        mine = copy.deepcopy(model)
        reducer = Reducer(
            list(mine.named_parameters()), Recorded(world.collective(Grid(2, 1), CPU), on_sum=fail)
        )
        reducer.begin(1)
        backward(mine, samples(2))
        with pytest.raises(PeerLost, match="lost rank 1 during sum"):
            reducer.finish()
        reducer.close()

    model = build(plain)
    run_ranks(2, body, timeout_s=30)


def test_no_thread_and_no_hook_is_left_after_close():
    before = set(threading.enumerate())
    started = []

    def body(world):
        reducer = Reducer(list(models[world.rank].named_parameters()), world.collective(Grid(2, 1), CPU))
        started.append(sum(t.name == "gradient sums" for t in threading.enumerate()))
        world.control.barrier()
        reducer.close()
        reducer.close()

    models = [build(plain), build(plain)]
    run_ranks(2, body, timeout_s=30)
    assert max(started) == 2
    assert {t for t in threading.enumerate() if t.name == "gradient sums"} <= before
    for model in models:
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_closed_reducer_leaves_backward_alone():
    def body(world):
        mine = copy.deepcopy(model)
        reducer = Reducer(list(mine.named_parameters()), world.collective(Grid(2, 1), CPU))
        reducer.begin(1)
        backward(mine, samples(2))
        reducer.finish()
        reducer.close()
        mine.zero_grad()
        backward(mine, samples(2))
        return gradients(mine)

    model = build(plain)
    assert_same(run_ranks(2, body, timeout_s=30), alone(model, [samples(2)]), rtol=0, atol=0)


def test_one_replica_costs_neither_thread_nor_hook_nor_copy():
    model = build(plain)
    before = set(threading.enumerate())

    def body(world):
        reducer = Reducer(list(model.named_parameters()), world.collective(Grid(1, 1), CPU))
        assert not reducer.buckets
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert not {t for t in set(threading.enumerate()) - before if t.name == "gradient sums"}
        for passes in (2, 0):
            reducer.begin(passes)
            for _ in range(passes):
                backward(model, samples(2))
            reducer.finish()
            assert_same([gradients(model)], alone(original, [samples(2)] * passes), rtol=0, atol=0)

    original = copy.deepcopy(model)
    run_ranks(1, body, timeout_s=30)


def test_replicas_with_different_models_are_refused():
    """Their sums would mix what does not belong together, or wait for ever."""

    def body(world):
        model = nn.Linear(4, 3 + world.rank)
        with pytest.raises(UserError, match="replicas train different parameters"):
            Reducer(list(model.named_parameters()), world.collective(Grid(2, 1), CPU))

    run_ranks(2, body, timeout_s=30)


def test_a_stage_without_trained_parameters_has_nothing_to_do():
    def body(world):
        reducer = Reducer([], world.collective(Grid(2, 1), CPU))
        reducer.begin(1)
        reducer.finish()
        reducer.close()

    run_ranks(2, body, timeout_s=30)


def test_a_step_cannot_begin_before_the_last_one_is_finished():
    def body(world):
        mine = copy.deepcopy(model)
        reducer = Reducer(list(mine.named_parameters()), world.collective(Grid(2, 1), CPU))
        reducer.begin(0)
        with pytest.raises(RuntimeError, match=r"call finish\(\) before"):
            reducer.begin(1)
        reducer.finish()
        reducer.begin(1)
        reducer.finish()
        reducer.close()

    model = build(plain)
    run_ranks(2, body, timeout_s=30)


def test_backward_between_steps_starts_no_sum():
    def body(world):
        mine = copy.deepcopy(model)
        collective = Recorded(world.collective(Grid(2, 1), CPU))
        reducer = Reducer(list(mine.named_parameters()), collective)
        reducer.begin(1)
        backward(mine, samples(2) if world.rank else [])
        reducer.finish()
        if world.rank == 0:
            backward(mine, samples(2))
        assert not reducer.under_way
        reducer.begin(1)
        backward(mine, samples(2))
        reducer.finish()
        reducer.close()
        return len(collective.sums), gradients(mine)

    model = build(plain)
    results = run_ranks(2, body, timeout_s=30)
    assert [n for n, _ in results] == [2, 2]
    assert_same([g for _, g in results], alone(model, [samples(2)] * 2), rtol=1e-5, atol=1e-6)


def test_activation_checkpointing_is_exact():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = plain()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)

    model = build(Checkpointed)
    batches = list(samples(8).split(2))
    assert_same(summed(model, [batches[:2], batches[2:]]), alone(model, batches), rtol=1e-5, atol=1e-6)


def test_times_of_a_step_are_known():
    def body(world):
        mine = copy.deepcopy(model)
        reducer = Reducer(list(mine.named_parameters()), world.collective(Grid(2, 1), CPU))
        reducer.begin(1)
        backward(mine, samples(2))
        reducer.finish()
        reducer.close()
        return reducer.summed_s, reducer.exposed_s

    model = build(plain)
    for summed_s, exposed_s in run_ranks(2, body, timeout_s=30):
        assert summed_s > 0
        assert exposed_s > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("side", [False, True])
def test_sums_follow_kernels_on_a_gpu(side):
    model = build(plain).cuda()
    batches = list(samples(8).cuda().split(2))

    def body(world):
        mine = copy.deepcopy(model)
        reducer = Reducer(
            list(mine.named_parameters()),
            world.collective(Grid(2, 1), torch.device("cuda", 0)),
            bucket_bytes=64,
        )
        with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.default_stream()):
            for _ in range(5):
                reducer.begin(2)
                for batch in batches[2 * world.rank : 2 * world.rank + 2]:
                    backward(mine, batch)
                reducer.finish()
            result = gradients(mine)
            torch.cuda.synchronize()
        reducer.close()
        return result

    assert_same(run_ranks(2, body, timeout_s=60), alone(model, batches), rtol=1e-5, atol=1e-6)

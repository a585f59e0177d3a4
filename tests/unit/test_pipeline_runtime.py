"""Transparency: loss and gradients of a pipeline are those of the plain model with the whole batch."""

import pytest
import torch
from pipelines import (
    RendezvousLinks,
    batch,
    check_parity,
    cross_entropy,
    gradients_of,
    layers,
    on_stages,
    squared_error,
    stacked,
)
from torch import nn

from hpc_train.errors import PeerLost, UserError
from hpc_train.pipeline.layers import plain_model

SPLITS = {1: [8], 2: [3, 5], 3: [1, 5, 2], 4: [2, 2, 2, 2]}
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]


def cut(num_stages, schedule):
    """Layers of each chunk, of 8 layers, or of 12 where a stage has two chunks."""
    if schedule not in ("interleaved", "zb-v"):
        return SPLITS[num_stages]
    return [12 // (2 * num_stages)] * (2 * num_stages) if num_stages < 4 else [2, 1, 2, 1, 2, 1, 2, 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "samples", [(3, 3, 3, 3, 3, 2), (2, 1), (5,), ()], ids=["ragged", "few", "one", "none"]
)
def test_parity(num_stages, schedule, samples):
    split = cut(num_stages, schedule)
    check_parity(stacked(sum(split)), split, batch(samples), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4, 9])
def test_no_deadlock_where_a_send_ends_only_once_its_receive_is_posted(
    num_stages, schedule, num_micro_batches
):
    links = RendezvousLinks()
    samples = [3] * (num_micro_batches - 1) + [1]
    split = cut(num_stages, schedule)
    check_parity(stacked(sum(split)), split, batch(samples), schedule, links=links, runs=2)
    links.check_all_is_over()


def test_large_messages_under_rendezvous():
    links = RendezvousLinks()
    check_parity(stacked(4, width=256), [1, 1, 2], batch([64] * 5, width=256), links=links)
    links.check_all_is_over()


class Attention(nn.Module):
    """A block of a Transformer, with causal self-attention."""

    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads=2, batch_first=True)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        """[micro-batch, sequence, width] in and out."""
        y = self.norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.feed(x)


@pytest.mark.parametrize("split", [[4], [1, 3], [2, 2], [1, 1, 2], [1, 1, 1, 1]])
def test_a_transformer_on_integer_tokens(split):
    text = torch.randint(0, 11, (10, 7), generator=torch.Generator().manual_seed(1))
    micro_batches = [(part[:, :-1], part[:, 1:]) for part in text.split(3)]
    specs = layers(lambda: nn.Embedding(11, 8), Attention, Attention, lambda: nn.Linear(8, 11))
    check_parity(specs, split, micro_batches, loss=cross_entropy)


class Fork(nn.Module):
    """A tuple: two that need gradients, an integer mask, and one tensor twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y.t().contiguous().t(), y.sin(), (x > 0).long(), y, torch.empty(len(x), 0)


class Middle(nn.Module):
    """Passes some on as they are."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, a, b, mask, again, empty):
        return a * self.scale, b, mask, again


class Join(nn.Module):
    """Leaves one of them out: its gradient is zero."""

    def forward(self, a, b, mask, again):
        return torch.where(mask.bool(), a, a.detach()) * again


@pytest.mark.parametrize("split", [[4], [1, 3], [2, 2], [1, 1, 2], [1, 2, 1], [1, 1, 1, 1]])
def test_tuples(split):
    specs = layers(Fork, Middle, Join, lambda: nn.Linear(4, 4))
    check_parity(specs, split, batch([3, 3, 1]))


def test_a_tuple_as_the_models_input():
    class Add(nn.Module):
        def forward(self, a, b):
            return a + 2 * b

    pairs = [((x, x.cos()), y) for x, y in batch([2, 3])]
    check_parity(layers(Add, lambda: nn.Linear(4, 4), nn.Tanh), [2, 1], pairs)


@pytest.mark.parametrize("split", [[1, 1, 1, 1], [2, 2], [1, 3]])
def test_stages_without_parameters_that_work_in_place(split):
    """Activations that arrive were leaves of autograd once, and a first layer in place failed on them."""
    specs = layers(lambda: nn.Linear(4, 4), lambda: nn.ReLU(inplace=True), nn.Identity, nn.Tanh)
    check_parity(specs, split, batch([3, 2, 2]))


def frozen(build):
    def make():
        module = build()
        module.requires_grad_(False)
        return module

    return make


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_gradients_go_to_a_frozen_first_stage(schedule):
    linear = lambda: nn.Linear(4, 4)  # noqa: E731
    links = RendezvousLinks()
    check_parity(layers(frozen(linear), nn.Tanh, linear), [2, 1], batch([2, 2, 1]), schedule, links=links)
    assert {(source, dest) for source, dest, *_ in links.messages} == {(0, 1)}
    links.check_all_is_over()


def test_gradients_go_through_a_frozen_stage_between():
    linear = lambda: nn.Linear(4, 4)  # noqa: E731
    check_parity(layers(linear, frozen(linear), linear), [1, 1, 1], batch([2, 2, 1, 1]))


def test_everything_frozen():
    linear = lambda: nn.Linear(4, 4)  # noqa: E731
    check_parity(layers(frozen(linear), frozen(linear)), [1, 1], batch([2, 2]))


def test_a_branch_without_gradient():
    """The last stage does not look at its input: the first still gets zeros, and nobody hangs."""

    class Ignore(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.weight.expand(len(x), 4) * 1.0

    def body(pipeline):
        pipeline.run(batch([2, 2]), 1.0)
        return gradients_of(pipeline.stage)

    first, last = on_stages(layers(lambda: nn.Linear(4, 4), Ignore), [1, 1], body)
    assert all(not gradient.any() for gradient in first.values())
    assert last["layers.1.weight"].any()


def test_shares_may_change_from_step_to_step():
    shares = [(3, 3, 1), (), (2,), (3, 3, 3, 3)]

    def body(pipeline):
        return [pipeline.run(batch(share, seed=i), 0.5) for i, share in enumerate(shares)]

    specs = stacked(4)
    _, losses = on_stages(specs, [2, 2], body)
    model = plain_model(specs)
    for i, share in enumerate(shares):
        expected = sum(squared_error(model(x), y).sum().item() for x, y in batch(share, seed=i))
        assert losses[i].total == pytest.approx(expected, rel=1e-12)
        assert losses[i].weight == sum(share)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_evaluate_sums_loss_and_metrics_in_eval_mode(num_stages):
    specs = layers(lambda: nn.Linear(4, 4), lambda: nn.Dropout(0.5), lambda: nn.Linear(4, 4))
    data = batch([4, 4, 3])

    def body(pipeline):
        pipeline.stage.train()
        sums = pipeline.evaluate(data, lambda output, target: {"above": (output > target).all(1)})
        assert all(module.training for module in pipeline.stage.modules())
        assert all(gradient is None for gradient in gradients_of(pipeline.stage).values())
        return sums

    split = {1: [3], 2: [1, 2], 3: [1, 1, 1]}[num_stages]
    *others, sums = on_stages(specs, split, body)
    assert others == [{}] * (num_stages - 1)
    model = plain_model(specs).eval()
    inputs, targets = map(torch.cat, zip(*data, strict=True))
    output = model(inputs)
    assert sums["loss"].total == pytest.approx(squared_error(output, targets).sum().item(), rel=1e-12)
    assert sums["above"] == ((output > targets).all(1).sum().item(), 11)


def test_evaluate_without_samples():
    results = on_stages(stacked(2), [1, 1], lambda pipeline: pipeline.evaluate([], lambda output, target: {}))
    assert results == [{}, {"loss": (0.0, 0.0)}]


def test_evaluate_under_rendezvous_keeps_one_output_under_way():
    links = RendezvousLinks()

    def body(pipeline):
        return pipeline.evaluate(batch([2] * 6), lambda output, target: {})

    on_stages(stacked(4), [1, 2, 1], body, links=links)
    links.check_all_is_over()


@pytest.mark.parametrize("split", [[4], [2, 2], [1, 1, 2]])
def test_every_stage_gets_the_whole_models_output(split):
    (inputs, _), *_ = batch([3])
    specs = [*stacked(3), *layers(lambda: nn.Dropout(0.5))]
    outputs = on_stages(
        specs, split, lambda pipeline: [pipeline.forward(inputs), pipeline.forward(inputs[:1])]
    )
    model = plain_model(specs).eval()
    for whole, first in outputs:
        torch.testing.assert_close(whole, model(inputs).detach())
        torch.testing.assert_close(first, model(inputs[:1]).detach())
        assert not whole.requires_grad


def test_an_answer_may_be_a_tuple():
    class Both(nn.Module):
        def forward(self, x):
            return x, (x > 0)

    (inputs, _), *_ = batch([3])
    for values, signs in on_stages(
        layers(nn.Identity, Both), [1, 1], lambda pipeline: pipeline.forward(inputs)
    ):
        torch.testing.assert_close(values, inputs)
        assert signs.dtype == torch.bool


@pytest.mark.parametrize("split", [[2], [1, 1]])
def test_a_mean_as_loss_is_refused_with_the_shapes(split):
    def mean(output, target):
        return squared_error(output, target).mean()

    with pytest.raises(UserError, match=r"loss has shape \[\], but must be \[3\]"):
        on_stages(stacked(2), split, lambda pipeline: pipeline.run(batch([3]), 1.0), loss=mean)


def test_a_metric_that_is_no_tensor_is_refused():
    with pytest.raises(UserError, match="accuracy is a float: return a tensor"):
        on_stages(
            stacked(2),
            [2],
            lambda pipeline: pipeline.evaluate(batch([3]), lambda output, target: {"accuracy": 0.5}),
        )


def test_what_cannot_be_sent_is_refused():
    class Named(nn.Module):
        def forward(self, x):
            return {x}

    with pytest.raises(UserError, match="a layer gives a set to the next"):
        on_stages(layers(Named, nn.Identity), [1, 1], lambda pipeline: pipeline.run(batch([3]), 1.0))


def test_an_exception_on_one_stage_reaches_the_caller_and_no_stage_waits_for_ever():
    seen = {}

    class Fails(nn.Module):
        def forward(self, x):
            raise ArithmeticError("layer 1 fails")

    def body(pipeline):
        try:
            pipeline.run(batch([2, 2]), 1.0)
        except Exception as error:
            seen[pipeline.stage_index] = type(error)
            raise

    with pytest.raises(ArithmeticError, match="layer 1 fails"):
        on_stages(layers(lambda: nn.Linear(4, 4), Fails, nn.Identity), [1, 1, 1], body)
    assert seen[0] is seen[2] is PeerLost


def test_the_stopwatch_knows_computing_from_waiting():
    def body(pipeline):
        pipeline.run(batch([64] * 3), 1.0)
        return pipeline._stopwatch

    first, last = on_stages(stacked(4), [2, 2], body)
    assert first.compute_s > 0
    assert first.wait_s > 0
    assert last.compute_s > 0
    assert last.wait_s > 0
    assert first.comm_s == last.comm_s == 0
    (alone,) = on_stages(stacked(4), [4], body)
    assert alone.wait_s < alone.compute_s

"""Layers as real models have them: dicts and masks, tied and repeated ones, weights of samples."""

import random

import numpy as np
import pytest
import torch
from pipelines import RendezvousLinks, batch, check_parity, layers, on_stages, squared_error, stacked
from torch import nn

from hpc_train.errors import UserError
from hpc_train.pipeline.layers import LayerSpec, build_layer, find_ties, plain_model

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
TWO_CHUNKS = ("interleaved", "zb-v")


def linear():
    return nn.Linear(4, 4)


class Open(nn.Module):
    """A dict with a mask, a number, a list of tensors, and None."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        return {"x": y, "parts": [y.sin(), (x > 0, None)], "factor": 0.5, "name": "sum", "flag": True}


class Pass(nn.Module):
    def forward(self, *, x, parts, factor, name, flag):
        assert type(factor) is float
        assert flag is True
        assert name == "sum"
        return {"x": x * factor, "parts": parts, "factor": factor, "name": name, "flag": flag}


class Close(nn.Module):
    def forward(self, x, parts, factor, name, flag):
        first, (mask, nothing) = parts
        assert mask.dtype == torch.bool
        assert nothing is None
        return torch.where(mask, x, first)


@pytest.mark.parametrize("split", [[5], [1, 4], [1, 1, 1, 2], [2, 3]])
def test_dicts_with_masks_lists_and_plain_values(split):
    check_parity(layers(linear, Open, Pass, Close, linear), split, batch([3, 3, 1]))


@pytest.mark.parametrize("schedule", TWO_CHUNKS)
def test_dicts_within_a_stage(schedule):
    specs = layers(linear, Open, Pass, Close)
    check_parity(specs, [1, 1, 1, 1], batch([3, 3, 1, 2]), schedule)


def test_shapes_that_change_with_every_micro_batch():
    """Sequences of other lengths each time, and other dtypes in the next step: nothing is declared."""
    links = RendezvousLinks()

    class Widths(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.scale

    generator = torch.Generator().manual_seed(0)
    pairs = []
    for length in (3, 9, 1, 5, 2):
        x = torch.randn(2, length, dtype=torch.float64, generator=generator)
        pairs.append((x, x.sum(1, keepdim=True)))

    def loss(output, target):
        return (output.sum(1, keepdim=True) - target).square().flatten(1).sum(1)

    def body(pipeline):
        pipeline.run(pairs, 0.1)
        return [p.grad for p in pipeline.stage.parameters()]

    results = on_stages(layers(Widths, Widths, Widths), [1, 1, 1], body, "zb-h1", loss, links)
    model = plain_model(layers(Widths, Widths, Widths))
    sum(loss(model(x), y).sum() * 0.1 for x, y in pairs).backward()
    for (found,), expected in zip(results, model.parameters(), strict=True):
        torch.testing.assert_close(found, expected.grad)
    links.check_all_is_over()


class HandWritten(nn.Module):
    """A whole stage as a user writes it: a layer used twice, and a weight used by itself."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.once = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        y = self.twice(torch.tanh(self.twice(x)))
        return self.once(y) + nn.functional.linear(y, self.once.weight.t()) * self.twice.weight.sum()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_written_by_hand(schedule):
    count = 4 if schedule in TWO_CHUNKS else 2
    check_parity(layers(*[HandWritten] * count), [1] * count, batch([2, 2, 1, 2]), schedule)


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 4)
        self.places = nn.Parameter(torch.randn(6, 4))

    def forward(self, tokens):
        return self.tokens(tokens) + self.places


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.logits = nn.Linear(4, 11, bias=False)

    def forward(self, x):
        return self.logits(self.norm(x))


def language_model():
    specs = layers(Embed, linear, nn.Tanh, linear, nn.GELU, Head)
    tied = {0: {"tokens.weight": "embedding"}, 5: {"logits.weight": "embedding"}}
    return [LayerSpec(spec.build, tied=tied.get(i, "")) for i, spec in enumerate(specs)]


def tokens(sizes):
    generator = torch.Generator().manual_seed(3)
    text = [torch.randint(0, 11, (size, 7), generator=generator) for size in sizes]
    return [(part[:, :-1], part[:, 1:]) for part in text]


def nats(output, target):
    return nn.functional.cross_entropy(output.transpose(1, 2), target, reduction="none").mean(1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_tied_layers_on_different_stages(schedule, num_stages):
    splits = {1: [6], 2: [3, 3], 3: [1, 3, 2]}
    if schedule in TWO_CHUNKS:
        splits = {1: [2, 4], 2: [1, 2, 2, 1], 3: [1, 1, 1, 1, 1, 1]}
    check_parity(language_model(), splits[num_stages], tokens([2, 2, 2, 1]), schedule, nats, runs=2)


def test_tied_layers_are_one_parameter_of_the_plain_model():
    model = plain_model(language_model())
    assert model.layers[0].tokens.weight is model.layers[5].logits.weight
    assert find_ties(language_model()) == [((0, "tokens.weight", True), (5, "logits.weight", True))]


@pytest.mark.parametrize("frozen", ["tokens", "logits"])
@pytest.mark.parametrize("split", [[6], [3, 3]])
def test_a_tie_is_as_frozen_as_its_owner_wherever_it_is_cut(frozen, split):
    def freezing(build):
        def freeze():
            layer = build()
            if hasattr(layer, frozen):
                getattr(layer, frozen).weight.requires_grad_(False)
            return layer

        return freeze

    specs = [LayerSpec(freezing(spec.build), tied=spec.tied) for spec in language_model()]
    assert plain_model(specs).layers[0].tokens.weight.requires_grad is (frozen == "logits")
    check_parity(specs, split, tokens([2, 2, 1]), loss=nats)


class HandsOnAParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.arange(4.0))

    def forward(self, x):
        return x, self.query


class Adds(nn.Module):
    def forward(self, x, query):
        return x * query


def test_a_parameter_that_is_handed_on_leaves_nothing_behind_after_evaluation():
    specs = layers(linear, HandsOnAParameter, Adds, linear)
    links = RendezvousLinks()
    micro_batches = batch([2, 2, 1])

    def evaluate(pipeline):
        pipeline.evaluate(micro_batches, lambda output, target: {})

    on_stages(specs, [2, 2], evaluate, links=links)
    links.check_all_is_over()
    check_parity(specs, [2, 2], micro_batches, links=RendezvousLinks())


def test_layers_that_draw_from_any_generator_are_the_same_on_every_rank():
    def drawn():
        layer = nn.Linear(1, 1)
        layer.register_buffer("drawn", torch.tensor([random.random(), np.random.rand()]))
        return layer

    spec = LayerSpec(drawn)
    first = build_layer(spec, 0, seed=1)
    random.random(), np.random.rand()  # another rank may have drawn more
    before = random.getstate(), np.random.get_state()[2]
    assert torch.equal(build_layer(spec, 0, seed=1).drawn, first.drawn)
    assert not (build_layer(spec, 1, seed=1).drawn == first.drawn).any()
    assert (random.getstate(), np.random.get_state()[2]) == before  # nobody else's numbers begin anew


def test_a_name_alone_ties_all_parameters_of_a_layer():
    specs = [LayerSpec(lambda: nn.Linear(4, 4).double(), tied="same") for _ in range(3)]
    assert [len(tie) for tie in find_ties(specs)] == [3, 3]
    check_parity(specs, [1, 1, 1], batch([2, 2, 1]))


def test_ties_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"layer 0 ties 'wight', but its parameters are weight, bias"):
        find_ties([LayerSpec(linear, tied={"wight": "x"})])
    with pytest.raises(UserError, match=r"layers.0.weight \[4, 4\] and layers.1.weight \[3, 4\] are tied"):
        find_ties([LayerSpec(linear, tied="x"), LayerSpec(lambda: nn.Linear(4, 3), tied="x")])


def test_a_copy_follows_its_owner():
    def body(pipeline):
        held = dict(pipeline.stage.named_parameters())
        for name, parameter in held.items():
            if not name.endswith("logits.weight"):
                with torch.no_grad():
                    parameter.add_(1)
        pipeline.share_parameters()
        return {name: p.detach().clone() for name, p in held.items()}

    first, last = on_stages(language_model(), [3, 3], body)
    torch.testing.assert_close(
        first["layers.0.tokens.weight"], last["layers.5.logits.weight"], rtol=0, atol=0
    )


@pytest.mark.parametrize("split", [[4], [2, 2]])
def test_weights_of_samples_count_over_the_whole_batch(split):
    def weighted(output, target):
        weights = torch.arange(len(target), dtype=torch.float64)
        return weights * squared_error(output, target), weights

    def body(pipeline):
        return pipeline.run(batch([3, 2]), 1.0), pipeline.evaluate(batch([3, 2]), lambda o, t: {})

    *_, (found, evaluated) = on_stages(stacked(4), split, body, loss=weighted)
    model = plain_model(stacked(4))
    totals = [weighted(model(x), y) for x, y in batch([3, 2])]
    expected = [sum(part.sum().item() for part in parts) for parts in zip(*totals, strict=True)]
    assert found == pytest.approx(expected)
    assert evaluated["loss"] == pytest.approx(expected)

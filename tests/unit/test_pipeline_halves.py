"""Backward in two halves, recomputed activations, wires, dropout: same numbers, other memory and traffic."""

import pytest
import torch
from pipelines import (
    RendezvousLinks,
    batch,
    check_parity,
    gradients_of,
    layers,
    on_stages,
    squared_error,
    stacked,
)
from torch import nn

from hpc_train.comm.interface import Wire
from hpc_train.pipeline.later import Later
from hpc_train.pipeline.layers import LayerSpec, plain_model

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]


class Convolutions(nn.Module):
    """1-d and 2-d, with and without bias, strides, groups and a padding by name."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv1d(4, 4, 3, padding=1)
        self.two = nn.Conv2d(1, 2, 3, stride=(1, 2), padding=(1, 0), bias=False)
        self.grouped = nn.Conv1d(2, 4, 1, groups=2)
        self.same = nn.Conv1d(4, 4, 3, padding="same")

    def forward(self, x):
        y = self.one(x.unsqueeze(2).expand(-1, -1, 5))  # [micro-batch, 4, 5]
        y = self.two(y.unsqueeze(1)).flatten(2)  # [micro-batch, 2, 8]
        return self.same(self.grouped(y)).mean(2) + x


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_convolutions_in_halves(schedule):
    count = 4 if schedule == "zb-v" else 2
    check_parity(layers(*[Convolutions] * count), [1] * count, batch([2, 2, 3, 1]), schedule)


class Autocast(nn.Module):
    """Mixed precision inside of a layer, where all weights are fp32."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.convolution = nn.Conv1d(4, 4, 1)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.convolution(self.inner(x).unsqueeze(2)).squeeze(2)
        return x + y.to(x.dtype)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_autocast_inside_of_a_layer(schedule):
    specs = [LayerSpec(Autocast), LayerSpec(Autocast)]
    micro_batches = [(x.float(), y.float()) for x, y in batch([2, 2, 3, 1])]
    check_parity(specs, [1, 1], micro_batches, schedule, tolerance={"rtol": 2e-2, "atol": 2e-2})


def test_the_first_half_leaves_the_weights_alone_and_the_second_completes_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 2, bias=False))
    fired = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    x = torch.randn(5, 4, requires_grad=True)
    later = Later()
    with later:
        total = model(x).square().sum()
    gate = torch.autograd.grad(total, x, retain_graph=True)[0]  # what backward at once gives
    later._kept.clear()
    later.backward_inputs([total], [x], list(model.parameters()))
    assert fired == []
    assert all(p.grad is None for p in model.parameters())
    later.backward_weights()
    assert sorted(fired) == sorted(name for name, _ in model.named_parameters())
    found = gradients_of(model)
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(x.grad, gate)
    torch.testing.assert_close(found, gradients_of(model))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recomputed_activations(schedule):
    specs = layers(
        lambda: nn.Linear(4, 4), lambda: nn.ReLU(inplace=True), lambda: nn.Linear(4, 4), Convolutions,
        nn.Tanh, lambda: nn.LayerNorm(4), lambda: nn.Linear(4, 4), nn.GELU,
    )  # fmt: skip
    split = [2, 2, 2, 2] if schedule in ("interleaved", "zb-v") else [3, 5]
    check_parity(specs, split, batch([2, 2, 3, 1]), schedule, recompute=True, runs=2)


def draws_of(split, schedule="1f1b", recompute=False, seed=5, sizes=(2, 2, 1)):
    """All gradients of a model with dropout."""
    specs = layers(*[lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))] * 4)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]

    def body(pipeline):
        pipeline.run(batch(sizes), 1.0, seed, firsts)
        return gradients_of(pipeline.stage)

    return {
        k: v
        for found in on_stages(specs, split, body, schedule, recompute=recompute)
        for k, v in found.items()
    }


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "interleaved", "zb-v"])
def test_dropout_is_the_same_with_every_schedule_cut_and_recomputation(schedule):
    """On one stage alone no thread of another draws from the same generator."""
    split = [1, 3] if schedule in ("interleaved", "zb-v") else [4]
    reference = draws_of([4])
    found = draws_of(split, schedule)
    again = draws_of(split, schedule, recompute=True)
    assert any(gradient.any() for gradient in reference.values())
    for name, gradient in reference.items():
        torch.testing.assert_close(found[name], gradient)
        torch.testing.assert_close(again[name], gradient)
    other = draws_of([4], seed=6)
    assert any((other[name] != gradient).any() for name, gradient in reference.items())


class Single(nn.Module):
    """fp32, as wires are for."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).float()

    def double(self):
        return self

    def forward(self, x):
        return torch.tanh(self.linear(x.float()))


@pytest.mark.parametrize(("wire", "limit"), [(Wire.FP16, 2e-3), (Wire.BF16, 2e-2)])
def test_activations_and_gradients_travel_in_16_bits(wire, limit):
    pairs = [(x.float(), y.float() * 1e-6) for x, y in batch([3, 3])]
    specs = layers(Single, Single, Single)
    links = RendezvousLinks()

    def body(pipeline):
        pipeline.run(pairs, 1e-9)  # gradients that fp16 by itself would lose
        return gradients_of(pipeline.stage)

    results = on_stages(specs, [1, 1, 1], body, links=links, wire=wire)
    model = plain_model(specs)
    sum(squared_error(model(x), y).sum() * 1e-9 for x, y in pairs).backward()
    found = {name: gradient for result in results for name, gradient in result.items()}
    for name, expected in gradients_of(model).items():
        assert (found[name] - expected).norm() <= limit * expected.norm(), name
    links.check_all_is_over()
    bodies = {shape for *_, shape in links.messages if shape != (2048,)}
    assert bodies == {(24,)} if wire is Wire.BF16 else {(2050,)}


def test_doubles_and_integers_travel_as_they_are_whatever_the_wire():
    check_parity(stacked(4), [2, 2], batch([2, 1]), wire=Wire.FP16)

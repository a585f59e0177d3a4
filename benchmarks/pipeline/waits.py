"""A layer whose computing is a wait of known length, so that a step can be compared with a simulated one.

    output = input * weight

            waits                                      and gives
    F       seconds.forward                            the output
    I       seconds.input                              the gradient of the input
    W       seconds.weight                             the gradient of the weight

Autograd sees two nodes, one on the way to the input and one on the way to the weight, so that whoever
cuts a backward pass in two finds each wait in the half where it belongs.
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from hpc_train.pipeline import later

_SPIN_S = 2e-4  # a sleep ends later than asked for, by less than that on a core that is free


class Seconds(NamedTuple):
    """Of one micro-batch through one layer, or through a whole stage."""

    forward: float
    input: float
    weight: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return sum(self)

    def over(self, layers: int) -> "Seconds":
        """The same, for one of so many layers."""
        return Seconds(*(seconds / layers for seconds in self))


def wait(seconds: float) -> None:
    """Return so long after the call: asleep, so that others have the core, but for the last moment."""
    until = time.perf_counter() + seconds
    if seconds > _SPIN_S:
        time.sleep(seconds - _SPIN_S)
    while time.perf_counter() < until:
        pass


class Waiting(nn.Module):
    """Scales its input [micro-batch, width] by a weight [width], and waits for it."""

    def __init__(self, width: int, seconds: Seconds) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """[micro-batch, width] to the same."""
        return waiting_product(x, self.weight, self.seconds)


class Shifted(nn.Module):
    """Adds a bias: before the first layer that waits, so that this one too has a gradient of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[micro-batch, width] to the same."""
        return x + self.bias


def waiting_product(x: Tensor, weight: Tensor, seconds: Seconds) -> Tensor:
    """Input times weight; see above."""
    if has_torch_function((x, weight)):
        product: Tensor = handle_torch_function(waiting_product, (x, weight), x, weight, seconds)
        return product
    return _WayToInput.apply(x, seconds) * _WayToWeight.apply(weight, seconds)  # type: ignore[no-any-return, no-untyped-call]


class _WayToInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: Seconds) -> Tensor:
        ctx.seconds = seconds
        wait(seconds.forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        wait(ctx.seconds.input)
        return gradients[0], None


class _WayToWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: Seconds) -> Tensor:
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        wait(ctx.seconds.weight)
        return gradients[0], None


# How hpc_train cuts it in two. PyTorch's own pipelining walks the graph of autograd and finds both ways.


def _bind(x: Tensor, weight: Tensor, seconds: Seconds) -> Any:
    return x, weight, None, {"seconds": seconds}


def _call(x: Tensor, weight: Tensor, bias: None, seconds: Seconds) -> Tensor:
    wait(seconds.forward)
    return x * weight


def _input_gradient(gradient: Tensor, x: Tensor, weight: Tensor, options: Mapping[str, Any]) -> Tensor:
    wait(options["seconds"].input)
    return gradient * weight


def _weight_gradients(kept: Any) -> list[tuple[Tensor, Tensor]]:
    wait(kept.options["seconds"].weight)
    return [(kept.weight, (kept.gradient * kept.x).sum(0))]


later._OPERATIONS[waiting_product] = later._Operation(_call, _bind, _input_gradient, _weight_gradients)

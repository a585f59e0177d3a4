"""Where the autograd graph of a stage begins and ends: a door for every tensor that crosses.

      stage 0                          stage 1
... -> output -> leave() ~~~~~~~> enter() -> input -> ...        activations: the tensor
... <--------- gradient <~~~~~~~ gradient <---------- ...        their gradients: the door's
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Door:
    """One tensor that crossed, and its gradient, which crosses the other way.

    It keeps the tensor's shape and dtype but not the tensor: after the sending only what backward
    needs stays in memory, and that autograd itself keeps. `gate` is the leaf at which the graph of an
    entered tensor begins.
    """

    def __init__(self, tensor: Tensor, gate: Tensor | None = None) -> None:
        self.gate = gate
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self.gradient: Tensor | None = None

    def take_gradient(self) -> Tensor:
        """The gradient after backward, contiguous: zeros if the loss does not depend on the tensor."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            return torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return gradient.contiguous()


def enter(tensors: Sequence[Tensor], needs_gradient: Sequence[bool]) -> tuple[list[Tensor], list[Door]]:
    """Begin a graph: the tensors as a layer takes them, and the doors where backward leaves gradients."""
    entered, doors = [], []
    for tensor, needs in zip(tensors, needs_gradient, strict=True):
        if needs:
            gate = torch.empty(0, requires_grad=True)  # without an input that needs one there is no graph
            door = Door(tensor, gate)
            tensor = _Enter.apply(gate, [tensor], door)  # type: ignore[no-untyped-call]
            doors.append(door)
        entered.append(tensor)
    return entered, doors


def leave(tensor: Tensor) -> tuple[Tensor, Door]:
    """End a graph: a root to call `torch.autograd.backward` on, and the door that gives it the gradient."""
    door = Door(tensor)
    root: Tensor = _Leave.apply(tensor, door)  # type: ignore[no-untyped-call]
    return root, door


class _Enter(torch.autograd.Function):
    """No leaf comes out, so that the stage's first layer may work in place (ReLU(inplace=True))."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, tensors: list[Tensor], door: Door) -> Tensor:
        ctx.door = door
        return tensors[0]  # not an argument itself: its alias would be a view, which refuses work in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.door.gradient = gradients[0]
        return None, None, None


class _Leave(torch.autograd.Function):
    """A number that stands for the output, and does not keep its memory."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, door: Door) -> Tensor:
        ctx.door = door
        return torch.zeros((), device=output.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.door.take_gradient(), None

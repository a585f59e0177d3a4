"""Gradients side by side in flat memory, so that many of them travel together.

parameters, as given     embedding   weight   bias   head
backward makes them      head   bias   weight   embedding
buckets                  0 [head  bias]   1 [weight]   2 [embedding]     summed in this order
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpc_train.comm.interface import Collective
from hpc_train.errors import UserError

_ALIGNMENT = 16  # elements, 64 bytes: every gradient starts where vector instructions like it


@dataclass(eq=False)
class Slot:
    """The place of one parameter's gradient in its bucket.

    `start`: of the piece of the bucket's buffer.
    `view`: that piece, with the parameter's shape and memory format.
    `fired`: the backward passes that reached the parameter in this step.
    `used`: whether this rank had a gradient when the bucket was filled.

    The first gradient of a step is copied into the bucket, the following ones are added to it there by
    autograd.  With `p.grad` a zeroed view from the start the first one would be added too: that takes the
    same time within what could be told (backward of 19 and 21 million parameters on a CPU, 1 pass: 34 and
    29 ms copied, 35 and 27 ms added; 4 passes: 136 and 106 ms, 143 and 104 ms), but a parameter that no
    pass reached would have a gradient.
    """

    name: str
    parameter: nn.Parameter
    start: int
    view: Tensor
    fired: int = 0
    used: bool = False

    def flat(self, memory: Tensor) -> Tensor:
        """The place, [elements], in `memory` that is laid out as the bucket's buffer."""
        return memory[self.start : self.start + self.view.numel()]

    def within(self, memory: Tensor) -> Tensor:
        """The place as `view` is, in `memory` that is laid out as the bucket's buffer."""
        return _view(self.flat(memory), self.parameter)

    def place(self, gradient: Tensor) -> None:
        """Write a gradient into the bucket, unless that is where it lies."""
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        if gradient.data_ptr() != self.view.data_ptr() or gradient.dtype != self.view.dtype:
            self.view.copy_(gradient.detach())

    def keep(self) -> None:
        """Make `parameter.grad` lie in the bucket; only fp32 can, as torch wants the parameter's dtype."""
        gradient = self.parameter.grad
        if gradient is not None and self.parameter.dtype == torch.float32:
            self.place(gradient)
            self._attach()

    def gather(self) -> None:
        """Fill the bucket from `parameter.grad`, whoever made it; none counts as zero."""
        gradient = self.parameter.grad
        self.used = gradient is not None
        if gradient is None:
            self.view.zero_()
        else:
            self.place(gradient)

    def scatter(self) -> None:
        """Make `parameter.grad` what the bucket holds: the view itself for fp32, else a copy."""
        if self.parameter.dtype == torch.float32:
            self._attach()
        else:
            self.parameter.grad = self.view.to(self.parameter.dtype)

    def _attach(self) -> None:
        gradient = self.parameter.grad
        if gradient is None or gradient.data_ptr() != self.view.data_ptr():
            # An alias: `p.grad.data = ...`, as old scripts write, must not move our own view.
            self.parameter.grad = self.view.detach()


@dataclass(eq=False)
class Bucket:
    """Gradients that travel together: `buffer` is fp32 [elements] from `Collective.allocate`."""

    index: int
    buffer: Tensor
    slots: list[Slot]

    def gather(self) -> None:
        """Fill the buffer from the parameters' gradients."""
        for slot in self.slots:
            slot.gather()

    def scatter(self) -> None:
        """Make the parameters' gradients what the buffer holds."""
        for slot in self.slots:
            slot.scatter()


def trained(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """Those that get gradients, each once, under its first name: tied parameters are one."""
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            first_names.setdefault(parameter, name)
    return [(name, parameter) for parameter, name in first_names.items()]


Group = list[tuple[str, nn.Parameter]]  # parameters that share a bucket, and their names


def group_parameters(named_parameters: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[Group]:
    """What shares a bucket, in the order of backward; a parameter that makes one reach `bucket_bytes` of fp32
    is its last.

    A limit from above instead would part a weight that fills a bucket from its bias, whose sum takes a
    latency for nothing.

    Raises:
        UserError: a parameter is lazy or complex.
    """
    groups: list[Group] = []
    room = 0  # bytes that the last bucket lacks
    for name, parameter in reversed(trained(named_parameters)):
        if is_lazy(parameter):
            raise UserError(f"parameter {name} has no shape yet: run the model once on some input first")
        if parameter.is_complex():
            raise UserError(f"parameter {name} is {parameter.dtype}: use two real parameters instead")
        if room <= 0:
            groups.append([])
            room = bucket_bytes
        groups[-1].append((name, parameter))
        room -= 4 * _padded(parameter.numel())
    return groups


def make_buckets(groups: Sequence[Group], collective: Collective) -> list[Bucket]:
    """A bucket for each group. All ranks have the same groups: those of a host share their memory.

    Parameters of another dtype are converted on the way in and out, so that fp64 gradients keep the
    24 bits of fp32 (an fp64 sum would send twice the bytes).

    Raises:
        UserError: a parameter is not on the collective's device.
    """
    return [_make_bucket(index, group, collective) for index, group in enumerate(groups)]


def fingerprint(groups: Sequence[Group], method: object) -> int:
    """24 bits that differ where methods, groups, or names, shapes, strides or dtypes of parameters do."""
    layout = [[(name, tuple(p.shape), p.stride(), str(p.dtype)) for name, p in group] for group in groups]
    return zlib.crc32(repr((method, layout)).encode()) >> 8


def _make_bucket(index: int, group: Group, collective: Collective) -> Bucket:
    buffer = collective.allocate(sum(_padded(parameter.numel()) for _, parameter in group))
    slots = []
    offset = 0
    for name, parameter in group:
        if parameter.device != buffer.device:
            raise UserError(
                f"parameter {name} is on {parameter.device}, but gradients are summed on {buffer.device}: "
                f"move the whole model there first"
            )
        view = _view(buffer[offset : offset + parameter.numel()], parameter)
        slots.append(Slot(name, parameter, offset, view))
        offset += _padded(parameter.numel())
    return Bucket(index, buffer, slots)


def _padded(numel: int) -> int:
    return -(-numel // _ALIGNMENT) * _ALIGNMENT


def _view(piece: Tensor, parameter: Tensor) -> Tensor:
    """`piece` with the parameter's shape, and its strides where it is dense (channels_last is)."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    inverse = sorted(range(parameter.dim()), key=order.__getitem__)
    view = piece.view([parameter.shape[dim] for dim in order]).permute(inverse)
    return view if view.stride() == parameter.stride() else piece.view(parameter.shape)

"""Pieces of parameters: what a replica's shard of a bucket holds of each.

bucket      [ weight  weight  weight  weight | bias | embedding  embedding ]
replica 0   [ piece of weight  ]                                                 its shard
replica 1                      [piece of weight  bias  piece of embedding ]      its shard
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.gradients.buckets import Bucket, Slot


@dataclass(eq=False)
class Piece:
    """The elements `begin` to `end` of a parameter, in the order of its memory.

    `parameter`: [end - begin], the whole parameter's own memory, as an optimizer wants it.
    `place`: [end - begin], their part of the bucket, which is `parameter.grad`.
    """

    slot: Slot
    begin: int
    end: int
    parameter: nn.Parameter
    place: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of a tensor like the whole parameter, however it lies in memory; a copy."""
        view = self.slot.view
        laid_out = torch.empty_strided(view.shape, view.stride(), dtype=whole.dtype, device=whole.device)
        return _flat(laid_out.copy_(whole))[self.begin : self.end].clone()


def pieces_in(bucket: Bucket, shard: slice, first: bool) -> list[Piece]:
    """The pieces in a shard of `bucket.buffer`, at most one of each parameter.

    A parameter without elements is in no shard, but an optimizer keeps state for it too: the `first`
    replica has it.

    Raises:
        UserError: a parameter is not fp32, or has gaps in its memory.
    """
    pieces = []
    for slot in bucket.slots:
        _check(slot)
        numel = slot.view.numel()
        begin, end = (min(max(edge - slot.start, 0), numel) for edge in (shard.start, shard.stop))
        if begin < end or (numel == 0 and first):
            parameter = nn.Parameter(_flat(slot.parameter.detach())[begin:end])
            place = slot.flat(bucket.buffer)[begin:end]
            parameter.grad = place
            pieces.append(Piece(slot, begin, end, parameter, place))
    return pieces


def _check(slot: Slot) -> None:
    """Raise UserError where the parameter's memory is not laid out as its place in the bucket."""
    parameter = slot.parameter
    if parameter.dtype != torch.float32:
        raise UserError(
            f"parameter {slot.name} is {parameter.dtype}, and a sharded optimizer is for float32 alone: "
            f"make it float32, or set optimizer.sharded=false"
        )
    strides = zip(parameter.shape, parameter.stride(), slot.view.stride(), strict=True)
    if parameter.numel() and any(size > 1 and mine != theirs for size, mine, theirs in strides):
        raise UserError(
            f"parameter {slot.name} of shape {list(parameter.shape)} has gaps in its memory (strides "
            f"{list(parameter.stride())}): make it contiguous, or set optimizer.sharded=false"
        )


def _flat(tensor: Tensor) -> Tensor:
    """All elements in the order of memory, [elements]: a view of a tensor without gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))

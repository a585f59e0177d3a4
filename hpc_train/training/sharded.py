"""The sharded optimizer: every replica keeps the state of its share, and updates that for all.

ZeRO stage 1 (arXiv 1910.02054).  The state, two numbers a parameter for AdamW, is divided by the replicas:

    bucket      [ weight  weight  weight  weight | bias | embedding  embedding ]
    replica 0   [ piece of weight  ]                                                 its shard
    replica 1                      [piece of weight  bias  piece of embedding ]      its shard

    1  sum      the reducer leaves in each replica's shard the sum of the gradients there
    2  update   each replica's pieces, of which weight's are memory of the parameter itself
    3  gather   the bucket, whose gradients are used up, takes the updated values to all

Step 3 copies the parameters through the buckets, once in all: it needs no memory, and they lie anywhere.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpc_train.checkpoint import snapshot
from hpc_train.checkpoint.names import optimizer_name, split_optimizer_name
from hpc_train.comm.interface import Collective, Wire
from hpc_train.config import OptimizerSettings
from hpc_train.errors import UserError
from hpc_train.gradients.buckets import Bucket, Slot
from hpc_train.training.clip import squared_norm
from hpc_train.training.optimizer import decays, make_optimizer, optimizer_of, set_learning_rate

_STEP = "step"  # the state that is one number for a whole parameter: how often it was updated


@dataclass(eq=False)
class Piece:
    """What this replica's shard holds of a parameter: elements `begin` to `end`, in the order of its memory.

    `parameter`: [end - begin], the parameter's own memory, for the optimizer.
    `place`: [end - begin], their part of the bucket, and so the gradient until the update.
    """

    slot: Slot
    begin: int
    end: int
    parameter: nn.Parameter
    place: Tensor


class ShardedOptimizer:
    """Updates this replica's shard of each bucket.

    All replicas together: `complete_gradients`, `share` and `take`.

    Args:
        settings: as for the whole optimizer; whether a piece decays is decided by its whole parameter.
        buckets: the reducer's, whose gradients it reduce-scatters.
        collective: the replicas.

    `torch`: torch's own optimizer, of the pieces; None where the shards hold no parameter.
    Raises UserError for a parameter that is not fp32, or has gaps in its memory.
    """

    def __init__(
        self, settings: OptimizerSettings, buckets: Sequence[Bucket], collective: Collective
    ) -> None:
        self._buckets = buckets
        self._collective = collective
        self._pieces = [self._cut(bucket) for bucket in buckets]
        self._by_name = {piece.slot.name: piece for pieces in self._pieces for piece in pieces}
        matrices = [piece.parameter for piece in self._by_name.values() if decays(piece.slot.parameter)]
        others = [piece.parameter for piece in self._by_name.values() if not decays(piece.slot.parameter)]
        self.torch = optimizer_of(settings, matrices, others)
        whole = {slot.name: slot.parameter for bucket in buckets for slot in bucket.slots}
        self._shapes = snapshot.optimizer_shapes(whole, make_optimizer(settings, whole.values()))
        self._keys = sorted({_key_of(name) for name in self._shapes})

    @property
    def held(self) -> set[str]:
        """The parameters of which this replica updates a piece."""
        return set(self._by_name)

    @property
    def owned(self) -> set[str]:
        """Those of which it updates the first element: each has one owner among the replicas."""
        return {piece.slot.name for piece in self._by_name.values() if piece.begin == 0}

    def gradients(self) -> list[Tensor]:
        """The sums in this replica's shards; the gaps between parameters are left out."""
        return [piece.place for piece in self._by_name.values()]

    def complete_gradients(self) -> None:
        """Make every `p.grad` whole, between sum and update.  All replicas together."""
        for bucket in self._buckets:
            self._collective.all_gather_(bucket.buffer)

    def squared_norm(self) -> float:
        """The sum of squares of the gradients that this rank speaks for."""
        return squared_norm(self.gradients())

    def step(self, learning_rate: float) -> None:
        """Update this replica's pieces with the gradients as they are now; `share` comes next."""
        if self.torch is not None:
            set_learning_rate(self.torch, learning_rate)
            self.torch.step()

    @torch.no_grad()
    def share(self) -> None:
        """Give all replicas the parameters as this one has updated them.  All replicas together."""
        for bucket, pieces in zip(self._buckets, self._pieces, strict=True):
            for piece in pieces:
                piece.place.copy_(piece.parameter)
            self._collective.all_gather_(bucket.buffer)
            for slot in bucket.slots:
                slot.parameter.copy_(slot.view)
                slot.parameter.grad = None  # it is in the bucket, which holds none any more

    def skip(self) -> None:
        """Drop the gradients of a step that updates nothing.

        What a sum leaves outside of the shard has no meaning and may lie in the gaps, which must be zero.
        """
        for bucket in self._buckets:
            bucket.buffer.zero_()

    def shapes(self) -> dict[str, snapshot.Shape]:
        """Names and shapes of the state that `restore` wants: that of the whole parameters in `held`."""
        return {name: shape for name, shape in self._shapes.items() if _parameter_of(name) in self._by_name}

    @torch.no_grad()
    def take(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """The state of these parameters, whole, by the names that a checkpoint has; copies, on the CPU.

        By default `owned`: the replicas divide the state among them, as one may have no room for it all.
        It travels through the buckets, between two steps.  All replicas together, each with names of its
        own.  State that is not there yet is zero: what torch begins with.
        """
        names = self.owned if names is None else names
        mine = snapshot.take_optimizer(
            {name: piece.parameter for name, piece in self._by_name.items()}, self.torch
        )
        taken: dict[str, Tensor] = {}
        for key in self._keys:
            if key == _STEP:
                steps = self._steps(mine)
                taken |= {optimizer_name(name, key): steps[name] for name in names}
                continue
            for bucket, pieces in zip(self._buckets, self._pieces, strict=True):
                for piece in pieces:
                    value = mine.get(optimizer_name(piece.slot.name, key))
                    piece.place.copy_(value) if value is not None else piece.place.zero_()
                self._collective.all_gather_(bucket.buffer)
                for slot in bucket.slots:
                    if slot.name in names:
                        taken[optimizer_name(slot.name, key)] = slot.view.to("cpu", copy=True)
        return taken

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from the state of whole parameters, wherever it comes from; the parameters are in place.

        Names are those of `shapes`; a parameter that has no state among `tensors` begins anew.
        """
        cut = {}
        for name in self.shapes():
            if name in tensors:
                piece, whole = self._by_name[_parameter_of(name)], tensors[name]
                if _key_of(name) != _STEP:
                    view = piece.slot.view
                    laid_out = torch.empty_strided(view.shape, view.stride(), dtype=whole.dtype).copy_(whole)
                    whole = _flat(laid_out)[piece.begin : piece.end]
                cut[name] = whole.clone()  # or the piece would keep all of it in memory
        parameters = {name: piece.parameter for name, piece in self._by_name.items()}
        snapshot.restore_optimizer(cut, parameters, self.torch)

    def _cut(self, bucket: Bucket) -> list[Piece]:
        """The pieces in this replica's shard of a bucket."""
        shard = self._collective.shard(bucket.buffer.numel())
        pieces = []
        for slot in bucket.slots:
            _check(slot)
            numel = slot.view.numel()
            offset = slot.view.storage_offset() - bucket.buffer.storage_offset()
            begin, end = (min(max(edge - offset, 0), numel) for edge in (shard.start, shard.stop))
            # The state of a parameter without elements belongs into checkpoints too: the first one has it.
            if begin < end or (numel == 0 and self._collective.rank == 0):
                parameter = nn.Parameter(_flat(slot.parameter.detach())[begin:end])
                place = _flat(slot.view)[begin:end]
                parameter.grad = place
                pieces.append(Piece(slot, begin, end, parameter, place))
        return pieces

    def _steps(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """How often each parameter was updated, which its owner knows.  All replicas together."""
        slots = [slot for bucket in self._buckets for slot in bucket.slots]
        owned = self.owned
        zero = torch.zeros(())
        steps = torch.stack(
            [mine.get(optimizer_name(s.name, _STEP), zero) if s.name in owned else zero for s in slots]
        ).to(self._buckets[0].buffer.device)
        self._collective.sum_(steps, Wire.FP32)
        return {slot.name: step.clone() for slot, step in zip(slots, steps.cpu(), strict=True)}


def _check(slot: Slot) -> None:
    """Raise UserError where the parameter's memory is not what its place in the bucket is."""
    parameter = slot.parameter
    if parameter.dtype != torch.float32:
        raise UserError(
            f"parameter {slot.name} is {parameter.dtype}, and a sharded optimizer is "
            f"for float32 alone: make it float32, or set optimizer.sharded=false"
        )
    strides = [
        (mine, theirs)
        for size, mine, theirs in zip(parameter.shape, parameter.stride(), slot.view.stride(), strict=True)
        if size > 1
    ]
    if parameter.numel() and any(mine != theirs for mine, theirs in strides):
        raise UserError(
            f"parameter {slot.name} of shape {list(parameter.shape)} has gaps in its memory (strides "
            f"{list(parameter.stride())}): make it contiguous, or set optimizer.sharded=false"
        )


def _flat(tensor: Tensor) -> Tensor:
    """All elements in the order of memory, [elements]: a view of a tensor without gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _parameter_of(name: str) -> str:
    parts = split_optimizer_name(name)
    assert parts is not None, name
    return parts[0]


def _key_of(name: str) -> str:
    parts = split_optimizer_name(name)
    assert parts is not None, name
    return parts[1]

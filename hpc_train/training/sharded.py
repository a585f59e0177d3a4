"""The sharded optimizer: every replica keeps the state of its share, and updates that for all.

ZeRO stage 1 (arXiv 1910.02054).  The state, two numbers a parameter for AdamW, is divided by the replicas.

    1  sum      the reducer leaves in each replica's shard of a bucket the sum of the gradients there
    2  update   each replica its pieces, which are memory of the parameters themselves
    3  share    the bucket, whose gradients are used up, takes the updated values to all

Step 3 copies the parameters through the buckets, once in all: it needs no memory, and they lie anywhere.
Shards are cut by blocks of some thousand values, so that buckets of a few blocks are not divided evenly.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hpc_train.checkpoint import snapshot
from hpc_train.checkpoint.names import optimizer_name, split_optimizer_name
from hpc_train.comm.interface import Collective, Wire
from hpc_train.config import OptimizerSettings
from hpc_train.gradients.buckets import Bucket
from hpc_train.training.clip import squared_norm
from hpc_train.training.optimizer import decays, make_optimizer, optimizer_of, set_learning_rate
from hpc_train.training.pieces import pieces_in

_STEP = "step"  # the state that is one number for a whole parameter: how often it was updated


class ShardedOptimizer:
    """Updates this replica's shard of each bucket.  WholeOptimizer has the same methods.

    All replicas together: `complete_gradients`, `share`, `take` and `moved_to`.

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
        self._settings = settings
        self._buckets = buckets
        self._collective = collective
        self._pieces = [
            pieces_in(bucket, collective.shard(bucket.buffer.numel()), first=collective.rank == 0)
            for bucket in buckets
        ]
        self._by_name = {piece.slot.name: piece for pieces in self._pieces for piece in pieces}
        self._parameters = {name: piece.parameter for name, piece in self._by_name.items()}
        matrices = [piece.parameter for piece in self._by_name.values() if decays(piece.slot.parameter)]
        others = [piece.parameter for piece in self._by_name.values() if not decays(piece.slot.parameter)]
        self.torch = optimizer_of(settings, matrices, others)
        self._slots = [slot for bucket in buckets for slot in bucket.slots]
        whole = {slot.name: slot.parameter for slot in self._slots}
        self._shapes = snapshot.optimizer_shapes(whole, make_optimizer(settings, whole.values()))
        writers = divide([parameter.numel() for parameter in whole.values()], collective.size)
        self._written = {
            name for name, writer in zip(whole, writers, strict=True) if writer == collective.rank
        }

    def gradients(self) -> list[Tensor]:
        """The sums in this replica's shards; the gaps between parameters are left out."""
        return [piece.place for piece in self._by_name.values()]

    def complete_gradients(self) -> None:
        """Make every `p.grad` whole, between sum and update."""
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
        """Give all replicas the parameters as this one has updated them."""
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
        """Names and shapes of the state to read: that of the whole parameters of which there is a piece."""
        return {name: shape for name, shape in self._shapes.items() if _split(name)[0] in self._by_name}

    def take(self) -> dict[str, Tensor]:
        """The state that this rank writes into a checkpoint, by name: whole, in memory of its own.

        It comes together bucket by bucket, between two steps.  The replicas divide the writing, as one of
        them may have no room for all.  State that is not there yet is zero: what torch begins with.
        """
        return {
            name: whole.to("cpu", copy=True)
            for name, whole in self._all_state()
            if _split(name)[0] in self._written
        }

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """What `restore` wants of a tensor among `shapes`, in memory of its own."""
        parameter, key = _split(name)
        return whole.clone() if key == _STEP else self._by_name[parameter].of(whole)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from state that was cut; a parameter that has none among `tensors` begins anew."""
        snapshot.restore_optimizer(tensors, self._parameters, self.torch)

    def moved_to(self, buckets: Sequence[Bucket]) -> "ShardedOptimizer":
        """The same optimizer over other buckets of the same parameters, between two steps."""
        moved = ShardedOptimizer(self._settings, buckets, self._collective)
        wanted = moved.shapes()
        moved.restore({name: moved.cut(name, whole) for name, whole in self._all_state() if name in wanted})
        return moved

    def _all_state(self) -> Iterator[tuple[str, Tensor]]:
        """All state, whole, by name, each valid until the next comes.  To be walked to the end."""
        mine = snapshot.take_optimizer(self._parameters, self.torch)
        for key in sorted({_split(name)[1] for name in self._shapes}):
            if key == _STEP:
                yield from self._steps(mine)
                continue
            for bucket, pieces in zip(self._buckets, self._pieces, strict=True):
                for piece in pieces:
                    value = mine.get(optimizer_name(piece.slot.name, key))
                    piece.place.copy_(value) if value is not None else piece.place.zero_()
                self._collective.all_gather_(bucket.buffer)
                for slot in bucket.slots:
                    yield optimizer_name(slot.name, key), slot.view

    def _steps(self, mine: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """How often each parameter was updated, which the replica with its first element tells all."""
        names = [optimizer_name(slot.name, _STEP) for slot in self._slots]
        told = {
            optimizer_name(piece.slot.name, _STEP) for piece in self._by_name.values() if piece.begin == 0
        }
        steps = torch.zeros(len(names), device=self._buckets[0].buffer.device)
        for index, name in enumerate(names):
            if name in told and name in mine:
                steps[index] = mine[name]
        self._collective.sum_(steps, Wire.FP32)
        yield from zip(names, steps, strict=True)


def divide(sizes: Sequence[int], shares: int) -> list[int]:
    """The share of each of these things: the one that has least so far."""
    held = [0] * shares
    chosen = []
    for size in sizes:
        share = min(range(shares), key=held.__getitem__)
        held[share] += size
        chosen.append(share)
    return chosen


def _split(name: str) -> tuple[str, str]:
    """The parameter and the key of an optimizer state's name."""
    parts = split_optimizer_name(name)
    assert parts is not None, name
    return parts

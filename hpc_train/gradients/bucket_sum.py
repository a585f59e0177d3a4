"""How one bucket is summed: the contract, and the plain way, which sends it whole.

powersgd.py has the other way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hpc_train.comm.interface import Collective, Wire
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.residual import Residual


class BucketSum(Protocol):
    """The sums of one bucket, step by step.

    `residual`: None without error feedback.
    `lengths`: of the buffers that travel, for `Collective.prepare`.
    """

    residual: Residual | None
    lengths: tuple[int, ...]

    def sum_(self) -> None:
        """Replace the bucket's buffer by its sum over the replicas; blocks.  All replicas together."""

    def skip(self) -> None:
        """Nobody uses the sum that was made: drop what it left out, as a part of it."""

    def bases(self) -> Mapping[str, Tensor]:
        """By parameter, what all replicas alike remember from step to step."""

    def resume(self, bases: Mapping[str, Tensor], steps: int) -> None:
        """Go on after `steps` steps with what `bases` gave; parameters that are not among them begin anew."""


class Method(Protocol):
    """A way to sum buckets.  Its `repr` is equal where replicas fit together; its `str` is for people."""

    @property
    def wire(self) -> Wire:
        """The number format between hosts."""

    @property
    def error_feedback(self) -> bool:
        """Whether what is left out of one sum is added to the next."""

    def of(self, bucket: Bucket, collective: Collective) -> BucketSum:
        """The sums of this bucket.  All replicas together."""


@dataclass(frozen=True)
class Whole:
    """Sends all of a bucket.

    `sharded`: only this replica's shard of each bucket becomes the sum; the rest has no meaning.
    """

    wire: Wire = Wire.FP32
    feedback: bool = False
    sharded: bool = False

    @property
    def error_feedback(self) -> bool:
        """See Method: there is something to feed back where the wire rounds."""
        return self.feedback and self.wire.lossy

    def of(self, bucket: Bucket, collective: Collective) -> "WholeSum":
        """See Method."""
        return WholeSum(
            bucket,
            collective,
            self.wire,
            Residual(bucket.buffer, collective) if self.error_feedback else None,
            self.sharded,
        )

    def __str__(self) -> str:
        if not self.wire.lossy:
            return f"{self.wire.value} wire"
        return f"{self.wire.value} wire {'with' if self.feedback else 'without'} error feedback"


class WholeSum:
    """One bucket in one sum on a wire."""

    def __init__(
        self,
        bucket: Bucket,
        collective: Collective,
        wire: Wire,
        residual: Residual | None = None,
        sharded: bool = False,
    ) -> None:
        self.residual: Residual | None = residual
        self.lengths: tuple[int, ...] = (bucket.buffer.numel(),)
        self._buffer = bucket.buffer
        self._wire = wire
        self._sum = collective.reduce_scatter_ if sharded else collective.sum_

    def sum_(self) -> None:
        """See BucketSum."""
        if self.residual is None:
            self._sum(self._buffer, self._wire)
        else:
            self._sum(self._buffer, self._wire, self.residual.bring_in(self._buffer))
            self.residual.drop_not_finite()

    def skip(self) -> None:
        """See BucketSum."""
        if self.residual is not None:
            self.residual.drop()

    def bases(self) -> Mapping[str, Tensor]:
        """See BucketSum."""
        return {}

    def resume(self, bases: Mapping[str, Tensor], steps: int) -> None:
        """See BucketSum: every step is like the first."""


def prepare(sums: Sequence[BucketSum], method: Method, collective: Collective) -> list[str]:
    """Let the collective measure with the largest buffer of each doubling of size; what it chose, by line.

    All replicas together.
    """
    largest: dict[int, int] = {}
    for numel in sorted(numel for each in sums for numel in each.lengths):
        largest[numel.bit_length()] = numel
    told = [collective.prepare(numel, method.wire) for numel in largest.values()]
    return [line for line in told if line]

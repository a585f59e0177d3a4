"""PowerSGD: matrices travel as products of two thin ones, for networks where bytes are all that counts.

    M = gradient + residual, of each replica         [n, m]
    P = M Q       sum over replicas, orthonormal     [n, r]     all P's of a bucket in one buffer
    Q = M^T P     sum over replicas                  [m, r]     all Q's in another, with what travels whole
    gradient = P Q^T                                            the same on all replicas
    residual = M - P (this replica's Q)^T                       is orthogonal to P: the next sum's matter

arXiv 1905.13727, algorithms 1 and 2: one step of power iteration, begun from the Q of the last step.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from hpc_train.comm.interface import Collective, Wire
from hpc_train.gradients.bucket_sum import BucketSum, WholeSum
from hpc_train.gradients.buckets import Bucket, Slot
from hpc_train.gradients.residual import Residual


@dataclass(frozen=True)
class PowerSGD:
    """Sums parameters of two and more dimensions as matrices [first dimension, the others] of rank `rank`.

    Vectors, and matrices that the thin ones would not make smaller, travel whole.

    `warm_up_steps`: so many first steps send whole gradients, while these change fast.
    `feedback`: keep residuals, which take a gradient's memory on every replica; without them what is left
    out is lost.
    `seed`: of the first Q's.
    """

    rank: int = 16
    warm_up_steps: int = 100
    wire: Wire = Wire.FP32
    feedback: bool = True
    seed: int = 0

    @property
    def error_feedback(self) -> bool:
        """See bucket_sum.Method."""
        return self.feedback

    def of(self, bucket: Bucket, collective: Collective) -> BucketSum:
        """See bucket_sum.Method."""
        residual = Residual(bucket.buffer, collective)
        whole = WholeSum(bucket, collective, self.wire, residual if self.feedback else None)
        matrices = [slot for slot in bucket.slots if is_thinned(_sides(slot), self.rank)]
        return PowerSGDSum(self, bucket, matrices, collective, residual, whole) if matrices else whole

    def __str__(self) -> str:
        feedback = "with" if self.feedback else "without"
        return (
            f"PowerSGD of rank {self.rank} on the {self.wire.value} wire, {feedback} error feedback, after "
            f"{self.warm_up_steps} steps of whole gradients"
        )


def is_thinned(sides: tuple[int, int], rank: int) -> bool:
    """Whether a matrix [n, m] has more elements than P [n, rank] and Q [m, rank] together."""
    n, m = sides
    return (n + m) * rank < n * m


class PowerSGDSum:
    """One bucket in two sums of thin matrices.

    All replicas end with the same bits where they compute alike: on processors of one kind with equally
    many torch threads.  The update that follows is as the optimizer's own on different processors.

    A sum that is not finite becomes NaN as a whole, and leaves Q and what is finite of the residual as
    they were before.
    """

    def __init__(
        self,
        method: PowerSGD,
        bucket: Bucket,
        matrices: Sequence[Slot],
        collective: Collective,
        residual: Residual,
        whole: WholeSum,
    ) -> None:
        self.residual: Residual | None = residual if method.feedback else None
        self._owed = residual.values
        self._method = method
        self._buffer = bucket.buffer
        self._collective = collective
        self._whole = whole
        self._steps = 0
        self._undone = False  # the last sum
        # Equal shapes side by side: their P's are made orthonormal in one call.
        ordered = sorted(matrices, key=lambda slot: (*_sides(slot), slot.start))
        rest = [slot for slot in bucket.slots if slot not in matrices]
        rank = method.rank
        lefts = sum(_sides(slot)[0] * rank for slot in ordered)
        rights = sum(_sides(slot)[1] * rank for slot in ordered)
        self._lefts = collective.allocate(lefts)
        self._rights = collective.allocate(rights + sum(slot.view.numel() for slot in rest))
        self._rounded = torch.zeros_like(self._rights) if method.wire.lossy and method.feedback else None
        self._matrices: list[_Matrix] = []
        self._groups: list[Tensor] = []  # [matrices, n, rank], views of the P's that have the same shape
        left = right = 0
        for (n, m), group in groupby(ordered, key=_sides):
            begin = left
            for slot in group:
                self._matrices.append(
                    _Matrix(
                        name=slot.name,
                        gradient=slot.flat(bucket.buffer).view(n, m),
                        owed=slot.flat(self._owed).view(n, m),
                        left=self._lefts[left : left + n * rank].view(n, rank),
                        right=self._rights[right : right + m * rank].view(m, rank),
                        basis=first_basis(method.seed, slot.name, m, rank).to(bucket.buffer.device),
                    )
                )
                left, right = left + n * rank, right + m * rank
            self._groups.append(self._lefts[begin:left].view(-1, n, rank))
        self._rest: list[tuple[Tensor, Tensor, slice]] = []  # gradient, residual, place beside the Q's
        for slot in rest:
            place = slice(right, right + slot.view.numel())
            self._rest.append((slot.flat(bucket.buffer), slot.flat(self._owed), place))
            right = place.stop
        self.lengths: tuple[int, ...] = (self._lefts.numel(), self._rights.numel())
        if method.warm_up_steps:
            self.lengths += whole.lengths

    def sum_(self) -> None:
        """See BucketSum."""
        self._steps += 1
        self._undone = False
        if self._steps <= self._method.warm_up_steps:
            self._whole.sum_()
            return
        if not self._method.feedback:
            self._owed.zero_()
        self._owed += self._buffer
        for x in self._matrices:
            torch.mm(x.owed, x.basis, out=x.left)
        self._collective.sum_(self._lefts, self._method.wire)
        if not _finite(self._lefts):
            self._undo()
            return
        for group in self._groups:
            group.copy_(_orthonormal(group))
        for x in self._matrices:
            torch.mm(x.owed.T, x.left, out=x.right)
        for _, owed, place in self._rest:
            self._rights[place] = owed
        mine = self._rights.clone()
        if self._rounded is not None:
            self._rounded.zero_()
        self._collective.sum_(self._rights, self._method.wire, self._rounded)
        if not _finite(self._rights):
            self._undo()
            return
        if self._rounded is not None:
            mine -= self._rounded  # what of this replica's Q has travelled
        self._take(mine)

    def skip(self) -> None:
        """See BucketSum."""
        if self.residual is not None and not self._undone:
            self.residual.drop()

    def bases(self) -> Mapping[str, Tensor]:
        """See BucketSum: the Q's, orthonormal, [m, rank]."""
        return {x.name: x.basis for x in self._matrices}

    def resume(self, bases: Mapping[str, Tensor], steps: int) -> None:
        """See BucketSum."""
        self._steps = steps
        for x in self._matrices:
            if x.name in bases:
                x.basis.copy_(bases[x.name])

    def _take(self, mine: Tensor) -> None:
        """Gradients from the sums of P and Q, residuals from what of this replica's Q went there: `mine`."""
        begin = 0
        for x in self._matrices:
            sent = mine[begin : begin + x.right.numel()].view_as(x.right)
            begin += x.right.numel()
            x.owed.addmm_(x.left, sent.T, alpha=-1)
            torch.mm(x.left, x.right.T, out=x.gradient)
            # Orthonormal, and so at full rank even where the gradient was zero.
            x.basis.copy_(_orthonormal(x.right))
        for gradient, owed, place in self._rest:
            gradient.copy_(self._rights[place])
            owed -= mine[place]

    def _undo(self) -> None:
        """Be as before a step that all replicas skip, as its gradient is not finite."""
        self._owed.sub_(self._buffer).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self._buffer.fill_(math.nan)
        self._undone = True


@dataclass(frozen=True, eq=False)
class _Matrix:
    """One parameter's matrices; all but `basis` are views."""

    name: str
    gradient: Tensor  # [n, m], of the bucket
    owed: Tensor  # [n, m], of the residual
    left: Tensor  # P, [n, rank]
    right: Tensor  # Q, [m, rank]
    basis: Tensor  # the last step's Q, orthonormal, [m, rank]


def first_basis(seed: int, name: str, m: int, rank: int) -> Tensor:
    """An orthonormal [m, rank] to begin with: the same for this parameter on every replica and any grid."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return _orthonormal(torch.randn(m, rank, generator=generator))


def _orthonormal(matrices: Tensor) -> Tensor:
    """A basis [..., n, rank] of what the columns span; others complete it where they are dependent."""
    basis: Tensor = torch.linalg.qr(matrices).Q
    return basis


def _sides(slot: Slot) -> tuple[int, int]:
    """The parameter's gradient as a matrix [n, m]: its outermost dimension in memory, and the others."""
    if slot.view.dim() < 2 or slot.view.numel() == 0:
        return 1, slot.view.numel()
    n: int = max(zip(slot.view.stride(), slot.view.shape, strict=True))[1]
    return n, slot.view.numel() // n


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.sum().isfinite())

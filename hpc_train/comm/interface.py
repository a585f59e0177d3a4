"""The contracts of communication: what the rest of the package may ask of a backend.

A backend (mpi.py, torch_dist.py, loopback.py) implements these; comm/connect.py alone chooses one.

    World         all ranks of the job; makes the three below once a grid is known
    ControlPlane  small messages among all ranks: reports, plans, agreement
    PeerLink      activations and their gradients, from stage to stage of one replica
    Collective    gradient sums among the replicas of one stage

Every method of `World`, `Collective` and `ControlPlane` except `abort` is collective: all ranks of
its group call it, in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from hpc_train.grid import Grid

if TYPE_CHECKING:  # the contracts alone must not make anybody wait for torch
    import torch

T_co = TypeVar("T_co", covariant=True)

# Tags of PeerLink are smaller than this: the least that the MPI standard promises (MPI_TAG_UB).
TAG_LIMIT = 32_767


class Wire(str, Enum):
    """The number format of gradients on the network; sums are always made in fp32."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"

    @property
    def lossy(self) -> bool:
        """Whether values are rounded on their way."""
        return self is not Wire.FP32


@dataclass
class Losses:
    """What lossy wires lost, counted up: on this rank, of the values that it encoded."""

    overflows: int = 0  # values that were not finite: a scale of each block's own keeps all others in range
    underflows: int = 0  # values that were not zero and became zero


class Work(Protocol):
    """A transfer under way.  The tensor belongs to the backend until `wait` returns."""

    def wait(self) -> None:
        """Return when the transfer is complete.  Raises PeerLost; never waits for a dead rank."""


class Transfer(Work, Protocol):
    """A message on its way."""

    def is_complete(self) -> bool:
        """Whether `wait` would return at once.  Raises PeerLost."""


class Pending(Protocol[T_co]):
    """A control message under way."""

    def result(self) -> T_co:
        """Wait for it and return what came.  Raises PeerLost."""


class PeerLink(Protocol):
    """Point-to-point transfers between the stages of one replica.

    Two messages with the same tag between the same two stages arrive in the order sent.
    Tensors are contiguous, of any dtype, on any device; sizes of both sides are equal.
    """

    def isend(self, tensor: "torch.Tensor", stage: int, tag: int) -> Transfer:
        """Start to send `tensor` to `stage`; it must not change until the Work is waited for."""

    def irecv(self, out: "torch.Tensor", stage: int, tag: int) -> Transfer:
        """Start to receive into `out` from `stage`; it is filled when the Work is waited for."""


class Collective(Protocol):
    """Sums among the replicas of one stage; `rank` is the replica's number among `size`.

    A buffer is fp32, contiguous and of the same length on all replicas; it lies at the same place of
    the memory that they allocated together, or on no replica in such memory.
    """

    rank: int
    size: int
    threaded: bool  # True: sums may run in one helper thread beside the main thread's communication
    losses: Losses

    def allocate(self, numel: int) -> "torch.Tensor":
        """Zeroed fp32 memory, [numel], from which sums are fastest.  Lives as long as the tensor."""

    def sum_(self, buffer: "torch.Tensor", wire: Wire, residual: "torch.Tensor | None" = None) -> None:
        """Replace `buffer` by its sum over the replicas; blocks.

        All replicas end with the same bits.  A lossy wire rounds what is sent: each host's contribution
        once, or partial sums log2(hosts) times, and the sum once.  Power-of-two scales travel along, so
        that nothing overflows; values that are not finite stay so.

        Args:
            buffer: [numel].
            wire: the number format between hosts.
            residual: fp32, [numel], zeros at first: error feedback (arXiv 1901.09847).  What lossy wires
                rounded off in the last sum is added to this one, and what this one rounds off is left
                there.  Only its sum over the replicas has a meaning.
        """

    def shard(self, numel: int) -> slice:
        """The part of a buffer of `numel` values that is of this replica; all parts are the whole."""

    def reduce_scatter_(
        self, buffer: "torch.Tensor", wire: Wire, residual: "torch.Tensor | None" = None
    ) -> None:
        """Like `sum_`, for `buffer[shard(numel)]` alone; what the rest holds afterwards has no meaning."""

    def all_gather_(self, buffer: "torch.Tensor") -> None:
        """Replace each replica's shard of `buffer` by what that replica holds there, exactly; blocks."""

    def prepare(self, numel: int, wire: Wire) -> str:
        """Measure the ways to sum `numel` values on this wire and use the fastest from now on.

        Returns what was measured and chosen, in one line; "" where there is nothing to choose.
        """

    def max(self, value: float) -> float:
        """The largest of the replicas' values."""

    def broadcast_(self, tensor: "torch.Tensor", root: int) -> None:
        """Replace `tensor` by replica `root`'s; blocks."""

    def barrier(self) -> None:
        """Return when all replicas have called it."""

    def close(self) -> None:
        """Free what the backend holds for it."""


class ControlPlane(Protocol):
    """Small messages among all ranks of the job, on a channel of their own."""

    rank: int
    size: int

    def gather(self, record: bytes) -> Pending[list[bytes] | None]:
        """Start to hand `record`, of the same length on all ranks, to rank 0.

        The result is the records by rank on rank 0, and None elsewhere.
        """

    def broadcast(self, record: bytes | None, num_bytes: int) -> Pending[bytes]:
        """Start to give rank 0's `record` of `num_bytes` to all; other ranks pass None."""

    def all_gather(self, data: bytes) -> list[bytes]:
        """Everybody's `data`, of any length, by rank; blocks."""

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks in fp64, added in the order of ranks: the same bits everywhere; blocks."""

    def agree(self, flag: bool) -> bool:
        """True when it is true on every rank; blocks."""

    def barrier(self) -> None:
        """Return when all ranks have called it."""

    def abort(self, exit_code: int) -> NoReturn:
        """End every rank of the job at once, from any thread; not collective."""


class World(Protocol):
    """All ranks of the job."""

    rank: int
    size: int
    host: str
    local_rank: int  # among the ranks on this host
    local_size: int
    control: ControlPlane

    def peer_link(self, grid: Grid) -> PeerLink:
        """The link among the stages of this rank's replica."""

    def collective(self, grid: Grid, device: "torch.device") -> Collective:
        """The collective among the replicas of this rank's stage, for tensors on `device`."""

    def describe(self) -> dict[str, Any]:
        """Backend, library, version, thread level: for environment.json and doctor."""

    def close(self) -> None:
        """Leave in good order, all ranks together."""

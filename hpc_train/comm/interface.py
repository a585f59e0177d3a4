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


class Work(Protocol):
    """A transfer under way.  The tensor belongs to the backend until `wait` returns."""

    def wait(self) -> None:
        """Return when the transfer is complete.  Raises PeerLost; never waits for a dead rank."""


class Pending(Protocol[T_co]):
    """A control message under way."""

    def result(self) -> T_co:
        """Wait for it and return what came.  Raises PeerLost."""


class PeerLink(Protocol):
    """Point-to-point transfers between the stages of one replica.

    Two messages with the same tag between the same two stages arrive in the order sent.
    Tensors are contiguous, of any dtype, on any device; sizes of both sides are equal.
    """

    def isend(self, tensor: "torch.Tensor", stage: int, tag: int) -> Work:
        """Start to send `tensor` to `stage`; it must not change until the Work is waited for."""

    def irecv(self, out: "torch.Tensor", stage: int, tag: int) -> Work:
        """Start to receive into `out` from `stage`; it is filled when the Work is waited for."""


class Collective(Protocol):
    """Sums among the replicas of one stage; `rank` is the replica's number among `size`."""

    rank: int
    size: int
    threaded: bool  # True: sum_ may run in one helper thread beside the main thread's communication

    def allocate(self, numel: int) -> "torch.Tensor":
        """Zeroed fp32 memory, [numel], from which `sum_` is fastest.  Lives as long as the tensor."""

    def sum_(self, buffer: "torch.Tensor", wire: Wire) -> None:
        """Replace `buffer` (fp32, contiguous) by its sum over the replicas; blocks.

        All replicas end with the same bits.  A lossy wire rounds each contribution once and the
        sum once, under a power-of-two scale agreed so that nothing overflows; values that are not
        finite stay so.
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

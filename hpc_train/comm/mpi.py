"""The world over MPI: control plane, peer links and collectives, each on a communicator of its own.

Importing this file starts MPI, if mpi4py has not yet; connect.py sets first what must be set before.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpc_train.comm.crowding import crowded
from hpc_train.comm.interface import ControlPlane
from hpc_train.comm.mpi_collective import MpiCollective
from hpc_train.comm.mpi_host import find_hosts
from hpc_train.comm.mpi_memory import CHUNK_BYTES, EAGER_BYTES, chunks, gpu_aware, reachable
from hpc_train.comm.mpi_waits import Waits
from hpc_train.comm.routes import Hosts
from hpc_train.grid import Grid

T = TypeVar("T")

LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}
_TURN_BEFORE_ABORT_S = 1.0  # the thread whose turn it is returns within microseconds, if at all


class MpiWorld:
    """See interface.World.  Who shares a host, and its name, comes from MPI: no launcher's variables."""

    def __init__(self) -> None:
        world = MPI.COMM_WORLD
        self.rank = world.rank
        self.size = world.size
        self.host = MPI.Get_processor_name()
        neighbours = world.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        self.local_rank = neighbours.rank
        self.local_size = neighbours.size
        neighbours.Free()
        yields = MPI.get_vendor()[0] == "Open MPI"  # connect.py has told it to
        self._waits = Waits(MPI.Query_thread(), patient=crowded(self.local_size) and not yields)
        self._control = MpiControl(world.Dup(), self._waits)
        self.control: ControlPlane = self._control
        self._links: list[MPI.Comm] = []

    def peer_link(self, grid: Grid) -> "MpiPeerLink":
        """See interface.World."""
        place = grid.place(self.rank)
        comm = self._split(place.replica, place.stage)
        self._links.append(comm)
        return MpiPeerLink(comm, self._waits, find_hosts(comm, self._waits))

    def collective(self, grid: Grid, device: torch.device) -> MpiCollective:
        """See interface.World."""
        place = grid.place(self.rank)
        comm = self._split(place.stage, place.replica)
        return MpiCollective(comm, self._waits, device)

    def _split(self, color: int, key: int) -> MPI.Comm:
        """The ranks that give the same color, numbered by key."""
        world = MPI.COMM_WORLD
        return self._waits.post(world.Split, color, key, comm=world, doing="the making of a communicator")

    def describe(self) -> dict[str, Any]:
        """See interface.World."""
        return {
            "backend": "mpi",
            "library": MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 "),
            "vendor": " ".join([MPI.get_vendor()[0], ".".join(map(str, MPI.get_vendor()[1]))]),
            "standard": ".".join(map(str, MPI.Get_version())),
            "thread_level": LEVELS[MPI.Query_thread()],
            "gpu_aware": gpu_aware(),
            "ranks": self.size,
        }

    def close(self) -> None:
        """See interface.World.  MPI itself is ended by mpi4py when the process ends."""
        self.control.barrier()
        for comm in self._links:
            comm.Free()
        self._control.close()


class MpiWork:
    """See interface.Transfer."""

    def __init__(
        self,
        requests: Sequence[MPI.Request],
        memory: Tensor,
        link: "MpiPeerLink",
        doing: str,
        out: Tensor | None = None,
    ) -> None:
        self._requests = requests
        self._memory = memory  # kept alive for MPI
        self._link = link
        self._doing = doing
        self._out = out

    def wait(self) -> None:
        """See interface.Work."""
        self._link.waits.wait(self._requests, self._link.comm, self._doing)
        if self._out is not None and self._out.data_ptr() != self._memory.data_ptr():
            self._out.view(-1).copy_(self._memory)
        self._out = None

    def is_complete(self) -> bool:
        """See interface.Transfer."""
        return self._link.waits.complete(self._requests, self._link.comm, self._doing)


class MpiPeerLink:
    """See interface.PeerLink; ranks of its communicator are stages.

    MPI sends a short message at once, and the network carries it while both sides compute.  For a long one
    it waits until both have called it again; so what goes to another host is cut.
    """

    def __init__(self, comm: MPI.Comm, waits: Waits, hosts: Hosts) -> None:
        self.comm = comm
        self.waits = waits
        here = hosts.of[comm.rank]
        whole = gpu_aware()  # device memory is not sent at once, however short
        self._piece_bytes = [CHUNK_BYTES if whole or host == here else EAGER_BYTES for host in hosts.of]

    def isend(self, tensor: Tensor, stage: int, tag: int) -> MpiWork:
        """See interface.PeerLink."""
        memory = reachable(tensor)
        doing = f"a send to stage {stage}"
        return MpiWork(self._post(self.comm.Isend, memory, stage, tag, doing), memory, self, doing)

    def irecv(self, out: Tensor, stage: int, tag: int) -> MpiWork:
        """See interface.PeerLink."""
        memory = reachable(out, filled=False)
        doing = f"a receive from stage {stage}"
        requests = self._post(self.comm.Irecv, memory, stage, tag, doing)
        return MpiWork(requests, memory, self, doing, out.detach())

    def _post(
        self, call: Callable[..., MPI.Request], memory: Tensor, stage: int, tag: int, doing: str
    ) -> list[MPI.Request]:
        return [
            self.waits.post(call, [part, MPI.BYTE], stage, tag, comm=self.comm, doing=doing)
            for part in chunks(memory, self._piece_bytes[stage])
        ]


class MpiPending(Generic[T]):
    """See interface.Pending."""

    def __init__(
        self, control: "MpiControl", request: MPI.Request, doing: str, result: Callable[[], T]
    ) -> None:
        self._control = control
        self._request = request
        self._doing = doing
        self._result = result

    def result(self) -> T:
        """See interface.Pending."""
        self._control.waits.wait([self._request], self._control.comm, self._doing)
        return self._result()


class MpiControl:
    """See interface.ControlPlane."""

    def __init__(self, comm: MPI.Comm, waits: Waits) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.comm = comm
        self.waits = waits

    def gather(self, record: bytes) -> MpiPending[list[bytes] | None]:
        """See interface.ControlPlane."""
        mine = bytearray(record)
        whole = bytearray(len(record) * self.size) if self.rank == 0 else None
        received = None if whole is None else [whole, MPI.BYTE]
        doing = "a gather to rank 0"
        request = self._post(self.comm.Igather, [mine, MPI.BYTE], received, 0, doing=doing)
        return MpiPending(
            self,
            request,
            "a gather to rank 0",
            lambda: None if whole is None else _cut(whole, [len(mine)] * self.size),
        )

    def broadcast(self, record: bytes | None, num_bytes: int) -> MpiPending[bytes]:
        """See interface.ControlPlane."""
        assert (record is not None) == (self.rank == 0)
        assert record is None or len(record) == num_bytes
        data = bytearray(record or num_bytes)
        doing = "a broadcast from rank 0"
        request = self._post(self.comm.Ibcast, [data, MPI.BYTE], 0, doing=doing)
        return MpiPending(self, request, doing, lambda: bytes(data))

    def all_gather(self, data: bytes) -> list[bytes]:
        """See interface.ControlPlane."""
        lengths = np.zeros(self.size, dtype=np.int64)
        self._run("Allgather", np.array([len(data)], dtype=np.int64), lengths, doing="an exchange of lengths")
        whole = bytearray(int(lengths.sum()))
        self._run("Allgatherv", [data, MPI.BYTE], [whole, lengths, MPI.BYTE], doing="an exchange of data")
        return _cut(whole, lengths.tolist())

    def total(self, values: Sequence[float]) -> list[float]:
        """See interface.ControlPlane."""
        table = np.zeros((self.size, len(values)), dtype=np.float64)
        self._run("Allgather", np.array(values, dtype=np.float64), table, doing="a total")
        return [sum(column) for column in table.T.tolist()]

    def agree(self, flag: bool) -> bool:
        """See interface.ControlPlane."""
        all_of_us = np.array([flag], dtype=np.int32)
        self._run("Allreduce", MPI.IN_PLACE, all_of_us, MPI.MIN, doing="an agreement")
        return bool(all_of_us[0])

    def barrier(self) -> None:
        """See interface.ControlPlane."""
        self._run("Barrier", doing="a barrier")

    def abort(self, exit_code: int) -> NoReturn:
        """See interface.ControlPlane."""
        sys.stdout.flush()
        sys.stderr.flush()
        with self.waits.turn(_TURN_BEFORE_ABORT_S):
            MPI.COMM_WORLD.Abort(exit_code)
        os._exit(exit_code)

    def close(self) -> None:
        """Free the communicator."""
        self.comm.Free()

    def _post(self, call: Callable[..., MPI.Request], *args: Any, doing: str) -> MPI.Request:
        return self.waits.post(call, *args, comm=self.comm, doing=doing)

    def _run(self, name: str, *args: Any, doing: str) -> None:
        self.waits.run(self.comm, name, *args, doing=doing)


def _cut(whole: bytearray, lengths: Sequence[int]) -> list[bytes]:
    """`whole` in parts of the given lengths."""
    parts, start = [], 0
    for length in lengths:
        parts.append(bytes(whole[start : start + length]))
        start += length
    return parts

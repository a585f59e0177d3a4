"""Sums among the replicas of one stage over MPI, on a communicator of their own.

Inside a host through shared memory, between hosts by messages of a size that the network likes, or by
MPI's own Allreduce: `prepare` measures which is fastest.
"""

from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpc_train.comm import mpi_memory
from hpc_train.comm.choice import Choices, Sum, choose, describe, measure
from hpc_train.comm.host_memory import PrivateMemory
from hpc_train.comm.interface import Wire
from hpc_train.comm.mpi_host import MpiHost
from hpc_train.comm.mpi_memory import EAGER_BYTES, as_buffer, chunks, gpu_aware, staged
from hpc_train.comm.mpi_transport import MpiTransport
from hpc_train.comm.mpi_waits import Waits
from hpc_train.comm.routed_collective import RoutedCollective
from hpc_train.comm.routed_sum import Way
from hpc_train.comm.routes import Hosts, direct, halving

_FLOAT_BYTES = 4
_SUM = "a sum of gradients"
_FEW_VALUES = 2048  # a message's latency is all that they cost
_SHORT_VALUES = 2**14  # latency may cost more than 32 bits instead of 16 or 8
_MEASURED_VALUES = 2**18  # longer sums go at the same speed
EAGER_SEGMENTS = 8  # with fewer, too little is added up while messages are under way
LONG_BYTES = 2**20


class MpiCollective(RoutedCollective):
    """See interface.Collective."""

    def __init__(self, comm: MPI.Comm, waits: Waits, device: torch.device) -> None:
        self.threaded = waits.threaded
        self._comm = comm
        self._waits = waits
        self._host = MpiHost(comm, waits)
        memory = self._host.memory or PrivateMemory(staged=not gpu_aware())
        transport = MpiTransport(comm, waits)
        super().__init__(comm.rank, self._host.hosts, transport, memory, device, EAGER_BYTES)
        self._choices = Choices()
        self._candidates = candidates(self._hosts, self.rank)
        self._ways = {name: self._routed_way(way) for name, way in self._candidates.items()}
        self._library = MPI.get_vendor()[0]

    def allocate(self, numel: int) -> Tensor:
        """See interface.Collective."""
        if self._host.memory is None or self._device.type != "cpu":
            return super().allocate(numel)
        return self._host.memory.allocate(numel)

    def sum_(self, buffer: Tensor, wire: Wire, residual: Tensor | None = None) -> None:
        """See interface.Collective."""
        if self.size == 1 or not buffer.numel():
            return
        name = self._choices.get(wire, buffer.numel())
        if name is None and buffer.numel() <= _FEW_VALUES:
            name = self._library
        if name == self._library:
            self._sum_by_library(buffer, wire, residual)
        elif name is not None:
            self._ways[name](buffer, wire, residual)
        else:
            super().sum_(buffer, wire, residual)

    def prepare(self, numel: int, wire: Wire) -> str:
        """See interface.Collective.

        On one host nothing is measured: what is best there does not depend on a network.
        """
        if self.size == 1 or not numel or len(self._hosts.members) == 1:
            return ""
        ways = dict(self._ways)
        if not wire.lossy or numel <= _SHORT_VALUES:
            ways[self._library] = self._sum_by_library
        buffer = self.allocate(min(numel, _MEASURED_VALUES))
        seconds = measure(ways, buffer, wire, self.max)
        self._choices.put(wire, numel, choose(seconds))
        whole = {name: seconds[name] for name, way in self._candidates.items() if way.whole}
        self._direct = self._candidates[choose(whole)]  # shards go this way
        return describe(seconds, _FLOAT_BYTES * buffer.numel(), wire)

    def _routed_way(self, way: Way) -> Sum:
        return lambda buffer, wire, residual: self._routed.sum_(buffer, way, self._wire_of(wire), residual)

    def _sum_by_library(self, buffer: Tensor, wire: Wire, residual: Tensor | None) -> None:
        """MPI's own Allreduce, in fp32 whatever the wire: for few values that costs nothing."""
        if residual is not None:
            buffer += residual
            residual.zero_()
        with staged(buffer) as flat:
            for part in torch.split(flat, mpi_memory.CHUNK_BYTES // _FLOAT_BYTES):
                self._run("Allreduce", MPI.IN_PLACE, [as_buffer(part), MPI.FLOAT], MPI.SUM, doing=_SUM)

    def max(self, value: float) -> float:
        """See interface.Collective."""
        largest = np.array([value], dtype=np.float64)
        self._run("Allreduce", MPI.IN_PLACE, largest, MPI.MAX, doing="a maximum")
        return float(largest[0])

    def broadcast_(self, tensor: Tensor, root: int) -> None:
        """See interface.Collective."""
        whole = tensor.detach().contiguous()
        with staged(whole) as flat:
            for part in chunks(flat):
                self._run("Bcast", [part, MPI.BYTE], root, doing=f"a broadcast from replica {root}")
        if whole.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(whole)

    def barrier(self) -> None:
        """See interface.Collective."""
        self._run("Barrier", doing="a barrier of replicas")

    def close(self) -> None:
        """See interface.Collective."""
        if self._comm != MPI.COMM_NULL:
            self._host.close()
            with self._waits.turn():
                self._comm.Free()

    def _run(self, name: str, *args: Any, doing: str) -> None:
        self._waits.run(self._comm, name, *args, doing=doing)


def candidates(hosts: Hosts, rank: int) -> dict[str, Way]:
    """The ways worth measuring, by name: few long messages, or many that need no negotiation.

    Those first that are best for long buffers: only part of one is measured.
    """
    ways = {}
    for num_bytes, segments in ((EAGER_BYTES, EAGER_SEGMENTS), (LONG_BYTES, 1)):
        length = f"{num_bytes // 2**10} KiB messages"
        ways[f"direct, {length}"] = Way(direct(hosts, rank), num_bytes, whole=True, segments=segments)
        if hosts.even and len(hosts.members) > 2:  # with 2 hosts it is the same as direct
            ways[f"halving, {length}"] = Way(halving(hosts, rank), num_bytes, whole=False, segments=segments)
    return ways

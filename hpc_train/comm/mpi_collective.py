"""Sums among the replicas of one stage over MPI, on a communicator of their own.

Inside a host through shared memory, between hosts by messages of a size that the network likes, or by
MPI's own Allreduce: `prepare` measures which is fastest.
"""

from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpc_train.comm.host_memory import PrivateMemory
from hpc_train.comm.mpi_host import MpiHost
from hpc_train.comm.mpi_memory import chunks, gpu_aware, staged
from hpc_train.comm.mpi_transport import MpiTransport
from hpc_train.comm.mpi_waits import Waits
from hpc_train.comm.routed_collective import RoutedCollective

EAGER_BYTES = 60 * 2**10  # MPI over TCP sends up to 64 KiB at once, and negotiates about more


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

    def allocate(self, numel: int) -> Tensor:
        """See interface.Collective."""
        if self._host.memory is None or self._device.type != "cpu":
            return super().allocate(numel)
        return self._host.memory.allocate(numel)

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

"""Sums among the replicas of one stage over MPI, on a communicator of their own.

fp32 is MPI's own Allreduce in place.  MPI has no half, so fp16 goes through CompressedSum.
"""

from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpc_train.comm import mpi_memory
from hpc_train.comm.compressed_sum import CompressedSum
from hpc_train.comm.interface import Wire
from hpc_train.comm.mpi_memory import as_buffer, chunks, staged
from hpc_train.comm.mpi_waits import Waits

_FLOAT_BYTES = 4
_SUM = "a sum of gradients"


class MpiCollective:
    """See interface.Collective.  Also the Transport of its CompressedSum."""

    def __init__(self, comm: MPI.Comm, waits: Waits, device: torch.device) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.threaded = waits.threaded
        self._comm = comm
        self._waits = waits
        self._device = device
        self._compressed = CompressedSum(self.size, self)

    def allocate(self, numel: int) -> Tensor:
        """See interface.Collective."""
        return torch.zeros(numel, dtype=torch.float32, device=self._device)

    def sum_(self, buffer: Tensor, wire: Wire) -> None:
        """See interface.Collective."""
        if self.size == 1:
            return
        if wire is Wire.FP16:
            self._compressed.sum_(buffer)
            return
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
            with self._waits.turn():
                self._comm.Free()

    def exchange(self, sent: Tensor, received: Tensor) -> None:
        """See compressed_sum.Transport."""
        with staged(sent) as here, staged(received, filled=False) as there:
            self._run("Alltoall", [as_buffer(here), MPI.BYTE], [as_buffer(there), MPI.BYTE], doing=_SUM)

    def all_gather(self, mine: Tensor, gathered: Tensor) -> None:
        """See compressed_sum.Transport."""
        with staged(mine) as here, staged(gathered, filled=False) as there:
            self._run("Allgather", [as_buffer(here), MPI.BYTE], [as_buffer(there), MPI.BYTE], doing=_SUM)

    def _run(self, name: str, *args: Any, doing: str) -> None:
        self._waits.run(self._comm, name, *args, doing=doing)

"""The MPI library's own sum, as a baseline to measure the collectives against."""

import torch
from mpi4py import MPI

from hpc_train.comm.mpi_memory import as_buffer


class LibrarySum:
    """A plain, blocking MPI_Allreduce of fp32 host memory over all ranks.

    Making one is collective, and MPI runs already.
    """

    def __init__(self) -> None:
        self.name = MPI.get_vendor()[0]
        self._comm = MPI.COMM_WORLD.Dup()

    def sum_(self, buffer: torch.Tensor) -> None:
        """Replace `buffer` (fp32, contiguous, on the CPU, less than 8 GiB) by its sum over the ranks."""
        self._comm.Allreduce(MPI.IN_PLACE, [as_buffer(buffer), MPI.FLOAT], MPI.SUM)

    def close(self) -> None:
        """Free the communicator; collective."""
        self._comm.Free()

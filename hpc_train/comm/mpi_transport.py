"""A round's messages over MPI, point to point."""

from collections.abc import Sequence

import torch
from mpi4py import MPI

from hpc_train.comm.mpi_memory import as_buffer
from hpc_train.comm.mpi_waits import Waits
from hpc_train.comm.routed_sum import Message

_DOING = "a sum of gradients"


class MpiRound:
    """The messages of a round, under way."""

    def __init__(self, requests: list[MPI.Request], comm: MPI.Comm, waits: Waits) -> None:
        self._requests = requests
        self._comm = comm
        self._waits = waits

    def wait(self) -> None:
        """See interface.Work."""
        self._waits.wait(self._requests, self._comm, _DOING)


class MpiTransport:
    """See routed_sum.Transport.  Its bytes are where MPI can reach them."""

    def __init__(self, comm: MPI.Comm, waits: Waits) -> None:
        self._comm = comm
        self._waits = waits

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> MpiRound:
        """See routed_sum.Transport."""
        for _, words in sends[:1]:
            if words.is_cuda:  # an MPI that takes device memory knows nothing of streams
                torch.cuda.current_stream(words.device).synchronize()
        requests = [
            self._waits.post(call, [as_buffer(words), MPI.BYTE], peer, tag, comm=self._comm, doing=_DOING)
            for call, messages in ((self._comm.Irecv, receives), (self._comm.Isend, sends))
            for peer, words in messages
        ]
        return MpiRound(requests, self._comm, self._waits)

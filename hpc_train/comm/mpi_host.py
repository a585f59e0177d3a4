"""Which ranks of a communicator share a host, and the memory that they share there.

Environment:
    HPC_TRAIN_RANKS_A_HOST   take so many ranks of a host for a host of their own: to see on one machine
                             how sums between hosts go
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpc_train.comm.host_memory import SharedMemory
from hpc_train.comm.mpi_waits import Waits
from hpc_train.comm.routes import Hosts
from hpc_train.errors import UserError

_MAKING = "the making of a communicator"
_DOING = "a sum of gradients on this host"


class MpiHost:
    """The ranks of `comm` on this rank's host.  Making one is collective on `comm`.

    `hosts`: all ranks of `comm` by host.  `memory`: None where the ranks of some host cannot share any
    (in containers of their own, for instance); each then counts as a host.
    """

    def __init__(self, comm: MPI.Comm, waits: Waits) -> None:
        self._waits = waits
        self._comm = _neighbours(comm, waits)
        self.hosts = _hosts(comm, self._comm, waits)
        self.memory: SharedMemory | None = None
        if self.hosts.alone:
            return
        memory = SharedMemory(self._comm.rank, self._comm.size, self._broadcast, self._barrier, self._agree)
        try:
            memory.allocate(1)
            shared = True
        except OSError:
            shared = False
        everywhere = np.array([shared], dtype=np.int32)
        waits.run(comm, "Allreduce", MPI.IN_PLACE, everywhere, MPI.MIN, doing=_MAKING)
        if everywhere[0]:
            self.memory = memory
        else:
            self.hosts = Hosts(tuple(range(comm.size)))

    def close(self) -> None:
        """Free the communicator.  Collective on the host."""
        with self._waits.turn():
            self._comm.Free()

    def _broadcast(self, numbers: Sequence[int]) -> Sequence[int]:
        given = np.array(numbers, dtype=np.int64)
        self._run("Bcast", given, 0)
        return [int(number) for number in given]

    def _barrier(self) -> None:
        self._run("Barrier")

    def _agree(self, flag: bool) -> bool:
        all_of_us = np.array([flag], dtype=np.int32)
        self._run("Allreduce", MPI.IN_PLACE, all_of_us, MPI.MIN)
        return bool(all_of_us[0])

    def _run(self, name: str, *args: Any) -> None:
        self._waits.run(self._comm, name, *args, doing=_DOING)


def find_hosts(comm: MPI.Comm, waits: Waits) -> Hosts:
    """All ranks of `comm` by host.  Collective on `comm`."""
    here = _neighbours(comm, waits)
    hosts = _hosts(comm, here, waits)
    with waits.turn():
        here.Free()
    return hosts


def _hosts(comm: MPI.Comm, here: MPI.Comm, waits: Waits) -> Hosts:
    """From the ranks that are `here`: a host's mark is its first rank's number."""
    first = np.array([comm.rank], dtype=np.int64)
    waits.run(here, "Allreduce", MPI.IN_PLACE, first, MPI.MIN, doing=_MAKING)
    marks = np.zeros(comm.size, dtype=np.int64)
    waits.run(comm, "Allgather", first, marks, doing=_MAKING)
    return Hosts(tuple(marks.tolist()))


def _neighbours(comm: MPI.Comm, waits: Waits) -> MPI.Comm:
    """A communicator of the ranks on this host, in the order of `comm`."""
    here = waits.post(comm.Split_type, MPI.COMM_TYPE_SHARED, comm.rank, comm=comm, doing=_MAKING)
    text = os.environ.get("HPC_TRAIN_RANKS_A_HOST")
    if not text:
        return here
    if not text.isdecimal() or text == "0":
        raise UserError(f"HPC_TRAIN_RANKS_A_HOST={text!r} is not a number of ranks: use 1 or more")
    some = waits.post(here.Split, here.rank // int(text), here.rank, comm=here, doing=_MAKING)
    with waits.turn():
        here.Free()
    return some

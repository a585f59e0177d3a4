"""Memory that the ranks of one host share, so that each reads the others' buffers where they lie.

It is anonymous (memfd_create): it has no name in /dev/shm that a killed process could leave there, and
the size of /dev/shm, 64 MB in many containers, is no limit to it.  Plain memory, no MPI window: those do
not survive a failed rank.
"""

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_FLOAT_BYTES = 4


class PrivateMemory:
    """The memory of a rank that shares none.  `staged`: what lies on a GPU goes through the host."""

    def __init__(self, staged: bool = False) -> None:
        self._staged = staged
        self._scratch: Tensor | None = None

    def rows(self, buffer: Tensor) -> list[Tensor] | None:
        """See routed_sum.HostMemory."""
        return None if self._staged and buffer.is_cuda else [buffer]

    def scratch(self, numel: int) -> Tensor:
        """See routed_sum.HostMemory."""
        if self._scratch is None or self._scratch.numel() < numel:
            self._scratch = torch.empty(numel, pin_memory=True)
        return self._scratch[:numel]

    def barrier(self) -> None:
        """See routed_sum.HostMemory."""


class Shelf:
    """Buffers that lie in shared memory, and where the other ranks' buffers beside them are.

    A buffer's place is forgotten when its memory goes, which is when the last tensor on it does.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[weakref.ref[np.ndarray[Any, Any]], list[Tensor]]] = {}

    def put(self, arrays: Sequence[np.ndarray[Any, Any]]) -> Tensor:
        """Take in one allocation: fp32 arrays of all ranks, this rank's first; returns its tensor."""
        mine, *others = arrays
        if mine.size == 0:
            return torch.zeros(0)
        tensor = torch.from_numpy(mine)
        address = tensor.data_ptr()
        self._places[address] = (weakref.ref(mine), [torch.from_numpy(other) for other in others])
        weakref.finalize(mine, self._places.pop, address, None)
        return tensor

    def rows(self, buffer: Tensor) -> list[Tensor] | None:
        """`buffer` and its like in the others' memory; None when it does not lie here."""
        address = buffer.data_ptr()
        for start, (reference, others) in list(self._places.items()):
            array = reference()
            if array is not None and start <= address < start + array.nbytes:
                first = (address - start) // _FLOAT_BYTES
                return [buffer, *(other[first : first + buffer.numel()] for other in others)]
        return None


class SharedMemory:
    """The memory of several ranks of one host.  Making one is collective on the host, and so is `allocate`.

    Args:
        local_rank: of this process, among `local_size`.
        broadcast: gives a small value of local rank 0 to all of the host.
        barrier: of the ranks of the host.

    Raises:
        OSError: this process cannot open what another has made (they are in different containers).
    """

    def __init__(
        self,
        local_rank: int,
        local_size: int,
        broadcast: Callable[[Any], Any],
        barrier: Callable[[], None],
    ) -> None:
        self._rank = local_rank
        self._size = local_size
        self._broadcast = broadcast
        self.barrier = barrier
        self._shelf = Shelf()
        self._scratch: Tensor | None = None

    def allocate(self, numel: int) -> Tensor:
        """Zeroed fp32 memory, [numel]: this rank's row of a segment that all ranks of the host map."""
        row_bytes = max(1, -(-numel * _FLOAT_BYTES // _PAGE)) * _PAGE
        segment = self._map(row_bytes * self._size)
        arrays = [
            np.frombuffer(segment, np.float32, numel, ((self._rank + i) % self._size) * row_bytes)
            for i in range(self._size)
        ]
        return self._shelf.put(arrays)

    def rows(self, buffer: Tensor) -> list[Tensor] | None:
        """See routed_sum.HostMemory."""
        return self._shelf.rows(buffer)

    def scratch(self, numel: int) -> Tensor:
        """See routed_sum.HostMemory."""
        if self._scratch is None or self._scratch.numel() < numel:
            self._scratch = self.allocate(numel)
        return self._scratch[:numel]

    def _map(self, num_bytes: int) -> mmap.mmap:
        """A segment that local rank 0 makes and all map."""
        made = -1
        if self._rank == 0:
            with suppress(OSError):  # the others would wait for it: all of them raise below
                made = os.memfd_create("hpc_train gradients", os.MFD_CLOEXEC)
                os.ftruncate(made, num_bytes)
        pid, number = self._broadcast((os.getpid(), made))
        opened = made if self._rank == 0 else _open(f"/proc/{pid}/fd/{number}")
        try:
            segment = mmap.mmap(opened, num_bytes) if opened >= 0 else None
            self.barrier()  # all have it: the file may go, the memory stays as long as somebody maps it
        finally:
            if opened >= 0:
                os.close(opened)
        if segment is None:
            raise OSError(f"{num_bytes} bytes of shared memory of process {pid} on this host cannot be had")
        return segment


def _open(path: str) -> int:
    """A descriptor, or -1: the others wait at the barrier, so nobody leaves early."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1

"""Memory that the ranks of one host share, so that each reads the others' buffers where they lie.

It is anonymous (memfd_create): it has no name in /dev/shm that a killed process could leave there, and
the size of /dev/shm, 64 MB in many containers, is no limit to it.  Plain memory, no MPI window: those do
not survive a failed rank.
"""

import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_FLOAT_BYTES = 4
_TOKEN_BITS = 63  # of a signed 64-bit number
_TOKEN_BYTES = 8


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
        broadcast: gives a few numbers of 63 bits, those of local rank 0, to all of the host.
        barrier: of the ranks of the host.
        agree: True when it is true on every rank of the host; all wait for it.

    Raises:
        OSError: on all ranks, when some process cannot open what another has made (they are in different
            containers, for instance).
    """

    def __init__(
        self,
        local_rank: int,
        local_size: int,
        broadcast: Callable[[Sequence[int]], Sequence[int]],
        barrier: Callable[[], None],
        agree: Callable[[bool], bool],
    ) -> None:
        self._rank = local_rank
        self._size = local_size
        self._broadcast = broadcast
        self.barrier = barrier
        self._agree = agree
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
        """A segment that local rank 0 makes and all map.

        A process in another container has numbers of its own: under the same path it may find another
        file, even such a segment of other ranks.  So a token in the segment tells whether it is this one.
        """
        opened, segment, token = -1, None, secrets.randbits(_TOKEN_BITS)
        try:
            if self._rank == 0:
                opened = _make(num_bytes)
                segment = _mapped(opened, num_bytes)
                if segment is not None:
                    segment[:_TOKEN_BYTES] = token.to_bytes(_TOKEN_BYTES, "little")
            pid, number, token = self._broadcast((os.getpid(), opened, token))
            if self._rank != 0:
                opened = _open(f"/proc/{pid}/fd/{number}")
                segment = _mapped(opened, num_bytes, token)
            shared = self._agree(segment is not None)
        finally:  # all have it: the file may go, the memory stays as long as somebody maps it
            if opened >= 0:
                os.close(opened)
        if segment is None or not shared:
            raise OSError(f"{num_bytes} bytes of shared memory of process {pid} on this host cannot be had")
        if self._rank == 0:
            segment[:_TOKEN_BYTES] = bytes(_TOKEN_BYTES)  # in this rank's row, which others read in sums only
        return segment


# The other ranks wait for this one: so these tell a failure by their result, and nobody leaves early.


def _make(num_bytes: int) -> int:
    """A descriptor of anonymous memory, or -1."""
    made = -1
    try:
        made = os.memfd_create("hpc_train gradients", os.MFD_CLOEXEC)
        os.ftruncate(made, num_bytes)
    except OSError:
        if made >= 0:
            os.close(made)
        return -1
    return made


def _open(path: str) -> int:
    """A descriptor of what another process has made, or -1."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1


def _mapped(descriptor: int, num_bytes: int, token: int | None = None) -> mmap.mmap | None:
    """The memory behind a descriptor; None if there is none, or if it does not begin with the token."""
    if descriptor < 0:
        return None
    try:
        segment = mmap.mmap(descriptor, num_bytes)
    except (OSError, ValueError):  # another kind of file, or a shorter one
        return None
    if token is None or int.from_bytes(segment[:_TOKEN_BYTES], "little") == token:
        return segment
    segment.close()
    return None

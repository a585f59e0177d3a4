"""Open MPI's Allreduce, as it comes and with each of its algorithms.

The algorithm of a communicator is fixed when the communicator is made, from variables that MPI's tool
interface (MPI_T, chapter 15 of the standard) can set while the job runs; so one launch compares all.
Ranks must be started with OMPI_MCA_coll_tuned_use_dynamic_rules=1.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import mpi4py
import torch
from mpi4py import MPI

_THREAD_MULTIPLE = 3  # less, and MPI_Query_thread of the whole process would say less from then on
_ALGORITHM = "coll_tuned_allreduce_algorithm"
_SEGMENT = "coll_tuned_allreduce_algorithm_segmentsize"
_HIERARCHICAL_PRIORITY = "coll_han_priority"


@dataclass(frozen=True)
class Algorithm:
    """A way that Open MPI has: of its component for hosts in a hierarchy (default), or a flat one."""

    name: str
    number: int = 0  # in coll_tuned; 0: the library decides
    segment_bytes: int = 0
    hierarchical: bool = False


DEFAULT = Algorithm("default", hierarchical=True)
RING = Algorithm("ring", 4)
ALGORITHMS = (
    DEFAULT,
    Algorithm("flat"),
    Algorithm("linear", 1),
    Algorithm("reduce and broadcast", 2),
    Algorithm("recursive doubling", 3),
    RING,
    Algorithm("segmented ring", 5),
    Algorithm("segmented ring, 1 MiB", 5, 2**20),
    Algorithm("Rabenseifner", 6),
)


class OpenMpi:
    """Makes communicators of a chosen algorithm.  With another MPI there is its default alone."""

    def __init__(self) -> None:
        self.name = MPI.get_vendor()[0]
        self.algorithms = ALGORITHMS if self.name == "Open MPI" else (DEFAULT,)
        self._sums: dict[Algorithm, LibrarySum] = {}
        self._tools: ctypes.CDLL | None = None
        if len(self.algorithms) > 1:
            self._tools = ctypes.CDLL(str(_library()))
            assert self._tools.MPI_T_init_thread(_THREAD_MULTIPLE, ctypes.byref(ctypes.c_int())) == 0
            self._default_priority = self._read(_HIERARCHICAL_PRIORITY)

    @contextlib.contextmanager
    def chosen(self, algorithm: Algorithm) -> Iterator[None]:
        """Communicators made inside, whoever makes them, sum with `algorithm`."""
        if self._tools is None:
            yield
            return
        self._set(algorithm, self._default_priority if algorithm.hierarchical else 0)
        try:
            yield
        finally:
            self._set(DEFAULT, self._default_priority)

    def sum(self, algorithm: Algorithm) -> "LibrarySum":
        """The sum over all ranks with `algorithm`.  Collective."""
        if algorithm not in self._sums:
            with self.chosen(algorithm):
                self._sums[algorithm] = LibrarySum()
        return self._sums[algorithm]

    def close(self) -> None:
        """Free all communicators; collective."""
        for one in self._sums.values():
            one.close()
        self._sums.clear()

    def _set(self, algorithm: Algorithm, priority: int) -> None:
        self._write(_ALGORITHM, algorithm.number)
        self._write(_SEGMENT, algorithm.segment_bytes)
        self._write(_HIERARCHICAL_PRIORITY, priority)

    def _handle(self, name: str) -> ctypes.c_void_p:
        assert self._tools is not None
        index, handle, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        failed = self._tools.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index))
        failed = failed or self._tools.MPI_T_cvar_handle_alloc(
            index, None, ctypes.byref(handle), ctypes.byref(count)
        )
        if failed:
            raise RuntimeError(f"this Open MPI has no variable {name}: error {failed}")
        return handle

    def _read(self, name: str) -> int:
        value = ctypes.c_int()
        assert self._tools is not None
        assert self._tools.MPI_T_cvar_read(self._handle(name), ctypes.byref(value)) == 0
        return value.value

    def _write(self, name: str, value: int) -> None:
        assert self._tools is not None
        failed = self._tools.MPI_T_cvar_write(self._handle(name), ctypes.byref(ctypes.c_int(value)))
        if failed:
            raise RuntimeError(f"Open MPI lets nobody set {name}: error {failed}")


class LibrarySum:
    """A plain, blocking MPI_Allreduce of fp32 host memory over all ranks, in place."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD.Dup()

    def sum_(self, buffer: torch.Tensor) -> None:
        """Replace `buffer` by its sum."""
        self._comm.Allreduce(MPI.IN_PLACE, [buffer.numpy(), MPI.FLOAT], MPI.SUM)

    def close(self) -> None:
        """Collective."""
        self._comm.Free()


def _library() -> str:
    """The file of the MPI library that this process has loaded already."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if "/libmpi.so" in path:
                return path
    raise RuntimeError(f"mpi4py {mpi4py.__version__} has loaded no libmpi.so")

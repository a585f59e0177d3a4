"""Collectives of Horovod, over a process set of each stage's replicas; MPI carries all the rest.

Horovod has a thread of its own, which asks the ranks every HOROVOD_CYCLE_TIME what is ready on all of
them.  So operations are known by their names, and the thread calls MPI beside ours.

Importing this file wants MPI to run already: Horovod would end an MPI that it started itself.
"""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from mpi4py import MPI
from torch import Tensor

from hpc_train.comm.alltoall import AllToAll
from hpc_train.comm.host_memory import PrivateMemory
from hpc_train.comm.interface import Collective, ControlPlane, PeerLink, Wire, World
from hpc_train.comm.routed_collective import RoutedCollective
from hpc_train.comm.routes import Hosts
from hpc_train.errors import PeerLost, UserError
from hpc_train.grid import Grid

_CYCLE_TIME_MS = "0.1"  # Horovod's own 1 ms waits for small tensors to fuse; ours are buckets already
_PAUSE_S = 5e-5
_MESSAGE_BYTES = 2**20  # each round costs Horovod an agreement among the ranks
_DOING = "a sum of gradients"

_numbers = itertools.count()  # of this process's collectives, which all ranks make in the same order


class HorovodWorld:
    """Another world, whose collectives are Horovod's."""

    def __init__(self, base: World) -> None:
        """Start Horovod, once a process.  All ranks together.

        Raises:
            UserError: MPI does not take calls of several threads, or Horovod is not on the same MPI.
        """
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UserError(
                "comm.backend=horovod calls MPI from a thread of its own, which needs the thread level "
                "MPI_THREAD_MULTIPLE: use comm.backend=mpi, or an MPI that has it"
            )
        if not hvd.is_initialized():
            os.environ.setdefault("HOROVOD_CYCLE_TIME", _CYCLE_TIME_MS)
            hvd.init(process_sets="dynamic")
        if (hvd.rank(), hvd.size()) != (base.rank, base.size):
            raise UserError(
                f"Horovod sees {hvd.size()} ranks where mpi4py sees {base.size}, as it was built with "
                f"another MPI: build it with this one, by make horovod"
            )
        self.rank = base.rank
        self.size = base.size
        self.host = base.host
        self.local_rank = base.local_rank
        self.local_size = base.local_size
        self.control: ControlPlane = base.control
        self._base = base
        self._process_sets: dict[tuple[int, ...], Any] = {}

    def peer_link(self, grid: Grid) -> PeerLink:
        """See interface.World."""
        return self._base.peer_link(grid)

    def collective(self, grid: Grid, device: torch.device) -> Collective:
        """See interface.World.

        Raises:
            UserError: Horovod was built for CPUs and `device` is none.
        """
        if grid.replicas == 1:
            return self._base.collective(grid, device)
        if device.type != "cpu" and not hvd.nccl_built():
            fix = "set comm.backend=auto, or build it with HOROVOD_GPU_OPERATIONS=NCCL make horovod"
            raise UserError(f"this Horovod sums on CPUs, not on {device.type}: {fix}")
        place = grid.place(self.rank)
        sets = [self._process_set(tuple(grid.replicas_of(stage))) for stage in range(grid.stages)]
        return HorovodCollective(sets[place.stage], grid.replicas_of(place.stage), place.replica, device)

    def _process_set(self, ranks: tuple[int, ...]) -> Any:
        """Made by all ranks together, also by those outside; there is but one of the same ranks."""
        if len(ranks) == self.size:
            return hvd.global_process_set
        if ranks not in self._process_sets:
            self._process_sets[ranks] = hvd.add_process_set(list(ranks))
        return self._process_sets[ranks]

    def describe(self) -> dict[str, Any]:
        """See interface.World."""
        cycle = os.environ.get("HOROVOD_CYCLE_TIME", "1")  # of a Horovod that the user's script began
        return {
            **self._base.describe(),
            "gradients": "horovod",
            "horovod": f"{metadata.version('horovod')}, {cycle} ms a cycle",
        }

    def close(self) -> None:
        """See interface.World.  Horovod itself ends with the process."""
        self.control.barrier()  # all have ended their sums
        for process_set in self._process_sets.values():
            hvd.remove_process_set(process_set)
        self._base.close()


class HorovodCollective(RoutedCollective):
    """See interface.Collective.

    fp32 is Horovod's allreduce in place.  Its fp16 compression adds up in fp16, which overflows; so the
    lossy wires and the shards are those of RoutedSum, over Horovod's alltoall.
    """

    threaded = True

    def __init__(self, process_set: Any, ranks: Sequence[int], replica: int, device: torch.device) -> None:
        self._set = process_set
        self._ranks = ranks
        self._name = f"hpc_train.{next(_numbers)}"
        self._rounds: Iterator[str] = iter(())
        size = len(ranks)
        super().__init__(
            replica,
            Hosts(tuple(range(size))),  # as if each rank were on a host of its own
            AllToAll(size, device, self._exchange),
            PrivateMemory(),
            device,
            _MESSAGE_BYTES,
        )

    def sum_(self, buffer: Tensor, wire: Wire, residual: Tensor | None = None) -> None:
        """See interface.Collective."""
        if wire.lossy:
            self._name_rounds("sum", buffer, wire)
            super().sum_(buffer, wire, residual)
        elif buffer.numel():
            self._allreduce(buffer, hvd.Sum, f"sum.{buffer.numel()}", _DOING)

    def reduce_scatter_(self, buffer: Tensor, wire: Wire, residual: Tensor | None = None) -> None:
        """See interface.Collective."""
        self._name_rounds("reduce_scatter", buffer, wire)
        super().reduce_scatter_(buffer, wire, residual)

    def all_gather_(self, buffer: Tensor) -> None:
        """See interface.Collective."""
        self._name_rounds("all_gather", buffer, Wire.FP32)
        super().all_gather_(buffer)

    def max(self, value: float) -> float:
        """See interface.Collective."""
        largest = torch.tensor([value], dtype=torch.float64, device=self._device)
        self._allreduce(largest, hvd.Max, "max", "a maximum")
        return float(largest.item())

    def broadcast_(self, tensor: Tensor, root: int) -> None:
        """See interface.Collective."""
        if tensor.numel() == 0:
            return
        here = tensor.detach().to(self._device).contiguous()
        sent = here.view(-1).view(torch.uint8)  # Horovod knows fewer dtypes than torch
        name = f"{self._name}.broadcast.{root}.{sent.numel()}"
        handle = hvd.broadcast_async_(sent, self._ranks[root], name=name, process_set=self._set)
        _finish(handle, f"a broadcast from replica {root}")
        if here.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(here)

    def barrier(self) -> None:
        """See interface.Collective."""
        self.max(0.0)

    def close(self) -> None:
        """See interface.Collective.  The process set stays until the world is closed: others may use it."""

    def _name_rounds(self, operation: str, buffer: Tensor, wire: Wire) -> None:
        """Names for the rounds of one operation.

        Horovod remembers what the ranks agreed on under a name, as long as that is the same each time.
        """
        name = f"{self._name}.{operation}.{buffer.numel()}.{wire.value}"
        self._rounds = (f"{name}.{number}" for number in itertools.count())

    def _allreduce(self, tensor: Tensor, operation: Any, name: str, doing: str) -> None:
        name = f"{self._name}.{name}"
        handle = hvd.allreduce_async_(tensor, op=operation, name=name, process_set=self._set)
        _finish(handle, doing)

    def _exchange(
        self, sent: Tensor, received: Tensor, sent_sizes: list[int], received_sizes: list[int]
    ) -> "_Exchange":
        """See alltoall.Exchange.  What to receive, the ranks tell each other."""
        splits = torch.tensor(sent_sizes, dtype=torch.int32)
        handle = hvd.alltoall_async(sent, splits, name=next(self._rounds), process_set=self._set)
        return _Exchange(handle, received)


class _Exchange:
    """A Work: an alltoall under way."""

    def __init__(self, handle: int, received: Tensor) -> None:
        self._handle = handle
        self._received = received

    def wait(self) -> None:
        arrived, _ = _finish(self._handle, _DOING)
        self._received.copy_(arrived)


def _finish(handle: int, doing: str) -> Any:
    """Wait for an operation and return its result."""
    try:
        # hvd.synchronize() alone spins, with Python's lock in hand, which backward needs meanwhile.
        while not hvd.poll(handle):
            time.sleep(_PAUSE_S)
        return hvd.synchronize(handle)
    except HorovodInternalError as error:  # it tells a lost rank so, without its number
        raise PeerLost((), doing) from error

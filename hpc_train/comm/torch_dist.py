"""Collectives of torch.distributed, Gloo on CPUs and NCCL on GPUs, started over the control plane.

Each collective has a process group of its own that holds just its replicas.  The groups are made
directly, so that torch's process-wide default group stays free for the user's own script.
"""

import datetime
import os
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from hpc_train.comm.alltoall import AllToAll
from hpc_train.comm.host_memory import PrivateMemory
from hpc_train.comm.interface import Collective, ControlPlane, PeerLink, Wire, Work, World
from hpc_train.comm.rendezvous import my_address, open_store
from hpc_train.comm.routed_collective import RoutedCollective
from hpc_train.comm.routes import Hosts
from hpc_train.errors import PeerLost, UserError
from hpc_train.grid import Grid

_MESSAGE_BYTES = 2**20
_TIMEOUT = datetime.timedelta(minutes=30)  # of one sum; the slowest replica may be that late


class TorchDistWorld:
    """Another world, whose collectives are torch.distributed's."""

    def __init__(self, base: World, backend: str) -> None:
        """`backend`: "gloo", "nccl", or "auto": NCCL where the tensors are on GPUs, else those of `base`."""
        self.rank = base.rank
        self.size = base.size
        self.host = base.host
        self.local_rank = base.local_rank
        self.local_size = base.local_size
        self.control: ControlPlane = base.control
        self._base = base
        self._backend = backend
        self._store: Store | None = None
        self._num_collectives = 0

    def peer_link(self, grid: Grid) -> PeerLink:
        """See interface.World."""
        return self._base.peer_link(grid)

    def collective(self, grid: Grid, device: torch.device) -> Collective:
        """See interface.World.

        Raises:
            UserError: the backend cannot sum tensors on `device`.
        """
        backend = self._choose(device)
        if backend is None or grid.replicas == 1:
            return self._base.collective(grid, device)
        if self._store is None:
            self._store = open_store(self.control, self.host)
        place = grid.place(self.rank)
        self._num_collectives += 1
        store = PrefixStore(f"collective {self._num_collectives}, stage {place.stage}", self._store)
        kind = cast("Any", dist.ProcessGroupNCCL if backend == "nccl" else dist.ProcessGroupGloo)
        if backend == "nccl":
            torch.cuda.set_device(device)
            options = kind.Options()
        else:
            options = kind._Options()  # the only way to say which of the host's addresses to use
            options._devices = [kind.create_device(hostname=my_address(self.control, self.host))]
        options._timeout = _TIMEOUT
        group = kind(store, place.replica, grid.replicas, options)
        return TorchDistCollective(group, place.replica, grid.replicas, device)

    def describe(self) -> dict[str, Any]:
        """See interface.World."""
        return {**self._base.describe(), "gradients": self._backend, "nccl": dist.is_nccl_available()}

    def close(self) -> None:
        """See interface.World."""
        self._base.close()  # all ranks are done: rank 0 may close the store
        self._store = None

    def _choose(self, device: torch.device) -> str | None:
        """The torch backend for tensors on `device`; None: that of the base world.  Collective."""
        if self._backend == "gloo":
            if device.type != "cpu":
                fix = "set comm.backend=auto or train.device=cpu"
                raise UserError(f"comm.backend=gloo sums on CPUs, not on {device.type}: {fix}")
            return "gloo"
        possible = device.type == "cuda" and dist.is_nccl_available()
        mine = f"{self.host} {_gpu(device)}" if possible else ""
        gpus = self.control.all_gather(mine.encode())
        if all(gpus) and len(set(gpus)) == len(gpus):
            return "nccl"
        if self._backend == "nccl":
            why = (
                "some ranks share a GPU"
                if all(gpus)
                else "not every rank has a CUDA device and a torch with NCCL"
            )
            raise UserError(
                f"comm.backend=nccl needs a GPU for each of {self.size} ranks, but {why}: use auto"
            )
        return None


def _gpu(device: torch.device) -> str:
    """The same text for the same GPU of a host, whatever each process calls it."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # since torch 2.4
    return str(uuid or f"{device.index} of {os.environ.get('CUDA_VISIBLE_DEVICES')}")


class TorchDistCollective(RoutedCollective):
    """See interface.Collective.  fp32 is the library's own sum; all else goes through its all-to-all."""

    threaded = True

    def __init__(self, group: Any, rank: int, size: int, device: torch.device) -> None:
        hosts = Hosts(tuple(range(size)))  # memory is not shared: the library has ways of its own
        transport = AllToAll(size, device, self._exchange)
        super().__init__(rank, hosts, transport, PrivateMemory(), device, _MESSAGE_BYTES)
        self._group = group

    def sum_(self, buffer: Tensor, wire: Wire, residual: Tensor | None = None) -> None:
        """See interface.Collective."""
        if wire.lossy:
            super().sum_(buffer, wire, residual)
        elif buffer.numel():
            self._wait(self._group.allreduce([buffer]), "a sum of gradients")

    def max(self, value: float) -> float:
        """See interface.Collective."""
        largest = torch.tensor([value], dtype=torch.float64, device=self._device)
        self._wait(self._group.allreduce([largest], dist.ReduceOp.MAX), "a maximum")
        return float(largest.item())

    def broadcast_(self, tensor: Tensor, root: int) -> None:
        """See interface.Collective."""
        if tensor.numel():
            here = tensor.detach().to(self._device).contiguous()
            sent = here.view(-1).view(torch.uint8)  # the backends know fewer dtypes than torch
            self._wait(self._group.broadcast(sent, root), f"a broadcast from replica {root}")
            if here.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(here)

    def barrier(self) -> None:
        """See interface.Collective."""
        self.max(0.0)

    def close(self) -> None:
        """See interface.Collective."""
        self._group.shutdown()

    def _exchange(
        self, sent: Tensor, received: Tensor, sent_sizes: list[int], received_sizes: list[int]
    ) -> Work:
        work = self._group.alltoall_base(received, sent, received_sizes, sent_sizes)
        return _Waiting(lambda: self._wait(work, "a sum of gradients"), sent)

    def _wait(self, work: Any, doing: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:  # torch tells a lost connection and a timeout so, without a rank
            raise PeerLost((), doing) from error
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class _Waiting:
    """A Work that keeps what is sent alive."""

    def __init__(self, wait: Callable[[], None], sent: Tensor) -> None:
        self.wait = wait
        self._sent = sent

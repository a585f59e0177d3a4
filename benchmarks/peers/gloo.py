"""Gloo, PyTorch's own way between CPUs: as a process group, and as the default group that DDP asks for."""

import datetime
from typing import Any, cast

import torch
import torch.distributed as dist

from hpc_train.comm.interface import World
from hpc_train.comm.rendezvous import my_address, open_store

_TIMEOUT = datetime.timedelta(minutes=30)


class Gloo:
    """All ranks; making one is collective."""

    def __init__(self, world: World) -> None:
        self._store = dist.PrefixStore("benchmark", open_store(world.control, world.host))
        kind = cast("Any", dist.ProcessGroupGloo)
        options = kind._Options()  # the only way to say which of the host's addresses to use
        options._devices = [kind.create_device(hostname=my_address(world.control, world.host))]
        options._timeout = _TIMEOUT
        self._group = kind(self._store, world.rank, world.size, options)

    def sum_(self, buffer: torch.Tensor) -> None:
        """Replace `buffer` by its sum."""
        self._group.allreduce([buffer]).wait()


def start_default_group(world: World) -> None:
    """torch.distributed's default group on Gloo, as DDP wants it.  Collective."""
    store = open_store(world.control, world.host)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=_TIMEOUT)

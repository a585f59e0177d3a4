"""What the MPI library here can do; `python -m hpc_train.launch.mpi_facts` prints it as JSON."""

import ctypes
import json
import os
import re
from pathlib import Path
from typing import Any


def mpi_facts() -> dict[str, Any]:
    """Vendor, version, thread level, survival of failures, GPUs.  Starts MPI if it has not started.

    Collective over MPI's world: all ranks call it.
    """
    import mpi4py
    from mpi4py import MPI

    names = ("single", "funneled", "serialized", "multiple")
    levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    vendor, version = MPI.get_vendor()
    return {
        "vendor": vendor,
        "version": ".".join(map(str, version)),
        "standard": ".".join(map(str, MPI.Get_version())),
        "thread_level_asked": str(mpi4py.rc.thread_level),
        "thread_level": dict(zip(levels, names, strict=True))[MPI.Query_thread()],
        "ulfm": _can_shrink(),
        "ulfm_started": "OMPI_MCA_mpi_ft_enable" in os.environ,
        "cuda_aware": _takes_device_memory(),
    }


def _can_shrink() -> bool:
    """True when the library has ULFM's calls: a communicator can go on without its dead ranks."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    try:
        comm.Shrink().Free()
    except (AttributeError, NotImplementedError, MPI.Exception):
        return False
    else:
        return True
    finally:
        comm.Free()


def _takes_device_memory() -> bool | None:
    """What Open MPI and MPICH answer to MPIX_Query_cuda_support; None where nobody can be asked."""
    maps = Path("/proc/self/maps")
    loaded = re.findall(r"\S+/libmpi[^/\s]*\.so\S*", maps.read_text()) if maps.exists() else []
    for path in dict.fromkeys(loaded):
        try:
            return bool(ctypes.CDLL(path).MPIX_Query_cuda_support())
        except (OSError, AttributeError):  # a library beside MPI's, or an MPI without the call
            continue
    return None


if __name__ == "__main__":
    print(json.dumps(mpi_facts()))  # noqa: T201

"""What each rank sees of its host, its MPI and its launch; gathered, for doctor to judge."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hpc_train.errors import UserError
from hpc_train.launch import identity
from hpc_train.launch.binding import cores
from hpc_train.launch.mpirun import find_mpirun

if TYPE_CHECKING:
    from hpc_train.comm.interface import World

_SLURM = ("JOB_ID", "JOB_NUM_NODES", "NTASKS", "CPUS_PER_TASK", "STEP_ID", "RESTART_COUNT")
_VERSIONS = ("hpc_train", "torch", "numpy", "mpi4py", "safetensors")


@dataclass(frozen=True)
class RankFacts:
    """One rank's view; plain values, so that it travels as JSON."""

    rank: int
    size: int
    host: str
    local_rank: int
    local_size: int
    cores: list[int]  # that this rank may use
    host_cores: int  # of the whole host
    launcher: str | None  # that started it
    launcher_size: int | None  # ranks that the launcher says it started
    mpi: dict[str, Any]  # as mpi_facts(); {"missing": why} without an MPI
    mpirun: str  # what `hpc-train launch` would use, or why it cannot
    versions: dict[str, str]
    gpus: list[str]
    nccl: str | None
    horovod: str | None
    slurm: dict[str, str]  # SLURM_* without the prefix
    srun: str | None  # its path


def gather(world: "World") -> list[RankFacts]:
    """Everybody's facts, by rank.  Collective."""
    mine = json.dumps(asdict(_look(world))).encode()
    return [RankFacts(**json.loads(part)) for part in world.control.all_gather(mine)]


def _look(world: "World") -> RankFacts:
    import torch

    me = identity.find(os.environ)
    has_cuda = torch.cuda.is_available()
    return RankFacts(
        rank=world.rank,
        size=world.size,
        host=world.host,
        local_rank=world.local_rank,
        local_size=world.local_size,
        cores=sorted(cores()),
        host_cores=len(cores(frozenset(range(os.cpu_count() or 1)))),
        launcher=me.launcher if me else None,
        launcher_size=me.size if me else None,
        mpi=_mpi(),
        mpirun=_mpirun() if world.rank == 0 else "",
        versions={"python": platform.python_version(), **{name: _version(name) or "" for name in _VERSIONS}},
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if has_cuda else [],
        nccl=_nccl() if has_cuda else None,
        horovod=_version("horovod"),
        slurm=slurm_variables(os.environ),
        srun=shutil.which("srun"),
    )


def slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of Slurm that say what was allocated, without their prefix."""
    return {name: environ[f"SLURM_{name}"] for name in _SLURM if f"SLURM_{name}" in environ}


def _mpi() -> dict[str, Any]:
    """The facts of the MPI that runs here; where none runs, of one that a process apart starts and ends."""
    if "mpi4py.MPI" in sys.modules and sys.modules["mpi4py.MPI"].Is_initialized():
        from hpc_train.launch.mpi_facts import mpi_facts

        return mpi_facts()
    command = [sys.executable, "-m", "hpc_train.launch.mpi_facts"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        facts: dict[str, Any] = json.loads(done.stdout)
        return facts
    words = [line for line in done.stderr.splitlines() if line.strip()]
    return {"missing": words[-1] if words else f"exit code {done.returncode}"}


def _mpirun() -> str:
    try:
        mpirun = find_mpirun()
    except UserError as error:
        return str(error)
    return f"{mpirun.path} ({mpirun.family} {mpirun.version})"


def _nccl() -> str | None:
    """The version of the NCCL that torch was built with."""
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

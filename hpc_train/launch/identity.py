"""Who the launcher says this process is: one table of the variables that launchers set.  PURE.

Only for what must be known before MPI starts, and to notice ranks that do not see each other; ranks
and hosts of a running world come from MPI itself.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_train.errors import UserError


@dataclass(frozen=True)
class Identity:
    """One of `size` ranks; what the launcher does not tell is None."""

    launcher: str
    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None


@dataclass(frozen=True)
class _Launcher:
    """A launcher and its variables; the first of a tuple that is set counts.

    `mark`: only with this variable too.  `fix`: what to do when its ranks do not see each other.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    mark: str
    fix: str


_SAME_MPI = "start with the mpirun of the MPI that mpi4py uses (hpc-train doctor names it)"

# The order matters: mpirun in a Slurm allocation starts its daemons with srun, whose SLURM_PROCID is then
# the daemon's, and Flux and srun may set PMI_* for the ranks they start.
_LAUNCHERS = (
    _Launcher(
        name="mpirun",  # Open MPI
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        mark="OMPI_COMM_WORLD_RANK",
        fix=_SAME_MPI,
    ),
    _Launcher(
        name="mpiexec",  # Hydra: MPICH, Intel MPI, MVAPICH
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
        mark="MPI_LOCALRANKID",
        fix=_SAME_MPI,
    ),
    _Launcher(
        name="mpiexec (PALS)",  # Cray
        rank="PALS_RANKID",
        size=("PALS_SIZE", "PMI_SIZE"),
        local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        mark="PALS_RANKID",
        fix="use Cray's MPI: build mpi4py with its compiler wrapper, MPICC=cc",
    ),
    _Launcher(
        name="flux",
        rank="FLUX_TASK_RANK",
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        local_size=(),
        mark="FLUX_TASK_RANK",
        fix="use flux run -o pmi=pmix for Open MPI, -o pmi=simple for MPICH",
    ),
    _Launcher(
        name="srun",
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        local_size=(),
        mark="SLURM_STEP_ID",
        fix="use srun --mpi=pmix (srun --mpi=list shows what is there)",
    ),
    _Launcher(
        name="a launcher",  # any that speaks PMI
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank=("PMI_LOCAL_RANK",),
        local_size=("PMI_LOCAL_SIZE",),
        mark="PMI_RANK",
        fix=_SAME_MPI,
    ),
    _Launcher(
        name="a launcher",  # any that speaks PMIx, as prterun; PMIx tells sizes only to who asks it
        rank="PMIX_RANK",
        size=(),
        local_rank=("PMIX_LOCAL_RANK",),
        local_size=(),
        mark="PMIX_RANK",
        fix=_SAME_MPI,
    ),
    _Launcher(
        name="horovodrun",  # without MPI; with it there is an mpirun
        rank="HOROVOD_RANK",
        size=("HOROVOD_SIZE",),
        local_rank=("HOROVOD_LOCAL_RANK",),
        local_size=("HOROVOD_LOCAL_SIZE",),
        mark="HOROVOD_RANK",
        fix="start with mpirun -n, or hpc-train launch -n",
    ),
)
_FIRST_PSEUDO_STEP = (
    4294967280  # Slurm numbers batch scripts and salloc's shells, which no srun started, from here
)


def find(environment: Mapping[str, str] | None = None) -> Identity | None:
    """What the launcher says, or None for a process that none started."""
    env = os.environ if environment is None else environment
    for launcher in _LAUNCHERS:
        rank = _number(env, launcher.rank)
        mark = _number(env, launcher.mark)
        if rank is None or mark is None or (launcher.mark == "SLURM_STEP_ID" and mark >= _FIRST_PSEUDO_STEP):
            continue
        local_size = _number(env, *launcher.local_size)
        if launcher.name == "srun":
            local_size = _tasks_on_this_node(env)
        return Identity(
            launcher.name, rank, _number(env, *launcher.size), _number(env, *launcher.local_rank), local_size
        )
    return None


def check(me: Identity | None, world_size: int) -> None:
    """Refuse N singletons: a launcher started several ranks, and each is a world of its own.

    Raises:
        UserError: with what to do about it.
    """
    if me is None or world_size > 1:
        return
    started = me.size or me.rank + 1
    if started > 1:
        fix = next(launcher.fix for launcher in _LAUNCHERS if launcher.name == me.launcher)
        raise UserError(
            f"{me.launcher} started {started} tasks, but MPI sees {started} worlds of one rank: {fix}"
        )


def _number(env: Mapping[str, str], *names: str) -> int | None:
    """The first of the variables that holds a number."""
    return next((int(env[name]) for name in names if env.get(name, "").isdigit()), None)


def _tasks_on_this_node(env: Mapping[str, str]) -> int | None:
    """Slurm writes tasks by node as `4(x2),3`: four on each of two nodes, three on the next."""
    node = _number(env, "SLURM_NODEID")
    if node is None:
        return None
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        node -= int(times or 1)
        if node < 0:
            return int(count)
    return None

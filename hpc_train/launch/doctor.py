"""`hpc-train doctor`: what this machine and this launch have, and what is wrong with them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpc_train.errors import EXIT_FAILED, EXIT_OK
from hpc_train.launch.facts import RankFacts, gather
from hpc_train.launch.findings import Finding, judge

if TYPE_CHECKING:
    from hpc_train.comm.interface import World

_HOSTS_SHOWN = 16


@dataclass(frozen=True)
class Findings:
    """The same on all ranks."""

    ranks: list[RankFacts]
    findings: list[Finding]

    @property
    def exit_code(self) -> int:
        """EXIT_FAILED when something would stop training."""
        return EXIT_FAILED if any(f.level == "stops" for f in self.findings) else EXIT_OK

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def examine(world: "World") -> Findings:
    """Gather everybody's facts and judge them.  Collective."""
    ranks = gather(world)
    return Findings(ranks, judge(ranks))


def render(findings: Findings) -> str:
    """What a person reads."""
    ranks = findings.ranks
    first = ranks[0]
    rows = [
        ("MPI", _describe_mpi(first)),
        ("mpirun", first.mpirun),
        ("launched by", _describe_launch(first)),
        ("versions", ", ".join(f"{name} {version}" for name, version in first.versions.items() if version)),
        ("GPUs", f"{len(first.gpus)} x {first.gpus[0]}" if first.gpus else "none"),
        ("NCCL", first.nccl or "no"),
        ("Horovod", first.horovod or "no"),
        ("Slurm", _describe_slurm(first)),
        *_describe_hosts(ranks),
    ]
    lines = [f"{name:<12} {text}" for name, text in rows]
    lines += ["", *(map(str, findings.findings) if findings.findings else ["nothing is wrong"])]
    return "\n".join(lines)


def _describe_mpi(rank: RankFacts) -> str:
    mpi = rank.mpi
    if "missing" in mpi:
        return f"none: {mpi['missing']}"
    ulfm = "no" if not mpi["ulfm"] else "started" if mpi["ulfm_started"] else "built in, not started"
    gpu = {True: "yes", False: "no", None: "unknown"}[mpi["cuda_aware"]]
    return (
        f"{mpi['vendor']} {mpi['version']} (standard {mpi['standard']}), "
        f"thread level {mpi['thread_level']} (asked for {mpi['thread_level_asked']}), "
        f"ULFM {ulfm}, GPU aware: {gpu}"
    )


def _describe_launch(rank: RankFacts) -> str:
    if rank.launcher is None:
        return "nothing: one rank"
    told = "" if rank.launcher_size in (None, rank.size) else f", which says {rank.launcher_size}"
    return f"{rank.launcher}: {rank.size} rank{'s' * (rank.size > 1)}{told}"


def _describe_slurm(rank: RankFacts) -> str:
    if rank.slurm:
        return ", ".join(f"{name.lower()}={value}" for name, value in rank.slurm.items())
    return f"no job; {rank.srun}" if rank.srun else "no"


def _describe_hosts(ranks: Sequence[RankFacts]) -> list[tuple[str, str]]:
    hosts: dict[str, list[RankFacts]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    rows = []
    for host, here in list(hosts.items())[:_HOSTS_SHOWN]:
        by_cores: dict[str, list[int]] = {}
        for rank in here:
            by_cores.setdefault(spans(rank.cores), []).append(rank.rank)
        parts = [
            f"rank{'s' * (len(group) > 1)} {spans(group)} on cores {text}" for text, group in by_cores.items()
        ]
        rows.append(("host", f"{host}, {here[0].host_cores} cores: {'; '.join(parts)}"))
    if len(hosts) > _HOSTS_SHOWN:
        rows.append(("", f"and {len(hosts) - _HOSTS_SHOWN} more hosts"))
    return rows


def spans(numbers: Sequence[int]) -> str:
    """Numbers in short: `0-3,8`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)

"""The line that starts ranks under each MPI: what differs between them stands here.  PURE."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpc_train.errors import UserError
from hpc_train.launch.mpirun import Mpirun


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class Site:
    """Where the ranks shall run."""

    num_cores: int  # of this host; 0 where binding is left alone
    hosts: tuple[Host, ...] = ()  # none: this host, or what the scheduler allocated
    allocated: int | None = None  # ranks that the allocation was made for; None outside of one
    interface: str | None = None  # network interface for MPI's own TCP
    is_root: bool = False
    terminal_columns: int = 0  # of the terminal that shows rank 0's output; 0: it is none


@dataclass(frozen=True)
class Line:
    """A command and what it needs in its environment; `str()` is what a shell takes."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        additions = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*additions, shlex.join(self.argv)])


def parse_hosts(text: str, num_ranks: int) -> tuple[Host, ...]:
    """`a:4,b:4` as hosts with slots; a host without a number has one.

    Raises:
        UserError: it cannot be read, or has fewer slots than ranks.
    """
    hosts = []
    for part in text.split(","):
        name, number = part.strip().rsplit(":", 1) if ":" in part else (part.strip(), "1")
        if not name or not number.isdigit() or int(number) == 0:
            raise UserError(f"--hosts {text}: {part!r} is not HOST:SLOTS, for instance --hosts a:4,b:4")
        hosts.append(Host(name, int(number)))
    slots = sum(host.slots for host in hosts)
    if slots < num_ranks:
        each = -(-num_ranks // len(hosts))
        enough = ",".join(f"{host.name}:{each}" for host in hosts)
        raise UserError(f"--hosts {text} has {slots} slots for {num_ranks} ranks: write --hosts {enough}")
    return tuple(hosts)


def make_line(mpirun: Mpirun, num_ranks: int, program: Sequence[str], site: Site) -> Line:
    """The line that starts `program` on `num_ranks` ranks.

    Ranks are bound to cores where each can have the same number of whole ones, and else to none: one
    rank's threads on one core, the default of Open MPI, are what makes training crawl.
    """
    here = not site.hosts and site.allocated is None
    crowded = here and 0 < site.num_cores < num_ranks
    each, left = divmod(site.num_cores, num_ranks)
    cores_each = each if here and left == 0 else 0
    if mpirun.family == "Open MPI":
        return _open_mpi(mpirun, num_ranks, program, site, cores_each, crowded)
    return _hydra(mpirun, num_ranks, program, site, cores_each)


def _open_mpi(
    mpirun: Mpirun, num_ranks: int, program: Sequence[str], site: Site, cores_each: int, crowded: bool
) -> Line:
    argv = [mpirun.path, "-n", str(num_ranks)]
    if site.is_root:  # refused otherwise
        argv += ["--allow-run-as-root"]
    if site.hosts:
        argv += ["--host", ",".join(f"{host.name}:{host.slots}" for host in site.hosts)]
    if cores_each:
        argv += ["--map-by", f"slot:PE={cores_each}", "--bind-to", "core"]
    else:
        argv += ["--map-by", "slot", "--bind-to", "none"]
    if crowded or (not site.hosts and site.allocated is not None and site.allocated < num_ranks):
        argv += ["--oversubscribe"]
    if crowded:  # else a rank that waits keeps the core from the rank that it waits for
        argv += ["--mca", "mpi_yield_when_idle", "1"]
    if site.interface:
        argv += ["--mca", "btl_tcp_if_include", site.interface]
    argv += ["-x", f"HPC_TRAIN_TERMINAL={site.terminal_columns}"]
    return Line((*argv, *program))


def _hydra(mpirun: Mpirun, num_ranks: int, program: Sequence[str], site: Site, cores_each: int) -> Line:
    """MPICH's launcher, and Intel's, which grew out of it."""
    argv = [mpirun.path, "-n", str(num_ranks)]
    environment = {}
    if mpirun.family == "Intel MPI":
        environment["I_MPI_JOB_SIGNAL_PROPAGATION"] = "on"  # so that SIGTERM reaches the ranks
        if site.hosts:
            if len({host.slots for host in site.hosts}) > 1:
                raise UserError("Intel MPI takes the same number of ranks on each host: --hosts a:4,b:4")
            argv += ["-hosts", ",".join(host.name for host in site.hosts)]
            argv += ["-ppn", str(site.hosts[0].slots)]
        binding = (
            ["-genv", "I_MPI_PIN_DOMAIN", str(cores_each)] if cores_each else ["-genv", "I_MPI_PIN", "0"]
        )
    else:
        if site.hosts:
            argv += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in site.hosts)]
        binding = ["-bind-to", f"core:{cores_each}" if cores_each else "none"]
    argv += binding
    if site.interface:
        argv += ["-iface", site.interface]
    argv += ["-genv", "HPC_TRAIN_TERMINAL", str(site.terminal_columns)]
    return Line((*argv, *program), environment)

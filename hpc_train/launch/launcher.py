"""Start the ranks: build the line for the MPI that is installed, run it, pass signals on."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from hpc_train.errors import UserError
from hpc_train.launch.binding import cores, cpus
from hpc_train.launch.line import Line, Site, make_line, parse_hosts
from hpc_train.launch.mpirun import Family, Mpirun, find_mpirun

# What tells the ranks to save and stop.  Open MPI's mpirun answers SIGTERM by killing its ranks after
# half a second, but passes SIGUSR2 on; Hydra passes SIGTERM on and dies of SIGUSR2.
STOP_SIGNAL: Mapping[Family, signal.Signals] = {
    "Open MPI": signal.SIGUSR2,
    "MPICH": signal.SIGTERM,
    "Intel MPI": signal.SIGTERM,
}


def command(
    num_ranks: int,
    hosts: str | None,
    args: Sequence[str],
    interface: str | None = None,
    mpirun: Mpirun | None = None,
    program: Sequence[str] = ("-m", "hpc_train"),
) -> Line:
    """The line that runs `hpc-train ARGS` on `num_ranks` ranks: here, on `hosts`, or in the allocation.

    `program` is what this Python runs instead, for instance a script's path.
    `interface` (default: HPC_TRAIN_INTERFACE) names the network interface that MPI's TCP shall use.

    Raises:
        UserError: there is no mpirun, or the hosts have too few slots.
    """
    if num_ranks < 1:
        raise UserError(f"-n {num_ranks}: start at least 1 rank")
    bindable = hasattr(os, "sched_getaffinity") and len(cpus()) == os.cpu_count()
    site = Site(
        # A mask narrower than the host is somebody's binding already: mpirun would bind outside of it.
        num_cores=len(cores()) if bindable or len(cores()) < num_ranks else 0,
        hosts=parse_hosts(hosts, num_ranks) if hosts else (),
        allocated=_allocated(os.environ),
        interface=interface or os.environ.get("HPC_TRAIN_INTERFACE") or None,
        is_root=os.geteuid() == 0,
        terminal_columns=shutil.get_terminal_size().columns if sys.stdout.isatty() else 0,
    )
    return make_line(mpirun or find_mpirun(), num_ranks, [sys.executable, *program, *args], site)


def _allocated(environ: Mapping[str, str]) -> int | None:
    """The ranks that a Slurm allocation was made for, where mpirun itself asks Slurm for the hosts."""
    if "SLURM_JOB_ID" not in environ:
        return None
    return int(environ.get("SLURM_NTASKS") or environ.get("SLURM_JOB_NUM_NODES") or 1)


def launch(num_ranks: int, hosts: str | None, args: Sequence[str], interface: str | None = None) -> int:
    """Print the line on stderr, run it, and return its exit code.

    A first SIGTERM asks the ranks to save and stop; SIGINT, SIGHUP and a second SIGTERM end the job.

    Raises:
        UserError: as `command`.
    """
    mpirun = find_mpirun()
    line = command(num_ranks, hosts, args, interface, mpirun)
    print(line, file=sys.stderr, flush=True)  # noqa: T201
    return run(line, STOP_SIGNAL[mpirun.family])


class Translation:
    """What a signal to `launch` becomes for mpirun.

    SIGUSR2 and a first SIGTERM ask the ranks to save and stop; asked once, they know.  The others, and
    a second SIGTERM, pass through as they are.
    """

    def __init__(self, stop_signal: signal.Signals) -> None:
        self._stop_signal = stop_signal
        self._asked = False
        self.seen: set[int] = set()

    def __call__(self, number: int) -> int | None:
        """The signal to send, or None for nothing."""
        asks = number == signal.SIGUSR2 or (number == signal.SIGTERM and number not in self.seen)
        self.seen.add(number)
        if not asks:
            return number
        if self._asked:
            return None
        self._asked = True
        return self._stop_signal


def run(line: Line, stop_signal: signal.Signals) -> int:
    """Run a line in a process group of its own and pass signals on; 128 + N where signal N ended it."""
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that come before there is a process to pass them to
    translate = Translation(stop_signal)

    def forward(number: int, frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        elif (sent := translate(number)) is not None:
            process.send_signal(sent)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        # Its own group: a terminal's ctrl-C then reaches it once, from us, and not twice.
        process = subprocess.Popen(
            line.argv,
            env={**os.environ, **line.environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        for number in early:
            forward(number, None)
        returncode = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGINT in translate.seen:
        return 128 + signal.SIGINT
    return returncode if returncode >= 0 else 128 - returncode

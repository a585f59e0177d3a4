"""Signals and exit codes pass through `launch`; a small script stands for mpirun."""

import os
import signal
import sys

import pytest

from hpc_train.errors import UserError
from hpc_train.launch import launcher
from hpc_train.launch.line import Line
from hpc_train.launch.mpirun import Mpirun

OPEN_MPI = Mpirun("mpirun", "Open MPI", "5.0.11")
# Sends each signal to `launch`, its parent, and notes the one that comes back.
ECHO = """
import os, signal, sys
out, *sent = sys.argv[1:]
every = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP}
signal.pthread_sigmask(signal.SIG_BLOCK, every)
for name in sent:
    os.kill(os.getppid(), getattr(signal, name))
    came = signal.sigtimedwait(every, 20)
    print(signal.Signals(came.si_signo).name if came else None, file=open(out, "a"))
"""


@pytest.mark.parametrize(
    ("stop_signal", "sent", "passed_on"),
    [
        ("SIGUSR2", "SIGTERM", "SIGUSR2"),
        ("SIGUSR2", "SIGTERM SIGTERM", "SIGUSR2 SIGTERM"),
        ("SIGUSR2", "SIGUSR2 SIGTERM SIGTERM", "SIGUSR2 - SIGTERM"),
        ("SIGUSR2", "SIGTERM SIGUSR2 SIGHUP", "SIGUSR2 - SIGHUP"),
        ("SIGUSR2", "SIGINT", "SIGINT"),
        # Hydra dies of SIGUSR2, and a second SIGTERM that reaches the ranks ends them
        ("SIGTERM", "SIGUSR2 SIGUSR2 SIGTERM", "SIGTERM - -"),
        ("SIGTERM", "SIGTERM SIGTERM", "SIGTERM SIGTERM"),
    ],
)
def test_translation(stop_signal, sent, passed_on):
    translate = launcher.Translation(signal.Signals[stop_signal])
    became = [translate(signal.Signals[name]) for name in sent.split()]
    assert [signal.Signals(number).name if number else "-" for number in became] == passed_on.split()


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        ("SIGTERM SIGTERM", "SIGUSR2 SIGTERM"),
        ("SIGUSR2 SIGHUP", "SIGUSR2 SIGHUP"),
        ("SIGTERM SIGINT", "SIGUSR2 SIGINT"),
    ],
)
def test_signals_reach_the_process(tmp_path, sent, passed_on):
    out = tmp_path / "came"
    line = Line((sys.executable, "-c", ECHO, str(out), *sent.split()))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, by all children too
    try:
        returncode = launcher.run(line, signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert out.read_text().split() == passed_on.split()
    assert returncode == (130 if "SIGINT" in sent else 0)


def test_handlers_come_back():
    before = signal.getsignal(signal.SIGINT)
    launcher.run(Line((sys.executable, "-c", "")), signal.SIGUSR2)
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_exit_codes(code):
    assert launcher.run(Line((sys.executable, "-c", f"raise SystemExit({code})")), signal.SIGUSR2) == code


def test_a_launcher_that_a_signal_ends():
    line = Line((sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    assert launcher.run(line, signal.SIGUSR2) == 128 + 9


def test_additions_to_the_environment_reach_the_launcher():
    program = "import os; raise SystemExit(int(os.environ['HPC_TRAIN_TEST_CODE']))"
    line = Line((sys.executable, "-c", program), {"HPC_TRAIN_TEST_CODE": "7"})
    assert launcher.run(line, signal.SIGUSR2) == 7


@pytest.fixture
def host(monkeypatch):
    """A host of four cores, a user who is not root, and no allocation."""
    monkeypatch.setattr(launcher, "cores", lambda: frozenset(range(4)))
    monkeypatch.setattr(launcher, "cpus", lambda: frozenset(range(4)))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "HPC_TRAIN_"))]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_program_is_this_package(host):
    line = launcher.command(2, None, ["train", "x.toml"], mpirun=OPEN_MPI)
    assert line.argv[-5:] == (sys.executable, "-m", "hpc_train", "train", "x.toml")
    assert "--allow-run-as-root" not in line.argv
    assert "slot:PE=2" in line.argv


def test_root_is_told_to_mpirun_only_where_it_is(host):
    host.setattr(os, "geteuid", lambda: 0)
    assert "--allow-run-as-root" in launcher.command(2, None, [], mpirun=OPEN_MPI).argv


def test_a_narrower_mask_is_somebodys_binding(host):
    """mpirun binds to the host's first cores, also where a mask leaves others only."""
    host.setattr(os, "cpu_count", lambda: 64)
    assert "none" in launcher.command(2, None, [], mpirun=OPEN_MPI).argv
    assert "--oversubscribe" in launcher.command(5, None, [], mpirun=OPEN_MPI).argv


def test_in_an_allocation_mpirun_asks_the_scheduler(host):
    host.setenv("SLURM_JOB_ID", "7")
    host.setenv("SLURM_NTASKS", "16")
    argv = launcher.command(16, None, [], mpirun=OPEN_MPI).argv
    assert not {"--host", "--oversubscribe", "core"} & set(argv)
    host.setenv("SLURM_NTASKS", "")
    host.setenv("SLURM_JOB_NUM_NODES", "2")
    assert "--oversubscribe" in launcher.command(3, None, [], mpirun=OPEN_MPI).argv


def test_the_interface_comes_from_the_option_or_the_environment(host):
    host.setenv("HPC_TRAIN_INTERFACE", "eth1")
    assert "eth1" in launcher.command(2, None, [], mpirun=OPEN_MPI).argv
    assert "ib0" in launcher.command(2, None, [], interface="ib0", mpirun=OPEN_MPI).argv


def test_no_ranks(host):
    with pytest.raises(UserError, match="-n 0: start at least 1 rank"):
        launcher.command(0, None, [], mpirun=OPEN_MPI)

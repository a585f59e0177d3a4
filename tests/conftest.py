"""Fixtures of all tests."""

import importlib.util
import os
import signal
import sys

import pytest
import torch
from mpirun import mpirun as start_ranks

from hpc_train import cli

for _name in [name for name in os.environ if name.startswith("HOROVOD_")]:
    del os.environ[_name]  # they mean something to hpc_train too


@pytest.fixture(scope="session")
def mpirun():
    """The function that starts Python on several ranks: see mpirun.py."""
    return start_ranks


@pytest.fixture(scope="session")
def mpirun_horovod():
    """The same for ranks that use Horovod, which waits for ever unless it is told to give up."""
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: make horovod")
    patience = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "10", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60"}

    def start(num_ranks, args, timeout_s=60, env=None):
        return start_ranks(num_ranks, args, timeout_s, {**patience, **(env or {})})

    return start


@pytest.fixture
def hpc_train_here(monkeypatch, capsys):
    """Runs `hpc-train` in this process; returns its exit code, stdout and stderr."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["hpc-train", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return run


@pytest.fixture
def threads_as_before():
    """Workers and measurements set torch's threads, which are the process's."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def signals_as_before():
    """`train` takes SIGTERM and SIGUSR2 for the rest of its process, which here is the tests'."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)

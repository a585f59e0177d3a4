"""Fixtures of all tests."""

import signal

import pytest
from mpirun import mpirun as start_ranks


@pytest.fixture(scope="session")
def mpirun():
    """The function that starts Python on several ranks: see mpirun.py."""
    return start_ranks


@pytest.fixture
def signals_as_before():
    """`train` takes SIGTERM and SIGUSR2 for the rest of its process, which here is the tests'."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)

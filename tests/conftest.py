"""Fixtures of all tests."""

import pytest
from mpirun import mpirun as start_ranks


@pytest.fixture(scope="session")
def mpirun():
    """The function that starts Python on several ranks: see mpirun.py."""
    return start_ranks

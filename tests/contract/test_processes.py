"""The contract under mpirun: one launch for all checks of a backend, number of ranks and thread level."""

import functools
from pathlib import Path

import cases
import mpi_cases
import pytest

LAUNCH = Path(__file__).with_name("launch.py")
# Below SERIALIZED only the main thread may call MPI: the sums are then made there.
# The last number: ranks that count as a host, so that sums between hosts are seen on one; 0 is the real host.
MPI_LAUNCHES = [
    *[(2, "multiple", 0), (4, "multiple", 0), (3, "serialized", 0), (2, "funneled", 0)],
    *[(4, "multiple", 1), (4, "multiple", 3), (4, "serialized", 2), (2, "funneled", 1)],
]


@functools.cache
def launched(mpirun, backend, names, num_ranks, level, ranks_a_host=0):
    env = {"HPC_TRAIN_THREAD_LEVEL": level}
    if ranks_a_host:
        env["HPC_TRAIN_RANKS_A_HOST"] = str(ranks_a_host)
    return mpirun(num_ranks, [LAUNCH, backend, *names], timeout_s=120, env=env)


def assert_passed(name, names, done):
    failed = next((n for n in names if f"passed {n}\n" not in done.stdout), None)
    if name == failed:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
    if f"passed {name}\n" not in done.stdout:
        pytest.skip(f"{failed} has failed before")
    assert failed or done.returncode == 0, done.stderr


@pytest.mark.parametrize(("num_ranks", "level", "ranks_a_host"), MPI_LAUNCHES)
@pytest.mark.parametrize("name", cases.checks() | mpi_cases.checks())
def test_mpi(name, num_ranks, level, ranks_a_host, mpirun):
    names = tuple(cases.checks() | mpi_cases.checks())
    assert_passed(name, names, launched(mpirun, "mpi", names, num_ranks, level, ranks_a_host))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", cases.checks())
def test_gloo(name, num_ranks, mpirun):
    names = tuple(cases.checks())
    assert_passed(name, names, launched(mpirun, "gloo", names, num_ranks, "multiple"))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", cases.checks())
def test_horovod(name, num_ranks, mpirun_horovod):
    names = tuple(cases.checks())
    assert_passed(name, names, launched(mpirun_horovod, "horovod", names, num_ranks, "multiple"))

"""The launch of ranks in tests: exit codes and texts come back, and a launch that hangs is killed."""

import psutil
import pytest


def test_every_rank_runs(mpirun):
    done = mpirun(
        3, ["-c", "from mpi4py import MPI; print('rank', MPI.COMM_WORLD.rank, 'of', MPI.COMM_WORLD.size)"]
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-3:] == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]


def test_the_exit_code_comes_back(mpirun):
    fail = "from mpi4py import MPI; w = MPI.COMM_WORLD; w.rank == 1 and w.Abort(7); w.Barrier()"
    assert mpirun(2, ["-c", fail]).returncode == 7


def test_a_launch_that_hangs_is_killed_with_its_ranks(mpirun, tmp_path):
    wait = "import os, signal, sys; open(f'{sys.argv[1]}/{os.getpid()}', 'w').close(); signal.pause()"
    with pytest.raises(pytest.fail.Exception, match=r"not done after 3 s"):
        mpirun(2, ["-c", wait, str(tmp_path)], timeout_s=3)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)

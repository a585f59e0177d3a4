"""How ranks of a real launch end: the exit code, and what is said, once."""

import socket
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM = """
import sys
from hpc_train.comm.connect import connect
from hpc_train.errors import UserError
from hpc_train.training.guard import guard

def fail():
    raise {error}

world = connect()
guard(world, fail if world.rank in {failing} else world.control.barrier)
"""


def end(mpirun, tmp_path, error, failing):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(error=error, failing=failing))
    return mpirun(2, [program], timeout_s=60)


@pytest.mark.parametrize("failing", [(0, 1), (1,)])
def test_a_users_mistake_is_told_once_and_ends_all_with_2(mpirun, tmp_path, failing):
    done = end(mpirun, tmp_path, "UserError('batch.size=0: set it to 1')", failing)
    assert done.returncode == 2, done.stderr
    told = [line for line in done.stderr.splitlines() if "error: " in line]
    where = "" if 0 in failing else f" (rank 1 on {socket.gethostname()})"
    assert told == [f"error: batch.size=0: set it to 1{where}"]
    assert "Traceback" not in done.stderr


def test_an_exception_on_one_rank_ends_all_with_1_its_traceback_rank_and_host(mpirun, tmp_path):
    done = end(mpirun, tmp_path, "ZeroDivisionError('zero')", (1,))
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "ZeroDivisionError: zero" in done.stderr
    assert f"rank 1 of 2 on {socket.gethostname()} failed" in done.stderr


def test_a_task_file_that_fails_on_one_rank_alone_is_told_with_that_rank(mpirun, tmp_path):
    """It fails before the ranks have met; the other one waits for it already."""
    task = tmp_path / "my_task.py"
    task.write_text(
        "import os\n"
        "from hpc_train.tasks.regression import Regression\n"
        "rank = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']\n"
        "class Mine(Regression):\n"
        "    value = {'0': 1}[rank]\n"
    )
    config = EXAMPLES / "regression.toml"
    done = mpirun(2, ["-m", "hpc_train", "train", config, f"task={task}:Mine"], timeout_s=60, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "KeyError: '1'" in done.stderr
    assert f"rank 1 of 2 on {socket.gethostname()} failed" in done.stderr
    assert not (tmp_path / "runs").exists()

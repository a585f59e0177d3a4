"""The package on another MPI: MPICH's ABI, launcher and way of waiting."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mpich import mpich_python

ROOT = Path(__file__).parents[2]
CONTRACT = ROOT / "tests" / "contract"


@pytest.fixture(scope="module")
def python():
    return mpich_python()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_contract_holds(mpirun, python, num_ranks):
    """The contract's checks of the MPI backend, in one launch; see tests/contract."""
    listing = "import cases, mpi_cases; print(*(cases.checks() | mpi_cases.checks()))"
    names = subprocess.run(
        [sys.executable, "-c", listing], cwd=CONTRACT, capture_output=True, text=True, check=True
    ).stdout.split()
    done = mpirun(num_ranks, [CONTRACT / "launch.py", "mpi", *names], timeout_s=120, python=python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("passed")] == names


def test_it_trains(mpirun, python, tmp_path):
    """The demo's model, small, on 2 x 2 ranks with fp16 on the network: checkpoint, falling losses."""
    small = ["context=16", "hidden=32", "blocks=4", "heads=2"]
    settings = [
        *(f"task_options.{option}" for option in small),
        "train.steps=30",
        "train.evaluate_every=0",
        "checkpoint.every=0",
        "optimizer.warmup_steps=2",
    ]
    args = ["-m", "hpc_train", "train", ROOT / "examples" / "bytelm.toml", *settings, "--run-dir", tmp_path]
    done = mpirun(4, args, timeout_s=120, python=python)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000030"]


def test_ranks_of_the_wrong_mpi_are_refused(python):
    """MPICH's mpirun starts Open MPI's ranks as worlds of one each: said once, with exit code 2."""
    launcher = Path(python).with_name("mpirun")
    done = subprocess.run(
        [launcher, "-n", "2", sys.executable, "-m", "hpc_train", "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    words = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(words) == 1
    assert "2 tasks" in words[0]
    assert "2 worlds of one rank" in words[0]

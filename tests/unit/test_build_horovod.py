"""tools/build_horovod.py up to where it compiles: what is missing, and where a wheel fits."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "build_horovod.py"


def run(*options, **env):
    command = [sys.executable, TOOL, *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env, timeout=60)


@pytest.mark.parametrize(("options", "exit_code"), [([], 1), (["--if-possible"], 0)])
def test_a_missing_compiler_is_one_line(options, exit_code):
    done = run(*options, CXX="no-such-compiler -O3")
    assert done.returncode == exit_code
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no-such-compiler" in done.stderr
    assert "apt-get install" in done.stderr


@pytest.fixture(scope="module")
def wheel_folder():
    return runpy.run_path(str(TOOL))["wheel_folder"]


def test_a_wheel_belongs_to_versions(wheel_folder):
    name = wheel_folder("2.13.0+cpu", "Open MPI v5.0.11", {"HOROVOD_WITH_MPI": "1", "PATH": "/bin"})
    assert name.startswith(
        f"torch-2.13.0+cpu_py{sys.version_info[0]}.{sys.version_info[1]}_open-mpi-v5.0.11_"
    )
    others = {
        wheel_folder(torch, mpi, {}) for torch in ("2.13.0", "2.12.0") for mpi in ("MPICH 4.2", "MPICH 4.3")
    }
    assert len(others) == 4
    assert "/" not in "".join(others)


def test_unusual_options_have_a_wheel_of_their_own(wheel_folder):
    plain = wheel_folder("2.13.0", "MPICH 4.2", {"HOROVOD_CYCLE_TIME": "5"})
    assert plain == wheel_folder("2.13.0", "MPICH 4.2", {"HOROVOD_CPU_OPERATIONS": "MPI"})
    gpus = wheel_folder(
        "2.13.0", "MPICH 4.2", {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CUDA_HOME": "/a b/c"}
    )
    assert gpus == f"{plain}_cuda_home-a-b-c_gpu_operations-nccl"

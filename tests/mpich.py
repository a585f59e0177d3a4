"""Make a virtual environment with MPICH, in .venv-mpich: python tests/mpich.py

It holds MPICH and mpi4py; all other packages, torch above all, come from the environment of the Python
that runs this.  mpi4py loads the MPI library that stands in the environment of its own Python.
"""

import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WHERE = ROOT / ".venv-mpich"


def mpich_python() -> str:
    """The Python of that environment; a test that asks for it skips where there is none."""
    python = WHERE / "bin" / "python"
    if not (WHERE / "lib").exists() or not python.exists():
        pytest.skip("MPICH is not installed: make mpich")
    return str(python)


def make(where: Path) -> None:
    """Make it, or bring it up to date."""
    venv.create(where, with_pip=True)
    pip = [str(where / "bin" / "pip"), "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "mpich", "mpi4py"], check=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(where.absolute())})
    others = sysconfig.get_path("purelib")
    # site reads it after the environment's own packages, so that its own mpi4py is found first.
    (Path(packages) / "others.pth").write_text(f"import site; site.addsitedir({others!r})\n")


if __name__ == "__main__":
    make(WHERE)

"""Several hosts on this machine with links of a given rate, for as long as a `with` lasts.

    with Lab(4, "200mbit") as lab:
        subprocess.run(lab.on_first_host(["mpirun", ...]), env={**os.environ, **lab.environment})
        lab.sent_bytes()    # {"h0": 25165824, ...}

benchmarks/netlab.sh says how it is made; it can be used by hand, too.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_SCRIPT = str(Path(__file__).with_name("netlab.sh"))
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
_NUM_LINES_OF_WHY = 3


class NoLab(Exception):
    """There can be no lab here; the text says why."""


def why_not() -> str | None:
    """Why this process cannot make a lab, or None where it seems able to."""
    if os.geteuid() != 0:
        return "hosts with links of their own need root"
    missing = {package for tool, package in _TOOLS.items() if shutil.which(tool, path=_PATH) is None}
    if missing:
        return f"hosts with links of their own need {' and '.join(sorted(missing))}"
    return None


class Lab:
    """Hosts h0, h1, ...; all is taken down at the end of the `with`, whatever runs there is killed.

    Args:
        num_hosts: 1 or more.
        rate: of each link in either direction, as tc writes it: "200mbit".

    `environment` is what Open MPI's mpirun needs on the first host to start ranks on the others.
    """

    def __init__(self, num_hosts: int, rate: str) -> None:
        self.hosts = [f"h{number}" for number in range(num_hosts)]
        self.folder = ""
        self._rate = rate

    def __enter__(self) -> "Lab":
        """Raises NoLab."""
        if reason := why_not():
            raise NoLab(reason)
        self.folder = tempfile.mkdtemp(prefix="netlab-")
        done = _run("up", self.folder, str(len(self.hosts)), self._rate)
        if done.returncode != 0:
            self._take_down()
            why = "; ".join(done.stderr.strip().splitlines()[:_NUM_LINES_OF_WHY])
            raise NoLab(f"hosts with links of their own cannot be made here: {why}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_down()

    @property
    def environment(self) -> Mapping[str, str]:
        """How Open MPI starts ranks on the hosts, and talks between them: TCP over the shaped links."""
        return {
            "PRTE_MCA_plm_ssh_agent": f"{_SCRIPT} ssh {self.folder}",
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "tcp,sm,self",
            "OMPI_MCA_btl_tcp_if_include": "eth0",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }

    def on_first_host(self, command: Sequence[str]) -> list[str]:
        """The command as it is run on h0."""
        return [_SCRIPT, "exec", self.folder, self.hosts[0], *command]

    def sent_bytes(self) -> dict[str, int]:
        """What each host has sent so far, with the headers of its frames."""
        return sent_bytes(self.folder)

    def _take_down(self) -> None:
        _run("down", self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)


def sent_bytes(folder: str) -> dict[str, int]:
    """As Lab.sent_bytes, for a process inside the lab whose folder this is."""
    done = _run("tx", folder)
    done.check_returncode()
    return {host: int(count) for host, count in map(str.split, done.stdout.splitlines())}


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([_SCRIPT, *args], capture_output=True, text=True, stdin=subprocess.DEVNULL)

"""Starts a benchmark's ranks case by case, here or in a lab, and joins what they measured into one file.

The script starts itself again for each case:  main.py  ->  mpirun main.py --case ... --part FILE
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.netlab import Lab, NoLab, sent_bytes
from benchmarks.records import (
    TOP,
    Record,
    Results,
    Skipped,
    describe,
    load_records,
    table,
    with_ratios,
    write,
)
from hpc_train.comm.connect import connect
from hpc_train.comm.interface import World
from hpc_train.launch.binding import cores
from hpc_train.launch.line import Host, Site, make_line
from hpc_train.launch.mpirun import find_mpirun

_LONGEST_CASE_S = 2 * 3600.0
# What Open MPI and Gloo print in network namespaces, where it means nothing.
_HARMLESS = ("setpgid", "hostname of the client socket", "[W socket.cpp")


@dataclass(frozen=True)
class Place:
    """Where ranks run: on this host (rate_mbit 0), or on hosts of a lab with links of that rate."""

    hosts: int
    ranks_a_host: int
    rate_mbit: int = 0

    @property
    def name(self) -> str:
        """`4 hosts x 2 ranks`."""
        many = [
            f"{n} {word}" + "s" * (n > 1) for n, word in ((self.hosts, "host"), (self.ranks_a_host, "rank"))
        ]
        return " x ".join(many)

    @property
    def num_ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.ranks_a_host

    def limit_s(self, num_bytes: int) -> float:
        """The least time to sum `num_bytes` between hosts: 2 (n - 1) / n of them leave each of n hosts."""
        return 2 * (self.hosts - 1) / self.hosts * num_bytes * 8 / (self.rate_mbit * 1e6)


@dataclass
class Session:
    """One case, as its ranks see it."""

    world: World
    place: Place
    case: str
    short: bool
    lab_folder: str = ""
    skipped: list[Skipped] = field(default_factory=list)

    def skip(self, impl: str, reason: str) -> None:
        """Say that `impl` is left out of this case."""
        self.skipped.append(Skipped(self.case, impl, reason))

    def note(self, text: str) -> None:
        """Tell how far it is, on rank 0."""
        if self.world.rank == 0:
            print(f"{self.case}: {text}", file=sys.stderr, flush=True)

    def sent_bytes(self) -> int | None:
        """What the busiest host of the lab has sent so far, on rank 0; None elsewhere."""
        if not self.lab_folder or self.world.rank != 0:
            return None
        return max(sent_bytes(self.lab_folder).values())


def main(
    doc: str,
    name: str,
    cases: Mapping[str, Place],
    measure: Callable[[Session], Sequence[Record]],
    short_cases: Sequence[str] | None = None,
) -> None:
    """The command line of a benchmark.

    Args:
        doc: its description.
        name: of its file in benchmarks/results/.
        cases: where each of its cases runs.
        measure: runs on every rank of a case; the records of rank 0 are kept.
        short_cases: what --short runs; default: all.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer cases and repetitions")
    parser.add_argument("--case", action="append", choices=list(cases), help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=TOP / "benchmarks" / "results" / f"{name}.json")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)  # these three are for the ranks
    parser.add_argument("--lab", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        (case,) = args.case
        _be_a_rank(args.part, case, cases[case], measure, args.short, args.lab)
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that labs are taken down
    chosen = args.case or (short_cases if args.short and short_cases else list(cases))
    results = Results(name, args.short, [], [], describe())
    for number, case in enumerate(chosen, start=1):
        began = time.monotonic()
        print(f"{name}, case {number} of {len(chosen)}: {case}", file=sys.stderr, flush=True)
        try:
            part = _run(case, cases[case], args.short)
        except NoLab as reason:
            part = {"records": [], "skipped": [asdict(Skipped(case, "all", str(reason)))], "world": {}}
        if cases[case].rate_mbit:
            results.facts.setdefault("rates_mbit", {})[case] = cases[case].rate_mbit
        records = with_ratios(load_records(part["records"]))
        results.records.extend(records)
        results.skipped.extend(Skipped(**item) for item in part["skipped"])
        if part["world"]:
            results.facts.setdefault("worlds", {})[case] = part["world"]
        write(args.out, results)  # after each case: what is measured stays, whatever comes next
        if records:
            print(table(records), flush=True)
        for item in part["skipped"]:
            print(f"not measured: {item['case']}, {item['impl']}: {item['reason']}", flush=True)
        print(f"{name}, {case}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"raw numbers: {args.out}")


def _run(case: str, place: Place, short: bool) -> dict[str, Any]:
    """Start the ranks of a case, wait for them and return what rank 0 wrote.

    Raises:
        NoLab: it needs a lab, which cannot be made here.
        SystemExit: the ranks failed; they have said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        program = [sys.executable, sys.argv[0], "--case", case, "--part", str(part)]
        program += ["--short"] * short
        if place.num_ranks == 1:
            _start(program, {})
        elif place.hosts == 1:
            line = make_line(find_mpirun(), place.num_ranks, program, _site(place))
            _start(line.argv, line.environment)
        else:
            mpirun = find_mpirun()
            if mpirun.family != "Open MPI":
                raise NoLab(f"hosts with links of their own need Open MPI's mpirun, not {mpirun.family}'s")
            with Lab(place.hosts, f"{place.rate_mbit}mbit") as lab:
                line = make_line(mpirun, place.num_ranks, [*program, "--lab", lab.folder], _site(place))
                _start(lab.on_first_host(line.argv), {**lab.environment, **line.environment})
        content: dict[str, Any] = json.loads(part.read_text())
        return content


def _site(place: Place) -> Site:
    """No rank is bound to cores: peers have threads of their own, which must find the idle ones."""
    crowded = place.num_ranks > len(cores())
    hosts = tuple(Host(f"h{number}", place.ranks_a_host) for number in range(place.hosts))
    return Site(
        num_cores=len(cores()) if crowded else 0,
        hosts=hosts if place.hosts > 1 else (),
        is_root=os.geteuid() == 0,
    )


def _start(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run to the end, passing on what is printed; raises SystemExit when it fails."""
    process = subprocess.Popen(
        command,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",  # so that peers/openmpi.py can choose algorithms
            **environment,
        },
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    alarm = threading.Timer(_LONGEST_CASE_S, _end, [process])
    alarm.daemon = True
    alarm.start()
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.strip() and not any(text in line for text in _HARMLESS):
                print(line, end="", file=sys.stderr, flush=True)
        if process.wait() != 0:
            sys.exit(f"the ranks ended with {process.returncode}: {' '.join(command)}")
    finally:
        alarm.cancel()
        _end(process)


def _end(process: "subprocess.Popen[str]") -> None:
    """End a launch that is still there, and all that it started."""
    if process.poll() is None:
        for member in psutil.Process(process.pid).children(recursive=True):
            member.kill()
        process.kill()
        process.wait()


def _be_a_rank(
    part: Path,
    case: str,
    place: Place,
    measure: Callable[[Session], Sequence[Record]],
    short: bool,
    lab_folder: str,
) -> None:
    world = connect("mpi" if place.num_ranks > 1 else "auto")
    session = Session(world, place, case, short, lab_folder)
    try:
        records = measure(session)
    except BaseException:  # noqa: BLE001  the others wait for this rank: all end
        traceback.print_exc()
        world.control.abort(1)
    if world.rank == 0:
        content = {
            "records": [asdict(r) for r in records],
            "skipped": [asdict(s) for s in session.skipped],
            "world": world.describe(),
        }
        part.write_text(json.dumps(content))
    world.close()

"""What every benchmark writes: one schema, raw numbers kept, the machine described.

{"case", "impl", "wire", "bytes", "median_s", "quartiles_s", "ratio_to_best_peer", "raw_s"}
"""

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

_TOP = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Record:
    """One implementation in one case.  `bytes`: of the gradients; ratios below 1 are faster than the peer."""

    case: str
    impl: str
    wire: str
    bytes: int
    median_s: float
    quartiles_s: tuple[float, float]
    raw_s: tuple[float, ...]
    peer: bool
    ratio_to_best_peer: float | None = None


def record(case: str, impl: str, wire: str, num_bytes: int, raw_s: Sequence[float], peer: bool) -> Record:
    """The record of repeated times."""
    low, middle, high = statistics.quantiles(raw_s, n=4)
    return Record(case, impl, wire, num_bytes, middle, (low, high), tuple(raw_s), peer)


def with_ratios(records: Sequence[Record]) -> list[Record]:
    """The same, each with its ratio to the fastest peer of its case."""
    best = {
        case: min(r.median_s for r in records if r.case == case and r.peer)
        for case in {r.case for r in records if r.peer}
    }
    return [
        replace(r, ratio_to_best_peer=r.median_s / best[r.case]) if r.case in best else r for r in records
    ]


def table(records: Sequence[Record]) -> str:
    """A table for people."""
    lines = [f"{'case':<28}{'impl':<12}{'wire':<6}{'median ms':>10}{'quartiles ms':>18}{'to best peer':>14}"]
    for r in records:
        ratio = "" if r.ratio_to_best_peer is None else f"{r.ratio_to_best_peer:.2f} x"
        spread = f"{r.quartiles_s[0] * 1e3:.1f} - {r.quartiles_s[1] * 1e3:.1f}"
        lines.append(f"{r.case:<28}{r.impl:<12}{r.wire:<6}{r.median_s * 1e3:>10.1f}{spread:>18}{ratio:>14}")
    return "\n".join(lines)


def write(path: Path, records: Sequence[Record], **more: Any) -> None:
    """Keep the records with the command, the hardware and the versions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "command": ["python", os.path.relpath(sys.argv[0], _TOP), *sys.argv[1:]],
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy", "mpi4py", "hpc_train")},
        },
        **more,
        "records": [asdict(r) for r in records],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()

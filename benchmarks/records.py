"""What every benchmark writes: one schema, raw numbers kept, the machine described.

{"case", "impl", "wire", "bytes", "role", "median_s", "quartiles_s", "ratio_to_best_peer",
 "ratio_to_same_wire", "limit_s", "ratio_to_limit", "detail", "raw_s"}
"""

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil

TOP = Path(__file__).resolve().parents[1]
OURS = "hpc_train"
Role = Literal["ours", "peer", "reference"]

_DIGITS = 6  # of the times that are kept: fewer than any clock has, more than any measurement means
# Wires of the same width compete for the same links.
_WIDTH = {"fp32": "32 bits", "fp16": "16 bits", "bf16": "16 bits", "int8": "8 bits"}


@dataclass(frozen=True)
class Record:
    """One implementation in one case.

    Attributes:
        case: what was done and where: "4 hosts x 1 rank".
        impl, wire: who did it, and the number format on the network.
        bytes: of the gradients, in fp32.
        role: "ours", a "peer", or a "reference", which others are compared with, but nobody would use.
        median_s, quartiles_s, raw_s: of the repetitions; each took as long as its slowest rank.
        ratio_to_best_peer: to the fastest fp32 peer of the case; below 1 is faster.
        ratio_to_same_wire: to the fastest peer of the case whose wire has as many bits.
        limit_s, ratio_to_limit: what memory or links allow at best.
        detail: what else was seen: settings chosen, bytes sent, loss, samples per second.
    """

    case: str
    impl: str
    wire: str
    bytes: int
    role: Role
    median_s: float
    quartiles_s: tuple[float, float]
    raw_s: tuple[float, ...]
    ratio_to_best_peer: float | None = None
    ratio_to_same_wire: float | None = None
    limit_s: float | None = None
    ratio_to_limit: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def width(self) -> str:
        """What wires that compete with this one share."""
        return _WIDTH.get(self.wire, self.wire)

    @property
    def name(self) -> str:
        """For tables and drawings."""
        return f"{self.impl} {self.wire}"


@dataclass(frozen=True)
class Skipped:
    """What was not measured, and why: so that no gap looks like a result."""

    case: str
    impl: str
    reason: str


@dataclass(frozen=True)
class Results:
    """A file of them."""

    benchmark: str
    short: bool
    records: list[Record]
    skipped: list[Skipped]
    facts: dict[str, Any]  # command, hardware, versions, world

    def of(self, case: str, impl: str, wire: str, num_bytes: int | None = None) -> Record | None:
        """The record, if it was measured."""
        for r in self.records:
            if (r.case, r.impl, r.wire) == (case, impl, wire) and num_bytes in (None, r.bytes):
                return r
        return None


def record(
    case: str,
    impl: str,
    wire: str,
    num_bytes: int,
    raw_s: Sequence[float],
    role: Role,
    limit_s: float | None = None,
    **detail: Any,
) -> Record:
    """The record of repeated times, two or more."""
    low, middle, high = statistics.quantiles(raw_s, n=4, method="inclusive")
    ratio = None if limit_s is None else middle / limit_s
    return Record(
        case,
        impl,
        wire,
        num_bytes,
        role,
        middle,
        (low, high),
        tuple(raw_s),
        limit_s=limit_s,
        ratio_to_limit=ratio,
        detail=detail,
    )


def with_ratios(records: Sequence[Record]) -> list[Record]:
    """The same, each with its ratios to the fastest peers of its case and size."""
    peers = [r for r in records if r.role == "peer"]

    def ratio(of: Record, fits: Callable[[Record], bool]) -> float | None:
        rivals = [p.median_s for p in peers if (p.case, p.bytes) == (of.case, of.bytes) and fits(p)]
        return of.median_s / min(rivals) if rivals else None

    def one(r: Record) -> Record:
        return replace(
            r,
            ratio_to_best_peer=ratio(r, lambda p: p.wire == "fp32"),
            ratio_to_same_wire=ratio(r, lambda p: p.width == r.width),
        )

    return [one(r) for r in records]


def table(records: Sequence[Record]) -> str:
    """A table for people, a group of lines for each case and size."""
    lines = [
        f"{'impl':<22}{'wire':<10}{'median ms':>11}{'quartiles ms':>23}{'to best peer':>14}{'to limit':>10}"
    ]
    at = None
    for r in records:
        if (r.case, r.bytes) != at:
            at = (r.case, r.bytes)
            lines.append(f"# {r.case}, {size(r.bytes)}")
        spread = f"{r.quartiles_s[0] * 1e3:.3f} - {r.quartiles_s[1] * 1e3:.3f}"
        lines.append(
            f"{r.impl:<22}{r.wire:<10}{r.median_s * 1e3:>11.3f}{spread:>23}"
            f"{_times(r.ratio_to_best_peer):>14}{_times(r.ratio_to_limit):>10}"
        )
    return "\n".join(lines)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} x"


def size(num_bytes: int) -> str:
    """`4 MiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} B"


def describe(**more: Any) -> dict[str, Any]:
    """The command, the hardware and the versions."""
    return {
        "command": ["python", os.path.relpath(sys.argv[0], TOP), *sys.argv[1:]],
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "numpy", "mpi4py", "horovod", "hpc_train")},
        },
        **more,
    }


def write(path: Path, results: Results) -> None:
    """One record a line, so that a change of one can be seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"benchmark": results.benchmark, "short": results.short, **results.facts}
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, items in (("skipped", results.skipped), ("records", results.records)):
        lines = ",\n  ".join(json.dumps(_short(asdict(item))) for item in items)
        parts.append(f'"{key}": [\n  {lines}\n ]')
    path.write_text("{\n " + ",\n ".join(parts) + "\n}\n")


def read(path: Path) -> Results:
    """What `write` wrote."""
    content = json.loads(path.read_text())
    return Results(
        benchmark=content.pop("benchmark"),
        short=content.pop("short"),
        records=load_records(content.pop("records")),
        skipped=[Skipped(**item) for item in content.pop("skipped")],
        facts=content,
    )


def load_records(items: Iterable[dict[str, Any]]) -> list[Record]:
    """Records from JSON."""
    return [
        Record(**{**item, "quartiles_s": tuple(item["quartiles_s"]), "raw_s": tuple(item["raw_s"])})
        for item in items
    ]


def _short(value: Any) -> Any:
    """Floats with as many digits as mean something."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_short(inner) for inner in value]
    return value


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()

"""A plan as text for the terminal.  PURE: neither torch nor MPI."""

from collections.abc import Sequence

from hpc_train.planning.choice import Candidate
from hpc_train.planning.planner import Planned
from hpc_train.planning.units import write_bytes, write_number, write_seconds
from hpc_train.planning.why import name_of

WIDTH = 110


def table(planned: Planned) -> str:
    """The best few, a line each, and why the others lose.

      grid fastest schedule micro recompute wires       step samples/s bubble exposed  memory a host
    1 16x4 stage   zb-h1    4     none      int8/bf16 1.24 s       414   3.1%   12 ms 61.2 GB   3 GB
    """
    rows = [_HEAD, *(_row(number, candidate) for number, candidate in enumerate(planned.best, 1))]
    parts = [
        f"{planned.considered:,} ways considered, {planned.simulated:,} simulated\n{_LEGEND}",
        _aligned(rows),
        f"layers of each chunk of the best: {_split(planned.best[0].split)}",
    ]
    if planned.losers:
        parts.append(
            "\n".join(["why others lose:", *("  " + _cut(line, WIDTH - 2) for line in planned.losers)])
        )
    return "\n\n".join(parts)


_LEGEND = (
    "grid: replicas x stages; micro: samples of a micro-batch; wires: of gradients/activations;\n"
    "exposed: sums beyond the pipeline; memory: of the fullest rank; a host: what the busiest sends in a step"
)
_HEAD = (
    *("", "grid", "fastest", "schedule", "micro", "recompute", "wires"),
    *("step", "samples/s", "bubble", "exposed", "memory", "a host"),
)
_LEFT = 7  # columns of words; numbers are aligned to the right


def _row(number: int, candidate: Candidate) -> tuple[str, ...]:
    wires = [candidate.wire.value] if candidate.replicas > 1 else []
    wires += [candidate.pipeline_wire.value] if candidate.stages > 1 else []
    return (
        str(number),
        f"{candidate.replicas}x{candidate.stages}",
        candidate.fastest,
        name_of(candidate.schedule, candidate.chunks),
        str(candidate.micro_batch),
        candidate.recompute,
        "/".join(wires) or "-",
        write_seconds(candidate.step_s),
        write_number(candidate.samples_per_s),
        f"{candidate.bubble:.1%}",
        write_seconds(candidate.exposed_sum_s),
        write_bytes(candidate.rank_bytes),
        write_bytes(candidate.host_bytes),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if column < _LEFT else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(" ".join(cells).rstrip())
    return "\n".join(lines)


def _split(sizes: Sequence[int]) -> str:
    """Sizes, with neighbours that are equal as one: `2, 14 x 6, 4`."""
    groups: list[list[int]] = []
    for size in sizes:
        if groups and groups[-1][1] == size:
            groups[-1][0] += 1
        else:
            groups.append([1, size])
    return _cut(", ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in groups), 70)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."

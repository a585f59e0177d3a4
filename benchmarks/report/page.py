"""The Markdown: bars, where we lose, then each benchmark with its drawing and its numbers.  PURE."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.records import Record, Results, size
from benchmarks.report import pipelines, planner
from benchmarks.report.bar import Bar
from benchmarks.report.bars import bars
from benchmarks.report.defeats import defeats

_TITLES = {
    "allreduce": "Sums of gradients",
    "train-step": "Training steps",
    "convergence": "Loss",
    "one-replica": "Nothing to send",
    "pipeline": "Pipelines",
    "planner": "The planner",
}
_EXPLAINED = {
    "allreduce": "A ratio below 1 is faster. *To best peer*: to the fastest peer in fp32; *to same wire*: to "
    "the fastest peer whose wire has as many bits. *To limit*: on one host to a copy of the buffer by each "
    "rank, over links to 2 (n - 1) / n of the wire's bytes for each of n hosts. *Bus*: 2 (r - 1) / r of the "
    "fp32 bytes for each of r ranks, by the median. *Sent*: by the busiest host for one sum, with headers.",
    "train-step": "*Exposed*: what the step takes longer than the same step of plain PyTorch without "
    "communication, which is also the limit.",
    "convergence": "*Same samples*, *same seconds*: loss on held-out samples as a ratio to our fp32 with the "
    "same seed, after all steps, and at the moment when the fastest of all was done; mean, and the range of "
    "the seeds.",
    "one-replica": "One process, no launcher: a step of ours beside one of plain PyTorch.",
    "pipeline": pipelines.EXPLAINED,
    "planner": planner.EXPLAINED,
}
_TABLES = {"pipeline": pipelines.tables, "planner": planner.tables}
_COLUMNS = {
    "allreduce": ("bus MB/s", "sent MB"),
    "train-step": ("exposed ms", "samples/s"),
    "convergence": ("same samples", "same seconds"),
    "one-replica": (),
}


def page(results: Mapping[str, Results], drawings: Mapping[str, str]) -> str:
    """The whole report; `drawings`: the file of each benchmark that has one."""
    parts = [
        "# Benchmarks of hpc_train",
        _machine(results),
        "## What was to be reached",
        _bars(bars(results)),
    ]
    parts += ["## Where we lose", _defeats(results)]
    for name in [*_TITLES, *(name for name in results if name not in _TITLES)]:
        if name in results:
            parts += _benchmark(results[name], drawings.get(name))
    return "\n\n".join(parts) + "\n"


def _machine(results: Mapping[str, Results]) -> str:
    facts = next(iter(results.values())).facts
    hardware, versions = facts["hardware"], facts["versions"]
    known = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    worlds = [world for part in results.values() for world in part.facts.get("worlds", {}).values()]
    library = next((world["library"] for world in worlds if "library" in world), "no MPI")
    short = [name for name, part in results.items() if part.short]
    note = f" Short forms, which repeat little: {', '.join(short)}." if short else ""
    return (
        f"{hardware['cores']} cores ({hardware['processor']}), {size(hardware['memory_bytes'])} of memory; "
        f"{library}; {known}.{note} Hosts with links of their own are network namespaces of this machine. "
        "All that is compared was measured in turns in one launch; a repetition takes as long as its "
        "slowest rank."
    )


def _bars(all_bars: Sequence[Bar]) -> str:
    rows = []
    for bar in all_bars:
        met = {True: "met", False: f"**missed by {100 * bar.missed_by:.1f} %**", None: "not measured"}[
            bar.met
        ]
        value = "" if bar.value is None else f"{bar.value:.3g}"
        rows.append((bar.what, bar.bar, value, met, "; ".join(filter(None, (bar.remark, bar.why)))))
    counts = [sum(bar.met is met for bar in all_bars) for met in (True, False, None)]
    text = "{} met, {} missed, {} not measured.".format(*counts)
    return text + "\n\n" + _table(("what", "bar", "measured", "", "remarks"), rows)


def _defeats(results: Mapping[str, Results]) -> str:
    found = defeats(results)
    if not found:
        return "Nowhere in what was measured."
    rows = [
        (
            d.benchmark,
            f"{d.case}, {size(d.bytes)}",
            d.wire,
            d.by,
            f"{d.ratio:.3f}",
            "" if d.clear else "within the spread",
        )
        for d in found
    ]
    text = f"{len(found)} cases in which a peer is faster, or fp32 has the smaller loss; the worst first."
    return text + "\n\n" + _table(("benchmark", "case", "our wire", "better", "times", ""), rows)


def _benchmark(results: Results, drawing: str | None) -> Iterable[str]:
    name = results.benchmark
    yield f"## {_TITLES.get(name, name)}"
    command = " ".join(results.facts["command"])
    yield f"`{command}`" + (f"  \n{_EXPLAINED[name]}" if name in _EXPLAINED else "")
    if drawing:
        yield f"![{_TITLES.get(name, name)}]({drawing})"
    if name in _TABLES:
        for title, headings, rows in _TABLES[name](results):
            yield f"### {title}"
            yield _table(headings, rows)
    else:
        for case in dict.fromkeys(r.case for r in results.records):
            yield f"### {case}"
            yield _records(name, [r for r in results.records if r.case == case])
    for item in results.skipped:
        yield f"Not measured: {item.case}, {item.impl}: {item.reason}."


def _records(name: str, records: Sequence[Record]) -> str:
    headings = (
        "bytes",
        "impl",
        "wire",
        "median ms",
        "quartiles ms",
        "to best peer",
        "to same wire",
        "to limit",
    )
    more = _COLUMNS.get(name, ())
    rows = [
        (
            size(r.bytes),
            f"**{r.impl}**" if r.role == "ours" else r.impl,
            r.wire,
            _ms(r.median_s),
            f"{_ms(r.quartiles_s[0])} - {_ms(r.quartiles_s[1])}",
            *map(_ratio, (r.ratio_to_best_peer, r.ratio_to_same_wire, r.ratio_to_limit)),
            *(_detail(r.detail, column) for column in more),
        )
        for r in records
    ]
    return _table((*headings, *more), rows)


def _detail(detail: Mapping[str, Any], column: str) -> str:
    key, scale = {
        "bus MB/s": ("bus_bytes_per_s", 1e-6),
        "sent MB": ("sent_bytes", 1e-6),
        "exposed ms": ("exposed_s", 1e3),
        "samples/s": ("samples_per_s", 1.0),
        "same samples": ("loss_ratio", 1.0),
        "same seconds": ("loss_ratio_in_time", 1.0),
    }[column]
    value = detail.get(key)
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return f"{sum(value) / len(value):.4f} ({min(value):.4f} - {max(value):.4f})"
    return f"{value * scale:.4g}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)

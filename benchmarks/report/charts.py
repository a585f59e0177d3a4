"""The drawings: every bar is a ratio to a peer of the same run; an implementation keeps its colour."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.records import OURS, Record, Results, size
from benchmarks.report import pipeline_chart, planner_chart

# Ours are blue and green, Gloo and DDP red, MPI orange, Horovod purple.
_COLOURS = {
    (OURS, "fp32"): "#08306b",
    (OURS, "fp16"): "#2171b5",
    (OURS, "bf16"): "#6baed6",
    (OURS, "int8"): "#238b45",
    (OURS, "powersgd"): "#74c476",
    ("Open MPI", "fp32"): "#fdae6b",
    ("Open MPI tuned", "fp32"): "#e6550d",
    ("Gloo", "fp32"): "#cb181d",
    ("DDP Gloo", "fp32"): "#cb181d",
    ("DDP Gloo", "fp16"): "#fb6a4a",
    ("DDP Gloo", "powersgd"): "#fcbba1",
    ("Horovod", "fp32"): "#6a51a3",
    ("Horovod", "fp16"): "#bcbddc",
}
_OTHER = "#969696"
_REFERENCE = "#d9d9d9"
_TICKS = [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16]
_GREY = "#444444"
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.dpi": 110,
}


def draw(results: Results, path: Path) -> bool:
    """Draw a benchmark into `path`; False where there is nothing to draw."""
    kinds = {
        "allreduce": _draw_sums,
        "train-step": _draw_steps,
        "convergence": _draw_losses,
        "pipeline": pipeline_chart.draw,
        "planner": planner_chart.draw,
    }
    if results.benchmark not in kinds or not results.records:
        return False
    with plt.rc_context(_STYLE):
        figure = kinds[results.benchmark](results)
        figure.savefig(path, bbox_inches="tight", facecolor="white")
        plt.close(figure)
    return True


def _colour(record: Record) -> str:
    return _COLOURS.get((record.impl, record.wire), _REFERENCE if record.role == "reference" else _OTHER)


def _cases(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(r.case for r in records))


def _where(results: Results, case: str) -> str:
    rate = results.facts.get("rates_mbit", {}).get(case)
    return f"{case}, links of {rate} Mbit/s" if rate else case


def _draw_sums(results: Results) -> Any:
    """A panel a case: bars stand on the line of the fastest fp32 peer, and hang from it where faster."""
    records = [r for r in results.records if r.role != "reference" and r.ratio_to_best_peer]
    cases = _cases(records)
    figure, panels = plt.subplots(
        len(cases), 1, figsize=(12, 3.4 * len(cases) + 0.6), squeeze=False, layout="constrained"
    )
    names = dict.fromkeys((r.impl, r.wire) for r in records)
    bars = {}
    for panel, case in zip(panels[:, 0], cases, strict=True):
        own = [r for r in records if r.case == case]
        sizes = sorted({r.bytes for r in own})
        width = 0.84 / len(names)
        for place, name in enumerate(names):
            for r in (r for r in own if (r.impl, r.wire) == name):
                x = sizes.index(r.bytes) + (place - (len(names) - 1) / 2) * width
                bars[name] = _bar_from_one(panel, x, r, width)
        panel.set_title(_where(results, case))
        panel.set_xticks(range(len(sizes)), [size(n) for n in sizes])
        panel.set_xlim(-0.55, len(sizes) - 0.45)
        _ratio_axis(panel.yaxis, panel, own)
        for place in range(1, len(sizes)):
            panel.axvline(place - 0.5, color="#e5e5e5", linewidth=0.8, zorder=0)
    figure.suptitle(
        "Time of a sum, beside the fastest fp32 peer of the same run (below the line: faster)",
        fontweight="bold",
    )
    _legend(figure, {f"{impl} {wire}": bars[impl, wire] for impl, wire in names}, columns=5)
    return figure


def _bar_from_one(panel: Any, x: float, r: Record, width: float) -> Any:
    """A bar on a logarithmic axis from 1 to the ratio, which stands at its end."""
    ratio = r.ratio_to_best_peer or 1.0
    shown = min(max(ratio, _TICKS[0]), _TICKS[-1])
    slower = ratio >= 1
    panel.annotate(
        f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}",
        (x, shown),
        xytext=(0, 3 if slower else -3),
        textcoords="offset points",
        ha="center",
        va="bottom" if slower else "top",
        rotation=90,
        fontsize=7.5,
        color=_GREY,
    )
    return panel.bar(x, shown - 1, width * 0.92, bottom=1, color=_colour(r), zorder=2)


def _ratio_axis(axis: Any, panel: Any, records: Sequence[Record]) -> None:
    """Ticks that say how many times, so far out as there are bars."""
    ratios = [r.ratio_to_best_peer or 1.0 for r in records]
    low = max(_TICKS[0], 2.0 ** math.floor(math.log2(min(0.5, *ratios))))
    high = min(_TICKS[-1], 2.0 ** math.ceil(math.log2(max(2.0, *ratios))))
    panel.set_yscale("log", base=2)
    panel.set_ylim(low * 0.6, high * 1.9)  # room for the numbers
    axis.set_major_locator(FixedLocator([tick for tick in _TICKS if low <= tick <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _times(value)))
    panel.grid(axis="y", color="#e5e5e5", zorder=0)
    panel.axhline(1, color="black", linewidth=1.2, zorder=3)


def _times(ratio: float) -> str:
    if ratio == 1:
        return "fastest\nfp32 peer"
    return f"{ratio:g}x slower" if ratio > 1 else f"{1 / ratio:g}x faster"


def _legend(figure: Any, entries: dict[str, Any], columns: int) -> None:
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False)


def _draw_steps(results: Results) -> Any:
    """A panel a case: computing and exposed communication as parts of the best fp32 peer's whole step."""
    records = [r for r in results.records if r.ratio_to_best_peer]
    cases = _cases(records)
    counts = [sum(r.case == case for r in records) for case in cases]
    figure, panels = plt.subplots(
        len(cases),
        1,
        figsize=(11, 0.36 * sum(counts) + 1.1 * len(cases) + 0.6),
        squeeze=False,
        layout="constrained",
        height_ratios=counts,
    )
    for panel, case in zip(panels[:, 0], cases, strict=True):
        own = sorted((r for r in records if r.case == case), key=lambda r: -r.median_s)
        for y, r in enumerate(own):
            ratio = r.ratio_to_best_peer or 0.0
            exposed = max(0.0, r.detail["exposed_s"] / r.median_s) * ratio
            panel.barh(y, ratio - exposed, 0.72, color=_REFERENCE, zorder=2)
            panel.barh(y, exposed, 0.72, left=ratio - exposed, color=_colour(r), zorder=2)
            text = f"{ratio:.2f}x   {r.detail['samples_per_s']:.1f} samples/s"
            panel.annotate(
                text,
                (ratio, y),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=_GREY,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
                zorder=4,
            )
        labels = [r.impl if r.role == "reference" else r.name for r in own]
        panel.set_yticks(range(len(own)), labels)
        for label, r in zip(panel.get_yticklabels(), own, strict=True):
            label.set_fontweight("bold" if r.role == "ours" else "normal")
        panel.set_xlim(0, max(r.ratio_to_best_peer or 0.0 for r in own) * 1.2)
        panel.axvline(1, color="black", linewidth=1.2, zorder=3)
        panel.grid(axis="x", color="#e5e5e5", zorder=0)
        panel.set_title(f"{_where(results, case)}: {size(own[0].bytes)} of gradients")
    panels[-1, 0].set_xlabel("grey: the step without communication; in colour: communication that is exposed")
    figure.suptitle(
        "Time of a training step, beside the fastest fp32 peer of the same run", fontweight="bold"
    )
    return figure


def _draw_losses(results: Results) -> Any:
    """A row a case: loss beside our fp32's, after the same samples and after the same seconds."""
    kinds = {"loss_ratio": "after the same samples", "loss_ratio_in_time": "after the same seconds"}
    cases = _cases(results.records)
    count = max(sum(r.case == case for r in results.records) for case in cases)
    figure, panels = plt.subplots(
        len(cases),
        2,
        figsize=(11, (0.36 * count + 1.1) * len(cases) + 0.4),
        squeeze=False,
        layout="constrained",
    )
    for row, case in zip(panels, cases, strict=True):
        own = [r for r in results.records if r.case == case][::-1]
        for panel, (key, title) in zip(row, kinds.items(), strict=True):
            for y, r in enumerate(own):
                values = r.detail[key]
                mean = sum(values) / len(values)
                panel.barh(y, mean - 1, 0.66, left=1, color=_colour(r), zorder=2)
                panel.plot(values, [y] * len(values), "o", color="black", markersize=3, alpha=0.6, zorder=4)
            panel.set_yticks(range(len(own)), [r.name for r in own] if panel is row[0] else [])
            panel.axvline(1, color="black", linewidth=1.2, zorder=3)
            if key == "loss_ratio":
                panel.axvline(1.01, color="#cb181d", linewidth=1, linestyle="--", zorder=3)
            farthest = max(abs(value - 1) for r in own for value in r.detail[key])
            reach = max(farthest, 0.012) * 1.15
            panel.set_xlim(1 - reach, 1 + reach)
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
            panel.grid(axis="x", color="#e5e5e5", zorder=0)
            panel.set_title(f"{case}, {title}")
    figure.suptitle(
        "Loss on held-out samples, as a ratio to our fp32 with the same seed\n"
        "bar: mean; dots: seeds; left of the line: better; dashed: 1 % worse",
        fontweight="bold",
    )
    return figure

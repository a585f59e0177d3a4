"""The drawing of the planner: how far its choices are from the best, and what it foresaw beside what came."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.records import Record, Results
from benchmarks.report.planner import WITHIN, settings

_COLOURS = {1: "#08306b", 2: "#238b45", 4: "#e6550d"}  # by stages
_OTHER, _GREY, _LIGHT, _RED = "#969696", "#444444", "#e5e5e5", "#cb181d"
_FARTHEST = 8.0  # times the best; what is slower stands at the edge


def draw(results: Results) -> Any:
    """A row a setting, whose dots are candidates; and all of them, foreseen beside measured."""
    rows = list(settings(results))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(14, 1.8 + 0.36 * max(8, len(rows))), layout="constrained", width_ratios=[3, 2]
    )
    _beside_the_best(left, rows)
    measured = [r for _, own in rows for r in own]
    _foreseen(right, measured)
    figure.suptitle("Training steps: every grid, and the planner's choice", fontweight="bold")
    stages = sorted({r.detail["stages"] for r in measured})
    handles = [_dot(_COLOURS.get(number, _OTHER), f"{number} stage{'s' * (number > 1)}") for number in stages]
    handles.append(
        Line2D([], [], marker="o", color="none", markeredgecolor="black", markersize=11, label="chosen")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _dot(colour: str, label: str) -> Line2D:
    return Line2D([], [], marker="o", color=colour, linestyle="none", label=label)


def _colour(r: Record) -> str:
    return _COLOURS.get(r.detail["stages"], _OTHER)


def _beside_the_best(panel: Any, rows: list[tuple[Record, list[Record]]]) -> None:
    for y, (mine, own) in enumerate(reversed(rows)):
        for r in own:
            panel.plot(min(r.detail["to_best"], _FARTHEST), y, "o", color=_colour(r), alpha=0.75, zorder=3)
        ratio = mine.detail["to_best"]
        missed = ratio > WITHIN
        shown = min(ratio, _FARTHEST)
        panel.plot(shown, y, "o", markersize=11, markerfacecolor="none", markeredgecolor="black", zorder=4)
        panel.annotate(
            f"{mine.impl}   {ratio:.3f}", (_FARTHEST * 1.12, y), va="center", fontsize=8.5,
            color=_RED if missed else _GREY, fontweight="bold" if missed else "normal", annotation_clip=False,
        )  # fmt: skip
    panel.set_title("Time beside the best measured")
    panel.set_yticks(range(len(rows)), [mine.case for mine, _ in reversed(rows)])
    panel.set_ylim(-0.6, len(rows) - 0.4)
    panel.set_xscale("log", base=2)
    panel.set_xlim(0.95, _FARTHEST * 1.08)
    panel.xaxis.set_major_locator(FixedLocator([1, 1.5, 2, 3, 4, 6, 8]))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    panel.axvline(1, color="black", linewidth=1.2, zorder=2)
    panel.axvline(WITHIN, color=_RED, linewidth=1, linestyle="--", zorder=2)
    panel.grid(color=_LIGHT, zorder=0)


def _foreseen(panel: Any, records: list[Record]) -> None:
    ring = {"markersize": 11, "markerfacecolor": "none", "markeredgecolor": "black", "zorder": 4}
    for r in records:
        at = r.detail["foreseen_s"] * 1e3, r.median_s * 1e3
        panel.plot(*at, "o", color=_colour(r), alpha=0.75, zorder=3)
        if r.detail["chosen"]:
            panel.plot(*at, "o", **ring)
    values = [seconds * 1e3 for r in records for seconds in (r.detail["foreseen_s"], r.median_s)]
    ends = [min(values) * 0.8, max(values) * 1.25]
    panel.plot(ends, ends, color="black", linewidth=1.2, zorder=2)
    for times in (0.9, 1.1):
        panel.plot(ends, [times * end for end in ends], ":", color=_GREY, linewidth=1, zorder=2)
    panel.set_title("Measured and foreseen step, all candidates (dotted: 10 %)")
    panel.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="foreseen ms", ylabel="measured ms")
    panel.grid(color=_LIGHT, zorder=0)

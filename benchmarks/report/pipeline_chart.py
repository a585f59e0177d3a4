"""The drawing of pipelines: speed-up, time beside torch's, and bubbles beside those predicted."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.records import Results
from benchmarks.report.pipelines import PINNED, SCHEDULES, SMALL, WAITING, ours_and_best_peer

_COLOURS = dict(zip(SCHEDULES, ("#969696", "#08306b", "#6baed6", "#238b45", "#e6550d"), strict=True))
_GREY, _LIGHT = "#444444", "#e5e5e5"


def draw(results: Results) -> Any:
    """A figure of four panels; those that were not measured say so."""
    figure, panels = plt.subplots(2, 2, figsize=(13, 9), layout="constrained")
    models = {r.detail["place"]: r.detail["model"] for r in results.records if r.detail["model"] != SMALL}
    _speed_ups(panels[0, 0], results, models.get(PINNED, ""))
    _ratios(panels[0, 1], results, PINNED, models.get(PINNED, ""))
    _bubbles(panels[1, 0], results, models.get(WAITING, ""))
    _ratios(panels[1, 1], results, PINNED, SMALL)
    figure.suptitle(
        "Pipelined steps beside torch.distributed.pipelining with the same schedule, stages and run",
        fontweight="bold",
    )
    return figure


def _series(results: Results, place: str, model: str) -> dict[str, list[tuple[Any, Any]]]:
    """Ours and the best peer, by schedule."""
    found = {schedule: list(ours_and_best_peer(results, place, model, schedule)) for schedule in SCHEDULES}
    return {schedule: pairs for schedule, pairs in found.items() if pairs}


def _speed_ups(panel: Any, results: Results, model: str) -> None:
    panel.set_title(f"Speed-up over one rank: {PINNED}, {model} (dashed: torch)")
    series = _series(results, PINNED, model)
    for schedule, pairs in series.items():
        numbers = [r.detail["micro_batches"] for r, _ in pairs]
        colour = _COLOURS[schedule]
        panel.plot(numbers, [r.detail["speed_up"] for r, _ in pairs], "o-", color=colour, label=schedule)
        theirs = [(r.detail["micro_batches"], p.detail["speed_up"]) for r, p in pairs if p]
        panel.plot(*zip(*theirs, strict=True), "x--", color=colour, linewidth=1, markersize=5, alpha=0.7)
    if not series:
        _not_measured(panel)
        return
    ideal = {r.detail["micro_batches"]: r.detail["ideal"] for pairs in series.values() for r, _ in pairs}
    panel.plot(
        sorted(ideal), [ideal[m] for m in sorted(ideal)], ":", color="black", label="m p / (m + p - 1)"
    )
    _by_micro_batches(panel, sorted(ideal))
    panel.legend(frameon=False, fontsize=9)


def _ratios(panel: Any, results: Results, place: str, model: str) -> None:
    panel.set_title(f"Our time beside torch's: {place}, {model}")
    series = _series(results, place, model)
    numbers = set()
    for schedule, pairs in series.items():
        points = [(r.detail["micro_batches"], r.ratio_to_best_peer) for r, _ in pairs if r.ratio_to_best_peer]
        numbers |= {number for number, _ in points}
        panel.plot(*zip(*points, strict=True), "o-", color=_COLOURS[schedule], label=schedule)
    if not series:
        _not_measured(panel)
        return
    panel.axhline(1, color="black", linewidth=1.2)
    _note(panel, "the faster of torch's two", (0.02, 1), ("axes fraction", "data"), "left")
    if model == SMALL:
        panel.axhline(0.9, color="#cb181d", linewidth=1, linestyle="--")
    _by_micro_batches(panel, sorted(numbers))
    panel.legend(frameon=False, fontsize=9)


def _bubbles(panel: Any, results: Results, model: str) -> None:
    """Three bars a schedule, at the fewest micro-batches that were measured."""
    series = _series(results, WAITING, model)
    if not series:
        panel.set_title(f"Bubble: {WAITING}")
        _not_measured(panel)
        return
    number = min(r.detail["micro_batches"] for pairs in series.values() for r, _ in pairs)
    panel.set_title(f"Bubble: {WAITING}, {number} micro-batches")
    for x, pairs in enumerate(series.values()):
        ours, peer = next((r, p) for r, p in pairs if r.detail["micro_batches"] == number)
        bars = [
            (ours.detail["bubble_simulated"], "#d9d9d9", "simulated"),
            (ours.detail["bubble"], "#08306b", "ours"),
        ]
        if peer:
            bars.append((peer.detail["bubble"], "#cb181d", "torch"))
        for place, (height, colour, name) in enumerate(bars):
            at = x + (place - 1) * 0.27
            panel.bar(at, height, 0.25, color=colour, label=name if x == 0 else None, zorder=2)
            _note(panel, f"{height:.3f}", (at, height), "data", "center")
    panel.set_xticks(range(len(series)), list(series))
    panel.grid(axis="y", color=_LIGHT, zorder=0)
    panel.legend(frameon=False, fontsize=9)


def _by_micro_batches(panel: Any, numbers: list[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(FixedLocator(numbers))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.set_xlabel("micro-batches")
    panel.grid(color=_LIGHT, zorder=0)


def _note(panel: Any, text: str, at: tuple[float, float], coordinates: Any, align: str) -> None:
    panel.annotate(
        text, at, xycoords=coordinates, xytext=(0, 2), textcoords="offset points", ha=align,
        fontsize=8, color=_GREY,
    )  # fmt: skip


def _not_measured(panel: Any) -> None:
    panel.annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center", color=_GREY)
    panel.set_axis_off()

"""The planner: whether it finds the best grid, and its tables.  PURE: from records alone."""

from collections.abc import Iterator, Sequence

from benchmarks.records import Record, Results
from benchmarks.report.bar import Bar

WITHIN = 1.05  # times the best measured
_SHARE = 11 / 12
EXPLAINED = (
    "A whole training step of every grid, each at the schedule and micro-batch that the planner foresees to "
    "be its fastest, and of others near its choice. Names: replicas x stages (r: neighbours are replicas), "
    "schedule / chunks a stage, samples of a micro-batch. *Best*: the fastest of all that were measured. "
    "*To best*: the planner's choice beside it. *Foreseen*: before anything was run, from layers and lines "
    "measured alone."
)
_CHOICES = (
    *("setting", "best", "ms", "planner's choice", "ms", "quartiles ms", "to best"),
    *("foreseen ms", "measured to foreseen", "candidates", "slowest to best"),
)
_ALL = (
    *("setting", "candidate", "measured ms", "quartiles ms", "to best"),
    *("foreseen ms", "measured to foreseen"),
)


def bars(results: Results | None) -> Iterator[Bar]:
    """In how many of the settings its choice is about as fast as the best."""
    yield _planning(results)
    what = "planner: settings in which its choice is within 5 % of the best measured"
    bar = "at least 11 of 12"
    chosen = [mine for mine, _ in settings(results)] if results else []
    if not chosen:
        yield Bar(what, bar, None, _SHARE, at_most=False)
        return
    met = [r for r in chosen if r.detail["to_best"] <= WITHIN]
    worst = max(chosen, key=lambda r: r.detail["to_best"])
    remark = f"{len(met)} of {len(chosen)}; the worst, {worst.detail['to_best']:.3f} times: {worst.case}"
    yield Bar(what, bar, len(met) / len(chosen), _SHARE, at_most=False, remark=remark)


def _planning(results: Results | None) -> Bar:
    what, bar = "planner: seconds of planning for 1,024 ranks and 96 layers", "below 10"
    found = [r for r in results.records if "chosen" not in r.detail] if results else []
    if not found:
        return Bar(what, bar, None, 10.0, at_most=True)
    detail = found[0].detail
    remark = f"{detail['choices']} choices, {detail['simulated']} simulated, on one core"
    return Bar(what, bar, found[0].median_s, 10.0, at_most=True, remark=remark)


def settings(results: Results) -> Iterator[tuple[Record, list[Record]]]:
    """Of each setting the planner's choice, and all that was measured, the fastest first."""
    for case in dict.fromkeys(r.case for r in results.records if "chosen" in r.detail):
        own = sorted((r for r in results.records if r.case == case), key=lambda r: r.median_s)
        yield next(r for r in own if r.detail["chosen"]), own


def tables(results: Results) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, headings and rows: choices, and all candidates."""
    yield "What it chose", _CHOICES, [_choice(mine, own) for mine, own in settings(results)]
    yield "All candidates", _ALL, [_candidate(r) for _, own in settings(results) for r in own]


def _choice(mine: Record, own: Sequence[Record]) -> list[str]:
    best = own[0]
    met = mine.detail["to_best"] <= WITHIN
    return [
        mine.case,
        best.impl,
        _ms(best.median_s),
        mine.impl,
        f"**{_ms(mine.median_s)}**",
        _quartiles(mine),
        f"{mine.detail['to_best']:.3f}" if met else f"**{mine.detail['to_best']:.3f}**",
        _ms(mine.detail["foreseen_s"]),
        f"{mine.ratio_to_limit:.3f}",
        str(len(own)),
        f"{own[-1].median_s / best.median_s:.2f}",
    ]


def _candidate(r: Record) -> list[str]:
    return [
        r.case,
        f"**{r.impl}**" if r.detail["chosen"] else r.impl,
        _ms(r.median_s),
        _quartiles(r),
        f"{r.detail['to_best']:.3f}",
        _ms(r.detail["foreseen_s"]),
        f"{r.ratio_to_limit:.3f}",
    ]


def _quartiles(r: Record) -> str:
    return f"{_ms(r.quartiles_s[0])} - {_ms(r.quartiles_s[1])}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"

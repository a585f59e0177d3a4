"""Pipelines: what they are meant to reach, and their tables.  PURE: from records alone."""

from collections.abc import Iterator, Sequence

from benchmarks.records import OURS, Record, Results
from benchmarks.report.bar import Bar

PINNED, WAITING = "2 ranks pinned", "4 ranks waiting"
SMALL = "small micro-batches"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
PEERS = ("torch", "torch runtime")
EXPLAINED = (
    "Forward and backward of a batch, with its loss as a number. *To torch*: our time beside the faster of "
    "both. *Speed-up*: over one rank with the same micro-batches; *ideal*: m p / (m + p - 1), for gpipe and "
    "1f1b. *Simulated*: `simulate()` with the times of a micro-batch alone, messages taking none. *Bubble*: "
    "the share of the ranks' time in which they do not compute, whatever it goes into."
)
_LEVEL = 1.02  # two that differ by less are level: peers differ from themselves by as much
_ALL_IDEAL = ("gpipe", "1f1b")  # m p / (m + p - 1) is theirs; the others idle less
_MANY = 32
_LEAST_OF_ZB_V = 2 * 4 - 1  # micro-batches, on 4 ranks


def bars(results: Results | None) -> Iterator[Bar]:
    """All of them; those without measurements have no value."""
    ours = [r for r in results.records if r.role == "ours"] if results else []
    yield _speed_up(ours)
    for schedule in SCHEDULES:
        mine = [r for r in ours if r.detail["schedule"] == schedule]
        yield _beside_torch(f"pipeline, {schedule}", [r for r in mine if not _is_small(r)], _LEVEL)
        yield _beside_torch(f"pipeline, {schedule}, {SMALL}", [r for r in mine if _is_small(r)], 0.9)
    yield _bubbles([r for r in ours if r.detail["place"] == WAITING])
    yield _simulated([r for r in ours if r.detail["place"] == WAITING])


def _is_small(record: Record) -> bool:
    return bool(record.detail["model"] == SMALL)


def _speed_up(ours: Sequence[Record]) -> Bar:
    what = f"pipeline, 2 ranks, {_MANY} micro-batches: speed-up, beside m p / (m + p - 1)"
    found = [
        r
        for r in ours
        if r.detail["place"] == PINNED
        and not _is_small(r)
        and r.detail["micro_batches"] == _MANY
        and r.detail["schedule"] in _ALL_IDEAL
    ]
    if not found:
        return Bar(what, "at least 0.95", None, 0.95, at_most=False)
    worst = min(found, key=lambda r: r.detail["speed_up"])
    ideal = worst.detail["ideal"]
    text = ", ".join(f"{r.detail['schedule']} {r.detail['speed_up']:.3f}" for r in found)
    return Bar(
        what, "at least 0.95", worst.detail["speed_up"] / ideal, 0.95, False, remark=f"{text}, of {ideal:.3f}"
    )


def _beside_torch(what: str, mine: Sequence[Record], bound: float) -> Bar:
    what = f"{what}: time beside torch.distributed.pipelining"
    bar = f"at most {bound:g}" if bound < 1 else f"not slower: at most {bound:g}"
    found = [r for r in mine if r.ratio_to_best_peer]
    if not found:
        return Bar(what, bar, None, bound, at_most=True)
    ratios = {r.case: r.ratio_to_best_peer or 0.0 for r in found}
    case = max(ratios, key=lambda case: ratios[case])
    return Bar(what, bar, ratios[case], bound, True, remark=f"the worst of {len(found)}: {case}")


def _bubbles(mine: Sequence[Record]) -> Bar:
    """Zero-bubble's beside 1f1b's, at the number of micro-batches where it is the largest part of it.

    Of the numbers for which zb-v is made, 2 p - 1 and more.
    """
    what, bar = "pipeline, 4 ranks: bubble of the best zero-bubble schedule, beside our 1f1b's", "at most 1/3"
    parts: dict[str, dict[int, float]] = {"zb-h1": {}, "zb-v": {}}
    bubble = {(r.detail["schedule"], r.detail["micro_batches"]): r.detail["bubble"] for r in mine}
    for (schedule, number), value in bubble.items():
        if schedule in parts and ("1f1b", number) in bubble and number >= _LEAST_OF_ZB_V:
            parts[schedule][number] = value / bubble["1f1b", number]
    if not all(parts.values()):
        return Bar(what, bar, None, 1 / 3, at_most=True)
    worst = {schedule: max(ratios.values()) for schedule, ratios in parts.items()}
    best = min(worst, key=lambda schedule: worst[schedule])
    text = ", ".join(f"{schedule} {value:.2f}" for schedule, value in worst.items())
    return Bar(what, bar, worst[best], 1 / 3, True, remark=f"{text}, the worst of {sorted(parts[best])}")


def _simulated(mine: Sequence[Record]) -> Bar:
    what, bar = "pipeline, 4 ranks: measured step beside the simulated one", "within 10 %"
    ratios = {r.case: r.ratio_to_limit for r in mine if r.ratio_to_limit}
    if not ratios:
        return Bar(what, bar, None, 0.1, at_most=True)
    case = max(ratios, key=lambda case: abs(ratios[case] - 1))
    return Bar(what, bar, abs(ratios[case] - 1), 0.1, True, remark=f"{ratios[case]:.3f} times: {case}")


_HEADINGS = (
    *("schedule", "micro-batches", "ours ms", "quartiles ms", "torch ms", "torch runtime ms", "to torch"),
    *("speed-up", "torch's", "ideal", "simulated ms", "to simulated", "bubble", "torch's", "simulated"),
)


def tables(results: Results) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, headings and rows: a table for each place and model, a row for each schedule and number."""
    ours = [r for r in results.records if r.role == "ours"]
    for place, model in dict.fromkeys((r.detail["place"], r.detail["model"]) for r in ours):
        rows = [
            _row(results, r)
            for r in sorted(ours, key=lambda r: SCHEDULES.index(r.detail["schedule"]))
            if (r.detail["place"], r.detail["model"]) == (place, model)
        ]
        yield ", ".join(filter(None, (place, model))), _HEADINGS, rows


def _row(results: Results, mine: Record) -> list[str]:
    peers = [results.of(mine.case, impl, mine.wire) for impl in PEERS]
    best = min((p for p in peers if p), key=lambda p: p.median_s, default=None)
    detail = mine.detail
    return [
        detail["schedule"],
        str(detail["micro_batches"]),
        f"**{_ms(mine.median_s)}**",
        f"{_ms(mine.quartiles_s[0])} - {_ms(mine.quartiles_s[1])}",
        *(_ms(p.median_s) if p else "" for p in peers),
        f"{mine.ratio_to_best_peer:.3f}" if mine.ratio_to_best_peer else "",
        f"**{detail['speed_up']:.2f}**",
        f"{best.detail['speed_up']:.2f}" if best else "",
        f"{detail['ideal']:.2f}",
        _ms(detail["simulated_s"]),
        f"{mine.ratio_to_limit:.3f}" if mine.ratio_to_limit else "",
        f"**{detail['bubble']:.3f}**",
        f"{best.detail['bubble']:.3f}" if best else "",
        f"{detail['bubble_simulated']:.3f}",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def ours_and_best_peer(
    results: Results, place: str, model: str, schedule: str
) -> Iterator[tuple[Record, Record | None]]:
    """For each number of micro-batches, in order."""
    for r in results.records:
        detail = r.detail
        if r.impl == OURS and (detail["place"], detail["model"], detail["schedule"]) == (
            place,
            model,
            schedule,
        ):
            peers = [p for p in (results.of(r.case, impl, r.wire) for impl in PEERS) if p]
            yield r, min(peers, key=lambda p: p.median_s, default=None)

"""What sums, pipelines and planner are meant to reach, and what was measured: met, or missed by how much.

PURE: from records alone.
"""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.records import OURS, Record, Results
from benchmarks.report import pipelines, planner
from benchmarks.report.bar import Bar

_MIB = 2**20
_SIZES = [4 * _MIB, 16 * _MIB, 64 * _MIB]
_ONE_HOST, _FOUR, _FOUR_BY_TWO = "1 host x 2 ranks", "4 hosts x 1 rank", "4 hosts x 2 ranks"
_OPEN_MPI = ("Open MPI", "Open MPI tuned")
_LEVEL = 1.02  # two that differ by less are level: peers differ from themselves by as much
_NUM_SEEDS = 5


def bars(results: Mapping[str, Results]) -> list[Bar]:
    """All of them; those without measurements have no value."""
    sums = results.get("allreduce")
    return [
        *_inside_a_host(sums),
        *_between_hosts(sums),
        *_lossy_wires(sums),
        _bytes_that_leave(sums),
        *_steps(results.get("train-step")),
        *_losses(results.get("convergence")),
        _nothing_to_send(results.get("one-replica")),
        *pipelines.bars(results.get("pipeline")),
        *planner.bars(results.get("planner")),
    ]


def _find(results: Results | None, case: str, impl: str, wire: str, num_bytes: int) -> Record | None:
    return None if results is None else results.of(case, impl, wire, num_bytes)


def _pairs(
    results: Results | None, case: str, ours: str, peer: tuple[str, str]
) -> Iterator[tuple[Record, Record]]:
    """Our record and the peer's, at each size where there are both."""
    for num_bytes in _SIZES:
        mine = _find(results, case, OURS, ours, num_bytes)
        other = _find(results, case, *peer, num_bytes)
        if mine and other:
            yield mine, other


def _speed_up(
    results: Results | None, case: str, wire: str, peer: tuple[str, str], bound: float, where: str
) -> Bar:
    """How many times as fast as the peer, at the worst size."""
    pairs = list(_pairs(results, case, wire, peer))
    what, bar = f"{where}: times as fast as {' '.join(peer)}", f"at least {bound:g}"
    if not pairs:
        return Bar(what, bar, None, bound, at_most=False)
    mine, other = min(pairs, key=lambda pair: pair[1].median_s / pair[0].median_s)
    best = None if mine.limit_s is None else other.median_s / mine.limit_s
    return Bar(what, bar, other.median_s / mine.median_s, bound, False, best, _at(mine, pairs))


def _ratio(
    results: Results | None, case: str, wire: str, peer: tuple[str, str], bound: float, where: str, bar: str
) -> Bar:
    """Our time as a part of the peer's, at the worst size."""
    pairs = list(_pairs(results, case, wire, peer))
    what = f"{where}: time beside {' '.join(peer)}"
    if not pairs:
        return Bar(what, bar, None, bound, at_most=True)
    mine, other = max(pairs, key=lambda pair: pair[0].median_s / pair[1].median_s)
    best = None if mine.limit_s is None else mine.limit_s / other.median_s
    return Bar(what, bar, mine.median_s / other.median_s, bound, True, best, _at(mine, pairs))


def _at(record: Record, pairs: Sequence[tuple[Record, Record]]) -> str:
    sizes = ", ".join(f"{mine.bytes / _MIB:g}" for mine, _ in pairs)
    return f"at {record.bytes / _MIB:g} MiB, the worst of {sizes}"


def _inside_a_host(sums: Results | None) -> Iterator[Bar]:
    for impl in (*_OPEN_MPI, "Horovod", "Gloo"):
        yield _speed_up(sums, _ONE_HOST, "fp32", (impl, "fp32"), 2.5, "one host, 2 ranks, fp32")
    what, bar = "one host, 2 ranks, 64 MiB fp32: times memcpy of the buffer", "at most 1.2"
    mine = _find(sums, _ONE_HOST, OURS, "fp32", 64 * _MIB)
    yield Bar(what, bar, mine.ratio_to_limit if mine else None, 1.2, at_most=True)


def _between_hosts(sums: Results | None) -> Iterator[Bar]:
    where = "4 hosts, fp32"
    found = [r for r in (_find(sums, _FOUR, OURS, "fp32", n) for n in _SIZES) if r and r.ratio_to_limit]
    worst = max(found, key=lambda r: r.ratio_to_limit or 0.0, default=None)
    share = 1 / worst.ratio_to_limit if worst and worst.ratio_to_limit else None
    remark = _at(worst, [(r, r) for r in found]) if worst else ""
    yield Bar(f"{where}: share of the links' limit", "at least 0.95", share, 0.95, False, 1.0, remark)
    for impl in _OPEN_MPI:
        yield _speed_up(sums, _FOUR, "fp32", (impl, "fp32"), 2.0, where)
    yield _ratio(sums, _FOUR, "fp32", ("Gloo", "fp32"), _LEVEL, where, f"level: at most {_LEVEL}")


def _lossy_wires(sums: Results | None) -> Iterator[Bar]:
    for wire, bound in (("fp16", 0.54), ("bf16", 0.54), ("int8", 0.29)):
        yield _to_best_peer(sums, wire, bound)
        if wire != "int8":
            yield _ratio(sums, _FOUR, wire, ("Horovod", "fp16"), 1.0, f"4 hosts, {wire}", "below 1")


def _to_best_peer(sums: Results | None, wire: str, bound: float) -> Bar:
    found = [r for r in (_find(sums, _FOUR, OURS, wire, n) for n in _SIZES) if r and r.ratio_to_best_peer]
    worst = max(found, key=lambda r: r.ratio_to_best_peer or 0.0, default=None)
    what, bar = f"4 hosts, {wire}: time beside the best fp32 peer", f"at most {bound}"
    if worst is None or worst.ratio_to_best_peer is None:
        return Bar(what, bar, None, bound, at_most=True)
    best = worst.ratio_to_best_peer / worst.ratio_to_limit if worst.ratio_to_limit else None
    return Bar(what, bar, worst.ratio_to_best_peer, bound, True, best, _at(worst, [(r, r) for r in found]))


def _bytes_that_leave(sums: Results | None) -> Bar:
    """Two ranks a host beside one: the surplus of bytes, or the lack of them."""
    what, bar = "4 hosts x 2 ranks, fp32: bytes that leave a host, beside 4 x 1", "within 5 %"
    ratios = []
    for num_bytes in _SIZES:
        one, two = (_find(sums, case, OURS, "fp32", num_bytes) for case in (_FOUR, _FOUR_BY_TWO))
        if one and two and "sent_bytes" in one.detail and "sent_bytes" in two.detail:
            ratios.append(two.detail["sent_bytes"] / one.detail["sent_bytes"])
    if not ratios:
        return Bar(what, bar, None, 0.05, at_most=True)
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return Bar(what, bar, abs(worst - 1), 0.05, True, 0.0, f"{worst:.3f} times as many")


def _steps(steps: Results | None) -> Iterator[Bar]:
    case = "transformer"
    peers = [("Horovod", "fp32"), ("DDP Gloo", "fp32")]
    for wire in ("fp16", "bf16", "int8", "powersgd"):
        mine = steps.of(case, OURS, wire) if steps else None
        others = [other for peer in peers if steps and (other := steps.of(case, *peer))]
        if steps and steps.short and mine is None:
            continue  # --short leaves some wires out
        for name, bar, bound in (
            ("exposed communication less by", "at least 0.60", 0.60),
            ("throughput", "at least 1.25", 1.25),
        ):
            what = f"training step, {wire}: {name}, beside Horovod and DDP in fp32"
            if mine is None or not others:
                yield Bar(what, bar, None, bound, at_most=False)
                continue
            values = {
                other.impl: 1 - mine.detail["exposed_s"] / other.detail["exposed_s"]
                if bound < 1
                else other.median_s / mine.median_s
                for other in others
            }
            beside = min(values, key=lambda impl: values[impl])
            missing = "" if len(others) == len(peers) else "; the other was not measured"
            yield Bar(what, bar, values[beside], bound, False, remark=f"beside {beside}{missing}")
    for impl in ("Horovod", "DDP Gloo"):
        what, bar = f"training step, fp16: throughput beside {impl} fp16", "above 1"
        mine, other = (steps.of(case, who, "fp16") if steps else None for who in (OURS, impl))
        value = other.median_s / mine.median_s if mine and other else None
        yield Bar(what, bar, value, 1.0, at_most=False)


def _losses(runs: Results | None) -> Iterator[Bar]:
    cases = sorted({r.case for r in runs.records}) if runs else ["bytelm"]
    for case in cases:
        for wire in ("int8", "powersgd"):
            what = f"{case}, {wire} with error feedback: final loss beside fp32's, mean over seeds"
            mine = runs.of(case, OURS, wire) if runs else None
            if mine is None:
                yield Bar(what, "at most 1.01", None, 1.01, at_most=True)
                continue
            ratios = mine.detail["loss_ratio"]
            few = "" if len(ratios) >= _NUM_SEEDS else f", not {_NUM_SEEDS}"
            remark = f"{len(ratios)} seeds{few}: {min(ratios):.4f} to {max(ratios):.4f}"
            same = runs.of(case, "DDP Gloo", "fp32") if runs else None
            if same is not None:  # the same sums in another order: what chance alone makes of a run
                chance = same.detail["loss_ratio"]
                remark += f"; DDP in fp32, which differs by rounding: {min(chance):.4f} to {max(chance):.4f}"
            yield Bar(what, "at most 1.01", sum(ratios) / len(ratios), 1.01, True, remark=remark)


def _nothing_to_send(runs: Results | None) -> Bar:
    what, bar = "one replica: time of a step beside plain PyTorch", "below 1.01"
    ours = [r for r in runs.records if r.role == "ours" and r.ratio_to_best_peer] if runs else []
    worst = max(ours, key=lambda r: r.ratio_to_best_peer or 0.0, default=None)
    if worst is None:
        return Bar(what, bar, None, 1.01, at_most=True)
    return Bar(what, bar, worst.ratio_to_best_peer, 1.01, True, remark=f"the worst wire, {worst.wire}")

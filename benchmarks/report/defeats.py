"""Where we lose: found in the records, so that nobody has to admit it.  PURE."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.records import Record, Results


@dataclass(frozen=True)
class Defeat:
    """A case in which a peer is faster, or a wire ends with a larger loss than fp32.

    Attributes:
        by: who is better.
        ratio: how many times our time, or our loss, is theirs.
        clear: the quartiles of both do not overlap.
    """

    benchmark: str
    case: str
    bytes: int
    wire: str
    by: str
    ratio: float
    clear: bool


def defeats(results: Mapping[str, Results]) -> list[Defeat]:
    """The worst first."""
    found = [defeat for part in results.values() for r in part.records for defeat in _of(part, r)]
    return sorted(found, key=lambda defeat: -defeat.ratio)


def _of(part: Results, record: Record) -> list[Defeat]:
    """Beside the fastest of the peers that send fp32, and beside the fastest whose wire is as wide."""
    if record.role != "ours":
        return []
    found = {}
    where = (record.case, record.bytes)
    rivals = [p for p in part.records if p.role == "peer" and (p.case, p.bytes) == where]
    for fits in ("32 bits", record.width):
        peers = [p for p in rivals if p.width == fits]
        best = min(peers, key=lambda p: p.median_s, default=None)
        if best and record.median_s > best.median_s:
            clear = record.quartiles_s[0] > best.quartiles_s[1]
            ratio = record.median_s / best.median_s
            found[best.name] = Defeat(
                part.benchmark, record.case, record.bytes, record.wire, best.name, ratio, clear
            )
    for key, meaning in (("loss_ratio", "samples"), ("loss_ratio_in_time", "seconds")):
        ratios = record.detail.get(key, ())
        if ratios and record.wire != "fp32" and (mean := sum(ratios) / len(ratios)) > 1:
            by = f"our fp32, in loss after the same {meaning}"
            found[by] = Defeat(
                part.benchmark, record.case, record.bytes, record.wire, by, mean, min(ratios) > 1
            )
    return list(found.values())

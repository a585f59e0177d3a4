"""Gradient sums beside Open MPI, Gloo and Horovod: 1 KiB to 256 MiB, on one host and over links.

    python benchmarks/allreduce/main.py [--short] [--case "4 hosts x 1 rank"]

See README.md for what is measured.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from field import MEMCPY, Field  # noqa: E402

from benchmarks import conductor  # noqa: E402
from benchmarks.conductor import Place, Session  # noqa: E402
from benchmarks.records import OURS, Record, Role, record, size  # noqa: E402
from hpc_train.bench.turns import Contestant, rounds_within, slowest, take_turns, try_once  # noqa: E402

RATE_MBIT = 200
PLACES = [Place(1, 2), *(Place(hosts, ranks, RATE_MBIT) for hosts in (2, 4) for ranks in (1, 2))]
CASES = {place.name: place for place in PLACES}
SHORT_CASES = [PLACES[0].name, *(Place(4, ranks, RATE_MBIT).name for ranks in (1, 2))]
SIZES = [2**10, 2**14, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28]
SHORT_SIZES = {1: [2**10, 2**18, 2**22, 2**26], 2: [2**22, 2**24], 4: [2**22]}  # by hosts
_WIRE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}  # of a value
_SECONDS_A_SIZE = {False: 12.0, True: 5.0}  # --short or not
_ROUNDS = {False: (3, 100), True: (3, 50)}
_BLOCK_S = 0.005  # of calls in one turn, where a call is much shorter
_MOST_CALLS = 20
_WARM_UPS = 3
_WARM_UPS_BELOW_S = 0.5  # of a round: a longer one is warm after a single call of each


def measure(session: Session) -> list[Record]:
    """All sizes of a case, on each of its ranks."""
    torch.set_num_threads(1)
    field = Field(session.world, session.short, session.note)
    if field.no_horovod:
        session.skip("Horovod", field.no_horovod)
    sizes = SHORT_SIZES[session.place.hosts] if session.short else SIZES
    records = [r for num_bytes in sizes for r in _measure_size(session, field, num_bytes)]
    field.close()
    return records


def _measure_size(session: Session, field: Field, num_bytes: int) -> list[Record]:
    control = session.world.control
    entries = field.contestants(num_bytes)
    contestants = [contestant for contestant, _ in entries]
    once_s = try_once(control, contestants) if session.place.hosts == 1 else _try_and_count(session, entries)
    quickest = take_turns(control, contestants[:1], rounds=1)[0][0]
    calls = min(_MOST_CALLS, max(1, int(_BLOCK_S / quickest)))
    round_s = once_s if once_s > _WARM_UPS_BELOW_S else _seconds_of_a_round(session, contestants, calls)
    rounds = rounds_within(_SECONDS_A_SIZE[session.short], round_s, *_ROUNDS[session.short])
    session.note(f"{size(num_bytes)}: {rounds} rounds of {calls} calls, about {rounds * round_s:.0f} s")
    measured = take_turns(control, contestants, rounds, calls)
    copies = [raw for one, raw in zip(contestants, measured, strict=True) if one.impl == MEMCPY]
    copy_s = statistics.median(copies[0]) if copies else None
    return [
        _record(session, one, detail, num_bytes, raw, copy_s)
        for (one, detail), raw in zip(entries, measured, strict=True)
    ]


def _seconds_of_a_round(session: Session, contestants: list[Contestant], calls: int) -> float:
    """Warms up, too."""
    control = session.world.control
    began = time.perf_counter()
    take_turns(control, contestants, _WARM_UPS, calls)
    return slowest(control, [[time.perf_counter() - began]])[0][0] / _WARM_UPS


def _try_and_count(session: Session, entries: list[tuple[Contestant, dict[str, Any]]]) -> float:
    """As `try_once`; beside it, what the busiest host sends for one sum goes into the details, on rank 0."""
    control = session.world.control
    took_s = 0.0
    for contestant, detail in entries:
        with contestant.around():
            contestant.ready()
            control.barrier()
            before = session.sent_bytes()
            control.barrier()
            began = time.perf_counter()
            contestant.call()
            took_s += time.perf_counter() - began
            control.barrier()
            after = session.sent_bytes()
            contestant.check()
        if before is not None and after is not None:
            detail["sent_bytes"] = after - before
    return slowest(control, [[took_s]])[0][0]


def _record(
    session: Session,
    one: Contestant,
    detail: dict[str, Any],
    num_bytes: int,
    raw: list[float],
    copy_s: float | None,
) -> Record:
    """`copy_s`: what is copied once within a host; None between hosts, where the links set the limit."""
    role: Role = "ours" if one.impl == OURS else "reference" if one.impl == MEMCPY else "peer"
    limit_s = copy_s or session.place.limit_s(num_bytes * _WIRE_BYTES[one.wire] // 4)
    made = record(session.case, one.impl, one.wire, num_bytes, raw, role, limit_s, **detail)
    if role != "reference":
        ranks = session.place.num_ranks
        made.detail["bus_bytes_per_s"] = 2 * (ranks - 1) / ranks * num_bytes / made.median_s
    return made


if __name__ == "__main__":
    conductor.main(__doc__ or "", "allreduce", CASES, measure, SHORT_CASES)

"""Times several ways to do one thing in turns, so that whatever else the machine does meets all alike.

round 0   A B C        every round begins with another one;
round 1   B C A        a time is that of the slowest rank
round 2   C A B
"""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_train.comm.interface import ControlPlane


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contestant:
    """One way.  All ranks make the same calls together; `call` alone is timed.

    Args:
        call: what is timed; it ends when the result is there.
        ready: comes before each call.
        check: comes after a call that is not timed; raises where the result is wrong.
        around: made anew for each turn, for what must not run in the turns of others.
        lead_in: calls at the beginning of each turn that are not timed.
    """

    impl: str
    wire: str
    call: Callable[[], None]
    ready: Callable[[], None] = _nothing
    check: Callable[[], None] = _nothing
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    lead_in: int = 0


def take_turns(
    control: ControlPlane, contestants: Sequence[Contestant], rounds: int, calls: int = 1
) -> list[list[float]]:
    """Seconds of each contestant's `rounds` turns of `calls` calls; the same on all ranks.  Collective."""
    mine: list[list[float]] = [[] for _ in contestants]
    for number in range(rounds):
        for place in range(len(contestants)):
            index = (number + place) % len(contestants)
            one = contestants[index]
            with one.around():
                for call in range(one.lead_in + calls):
                    took = _call(control, one)
                    if call >= one.lead_in:
                        mine[index].append(took)
    return slowest(control, mine)


def try_once(control: ControlPlane, contestants: Sequence[Contestant]) -> float:
    """A turn of each with its result checked; seconds that such a round takes, on all ranks.  Collective."""
    began = time.perf_counter()
    for one in contestants:
        with one.around():
            for _ in range(one.lead_in + 1):
                _call(control, one)
                one.check()
    return slowest(control, [[time.perf_counter() - began]])[0][0]


def slowest(control: ControlPlane, mine: Sequence[Sequence[float]]) -> list[list[float]]:
    """The largest of all ranks' values, one by one.  Collective."""
    everybody = [json.loads(part) for part in control.all_gather(json.dumps(mine).encode())]
    return [[max(values) for values in zip(*ranks, strict=True)] for ranks in zip(*everybody, strict=True)]


def rounds_within(seconds: float, round_s: float, least: int, most: int) -> int:
    """How many rounds fit; at least `least`, at most `most`."""
    return min(max(least, int(seconds / max(round_s, 1e-9))), most)


def _call(control: ControlPlane, one: Contestant) -> float:
    one.ready()
    control.barrier()
    began = time.perf_counter()
    one.call()
    return time.perf_counter() - began

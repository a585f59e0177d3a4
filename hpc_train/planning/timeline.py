"""A pipeline's step for many micro-batches, from simulations of few.  PURE: neither torch nor MPI.

Once all stages are at work, an order of one of the schedules below does the same for micro-batch after
micro-batch, so that a step of m takes as long as one of m - 1, and a fixed time more.  What each stage
holds at most it holds by then, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpc_train.pipeline.actions import Action, Kind, Order
from hpc_train.pipeline.schedules import find
from hpc_train.pipeline.simulate import simulate

_PERIODIC = ("gpipe", "1f1b", "zb-h1", "zb-v")  # and interleaved, where stages divide micro-batches


class Pipe(NamedTuple):
    """A schedule on so many stages."""

    schedule: str
    chunks: int
    stages: int


class ChunkTimes(NamedTuple):
    """Seconds of a micro-batch, by chunk, and of its messages, by boundary; as `simulate` takes them."""

    forward_s: list[float]
    input_s: list[float]
    weight_s: list[float]
    latency_s: list[float]
    line_s: list[float]


@dataclass(frozen=True)
class Timeline:
    """A step's backward and forward.

    Attributes:
        step_s: until the last action ends.
        bubble: the share of all stages' time that is idle, 0..1.
        ends_s: by stage, when its last action ends.
        last_backward_s: by chunk, when the backward starts that completes its gradients, and when it ends.
        actions: that were simulated for it.
    """

    step_s: float
    bubble: float
    ends_s: list[float]
    last_backward_s: list[tuple[float, float]]
    actions: int

    @property
    def moments_s(self) -> list[float]:
        """All times in one list."""
        return [self.step_s, *self.ends_s, *(moment_s for pair in self.last_backward_s for moment_s in pair)]

    def lasting(self, least_s: float) -> "Timeline":
        """The same, ending later if it takes less than that: stages wait where it is."""
        more_s = least_s - self.step_s
        if more_s <= 0:
            return self
        return Timeline(
            least_s,
            1 - (1 - self.bubble) * self.step_s / least_s,
            [end_s + more_s for end_s in self.ends_s],
            [(start_s + more_s, end_s + more_s) for start_s, end_s in self.last_backward_s],
            self.actions,
        )


def play(pipe: Pipe, micro_batches: int, times: ChunkTimes) -> Timeline:
    """A step of 1 or more micro-batches; of many it is that of fewer and as many periods more.

    Unequal stages or slow lines can make it take turns of several micro-batches. It then shows in unequal
    differences between three numbers of micro-batches, and all are played.
    """
    period = _period(pipe, micro_batches)
    if not period or micro_batches <= (2 + 3 + 4) * period:
        return _play(pipe, micro_batches, times)
    first, second, third = (_play(pipe, number * period, times) for number in (2, 3, 4))
    actions = first.actions + second.actions + third.actions
    moments_s = np.array([timeline.moments_s for timeline in (first, second, third)])
    earlier_s, period_s = np.diff(moments_s, axis=0)
    if (abs(earlier_s - period_s) > 1e-3 * period_s[0]).any():
        timeline = _play(pipe, micro_batches, times)
        return replace(timeline, actions=timeline.actions + actions)
    foreseen_s = (moments_s[2] + (micro_batches / period - 4) * period_s).tolist()
    step_s, ends_s, rest_s = foreseen_s[0], foreseen_s[1 : 1 + pipe.stages], foreseen_s[1 + pipe.stages :]
    busy_s = micro_batches * sum(map(sum, times[:3]))
    bubble = max(0.0, 1 - busy_s / (step_s * pipe.stages)) if step_s else 0.0
    return Timeline(step_s, bubble, ends_s, list(zip(rest_s[::2], rest_s[1::2], strict=True)), actions)


def _period(pipe: Pipe, micro_batches: int) -> int:
    """After how many micro-batches the order surely does the same again; 0 where it may never."""
    if pipe.schedule in _PERIODIC or (pipe.schedule == "interleaved" and micro_batches % pipe.stages == 0):
        return pipe.stages * -(-12 // pipe.stages)  # several, of few stages
    return 0


def _play(pipe: Pipe, micro_batches: int, times: ChunkTimes) -> Timeline:
    order = order_of(pipe, micro_batches)
    simulation = simulate(order, *times[:3], comm_s=times.latency_s, line_s=times.line_s)
    last_backward_s = [(0.0, 0.0)] * (pipe.stages * pipe.chunks)
    for cells in zip(order, simulation.starts_s, simulation.ends_s, strict=True):
        for action, start_s, end_s in zip(*cells, strict=True):
            if action.kind in (Kind.B, Kind.W):
                last_backward_s[action.chunk] = start_s, end_s
    ends_s = [row[-1] for row in simulation.ends_s]
    return Timeline(simulation.step_s, simulation.bubble, ends_s, last_backward_s, sum(map(len, order)))


@lru_cache(maxsize=32)
def order_of(pipe: Pipe, micro_batches: int) -> Order:
    """The actions of every stage; not to be changed."""
    return find(pipe.schedule, pipe.chunks).order(pipe.stages, micro_batches)


@lru_cache(maxsize=4096)
def live(pipe: Pipe, micro_batches: int) -> list[NDArray[np.int64]]:
    """Micro-batches whose activations each stage holds, at every moment that can be its fullest.

    Returns:
        for each stage [moments, chunks], how many of each chunk, which is 0 for those of other stages; the
        most bytes are the largest product of a row with the bytes of each chunk. Read-only.
    """
    if pipe.schedule == "gpipe":
        return [micro_batches * np.eye(pipe.stages, dtype=np.int64)[[s]] for s in range(pipe.stages)]
    period = _period(pipe, micro_batches)
    order = order_of(pipe, min(micro_batches, 4 * period) if period else micro_batches)
    return [_moments(row, pipe.stages * pipe.chunks) for row in order]


def _moments(row: Sequence[Action], num_chunks: int) -> NDArray[np.int64]:
    """The counts before each run of backwards, without those that others exceed in every chunk."""
    counts = [0] * num_chunks
    seen: set[tuple[int, ...]] = set()
    previous = Kind.F
    for chunk, kind, _ in row:
        if kind is not Kind.F and previous is Kind.F:
            seen.add(tuple(counts))
        if kind is not Kind.I:
            counts[chunk] += 1 if kind is Kind.F else -1
        previous = kind
    moments: NDArray[np.int64] = np.array(sorted(seen), dtype=np.int64)
    largest = [i for i, moment in enumerate(moments) if (moments >= moment).all(axis=1).sum() == 1]
    return moments[largest]

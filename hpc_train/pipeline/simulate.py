"""How long an order takes, and what it keeps in memory.  PURE: neither torch nor MPI."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpc_train.pipeline.actions import Action, Kind, Order, count_micro_batches, placement
from hpc_train.pipeline.check import walk

ByChunk = float | Sequence[float]  # one value for all, or one for each chunk


class Cell(NamedTuple):
    """An action in simulated time."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """What one step would take.

    Attributes:
        order: what was played.
        step_s: until the last action ends.
        bubble: the share of all stages' time that is idle, 0..1.
        peak_live: for each stage, the most activations that it holds at once: of a micro-batch in a chunk,
            from its forward until its backward is complete (B, or W); in forwards alone none are kept.
        peak_bytes: for each stage, the same in bytes.
        starts_s: for each stage, when its actions start.
        ends_s: for each stage, when they end.
    """

    order: Order
    step_s: float
    bubble: float
    peak_live: list[int]
    peak_bytes: list[float]
    starts_s: list[list[float]]
    ends_s: list[list[float]]

    @cached_property
    def cells(self) -> list[list[Cell]]:
        """For each stage, its actions over time."""
        rows = zip(self.order, self.starts_s, self.ends_s, strict=True)
        return [list(map(Cell, *row)) for row in rows]


def simulate(
    order: Order,
    forward_s: ByChunk,
    input_s: ByChunk,
    weight_s: ByChunk,
    comm_s: float | Sequence[float] = 0.0,
    activation_bytes: ByChunk = 0.0,
    line_s: float | Sequence[float] = 0.0,
) -> Simulation:
    """Play a sound order through in simulated time, each stage walking its row as fast as it can.

    Args:
        order: one that `check.validate` accepts.
        forward_s: seconds of one micro-batch's forward through a chunk.
        input_s: seconds of its backward for the input, I.
        weight_s: seconds of its backward for the weights, W; B takes I's and W's time.
        comm_s: seconds from the end of an action until what it sends is there, one value or one for each
            boundary between chunks c and c + 1; computing goes on meanwhile. On one stage it is 0. Down to
            -`line_s` where a message is there before its line is free for the next one.
        activation_bytes: what a micro-batch's forward through a chunk keeps for its backward.
        line_s: seconds, beside `comm_s`, in which a message has its sender's line for itself: that stage's
            next one, wherever it goes, waits for it. One value, or one for each boundary.

    Raises:
        ValueError: so many times do not fit the order's chunks.
    """
    stage_of = placement(order)
    num_chunks = len(stage_of)
    forward, inputs, weights = (_spread(s, num_chunks, "chunk") for s in (forward_s, input_s, weight_s))
    kept_bytes = _spread(activation_bytes, num_chunks, "chunk")
    hop, line = (_between_stages(seconds, stage_of) for seconds in (comm_s, line_s))
    micro_batches = count_micro_batches(order)
    # When the output of F, and the gradient of B or I, is where the next chunk, or the one before, needs it.
    output_s = [[0.0] * micro_batches for _ in stage_of]
    gradient_s = [[0.0] * micro_batches for _ in stage_of] + [[0.0] * micro_batches]
    free_s = [0.0] * len(order)  # when the stage's latest action ends
    sent_s = [0.0] * len(order)  # when its latest message has left its line
    live, peak_live = [0] * len(order), [0] * len(order)
    held, peak_bytes = [0.0] * len(order), [0.0] * len(order)
    starts_s: list[list[float]] = [[] for _ in order]
    ends_s: list[list[float]] = [[] for _ in order]
    for stage, (chunk, kind, micro_batch) in walk(order, stage_of):
        start = free_s[stage]
        if kind is Kind.F:
            if chunk:
                start = max(start, output_s[chunk - 1][micro_batch])
            end = start + forward[chunk]
            output_s[chunk][micro_batch] = end + hop[chunk]
            if line[chunk]:
                sent_s[stage] = max(sent_s[stage], end) + line[chunk]
                output_s[chunk][micro_batch] = sent_s[stage] + hop[chunk]
            live[stage] += 1
            held[stage] += kept_bytes[chunk]
            peak_live[stage] = max(peak_live[stage], live[stage])
            peak_bytes[stage] = max(peak_bytes[stage], held[stage])
        else:
            end = start + weights[chunk]
            if kind is not Kind.W:
                start = max(start, gradient_s[chunk + 1][micro_batch])
                end = start + inputs[chunk] + (weights[chunk] if kind is Kind.B else 0.0)
                gradient_s[chunk][micro_batch] = end + hop[chunk - 1]
                if line[chunk - 1]:
                    sent_s[stage] = max(sent_s[stage], end) + line[chunk - 1]
                    gradient_s[chunk][micro_batch] = sent_s[stage] + hop[chunk - 1]
            if kind is not Kind.I:
                live[stage] -= 1
                held[stage] -= kept_bytes[chunk]
        free_s[stage] = end
        starts_s[stage].append(start)
        ends_s[stage].append(end)
    if sum(live):  # forwards alone
        peak_live, peak_bytes = [0] * len(order), [0.0] * len(order)
    step_s = max(free_s, default=0.0)
    busy_s = sum(map(sum, ends_s)) - sum(map(sum, starts_s))
    bubble = max(0.0, 1 - busy_s / (step_s * len(order))) if step_s else 0.0
    return Simulation(order, step_s, bubble, peak_live, peak_bytes, starts_s, ends_s)


def _between_stages(seconds: float | Sequence[float], stage_of: Sequence[int]) -> list[float]:
    """By boundary, 0 where both chunks are on one stage; then a 0, which is at index -1 as well: the ends."""
    values = _spread(seconds, max(0, len(stage_of) - 1), "boundary between chunks")
    return [s if a != b else 0.0 for s, a, b in zip(values, stage_of, stage_of[1:], strict=False)] + [0.0]


def _spread(values: ByChunk, number: int, noun: str) -> list[float]:
    if not isinstance(values, Sequence):
        return [values] * number
    if len(values) != number:
        raise ValueError(f"{len(values)} values for {number}: give one for each {noun}")
    return list(values)

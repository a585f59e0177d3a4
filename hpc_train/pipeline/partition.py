"""Which layers each stage holds.  PURE: neither torch nor MPI.

layers   0 1 2 3 4 5 6 7       neighbouring layers make a chunk, and every layer is in one
chunk    0 0 0 1 1 2 2 2       the slowest chunk is as light as can be: exact, by dynamic programming
stage    0     1   0           a stage holds one chunk, or with some schedules several: then cuts are moved
                               from there while that makes the slowest stage lighter, which is no more
                               than a local search
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.errors import UserError

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class MemoryBound:
    """How much memory layers take, and how much there is.

    Attributes:
        bytes_of: of (start, end, chunk): bytes that the layers start to end - 1 need as this chunk, for
            parameters, gradients, optimizer state, and the activations that the schedule keeps of it. Of
            numbers a number; of arrays of layers, [n + 1, 1] and [1, n + 1], an array, [n + 1, n + 1].
        limits: bytes that each stage has, more than 0.
    """

    bytes_of: Callable[[Any, Any, int], Any]
    limits: Sequence[float]


class DoesNotFit(UserError):
    """No split fits into memory.

    `share`: what the fullest stage needs of its memory, more than 1, in the split where that is the least;
    where stages hold several chunks, among splits whose chunks take equal shares.
    """

    def __init__(self, text: str, share: float) -> None:
        self.share = share
        super().__init__(text)


def split_evenly(
    costs: Sequence[float],
    stages: int,
    *,
    stage_of: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    memory: MemoryBound | None = None,
) -> list[range]:
    """Cut the layers into chunks of neighbouring layers, each at least one, as evenly as can be.

    The slowest chunk takes as little time as possible; among such splits the sum of the squares of the
    chunks' times is least (so that the others are even as well), and among those the first chunks
    have the fewest layers, for they keep the most activations. Exact, by dynamic programming, also
    under a memory bound where each stage holds one chunk.

    Where stages hold several, that is a start: while it makes the slowest stage lighter, or another one
    that is as slow, one layer goes on from chunk to chunk over neighbouring cuts. No such step helps in
    the end, but one of several might. Memory is a stage's sum: the split without a bound is taken if
    it fits, else the best one whose chunks take equal shares of their stage's memory at most; one with
    unequal shares that fits is not looked for.

    Args:
        costs: time of each layer, in any unit, none negative.
        stages: how many there are.
        stage_of: the stage of each chunk; without it every stage holds one, in their order.
        speeds: of each stage; a chunk takes its cost divided by its stage's speed.
        memory: what the layers may take.

    Returns:
        the layers of each chunk.

    Raises:
        UserError: there are fewer layers than chunks, or a cost is not a number from 0 up.
        DoesNotFit: the memory bound leaves no split.
    """
    stage_of = list(range(stages) if stage_of is None else stage_of)
    _check_chunks(len(costs), stages, len(stage_of))
    for layer, cost in enumerate(costs):
        if not (cost >= 0 and math.isfinite(cost)):
            raise UserError(f"layer {layer} has cost {cost}: give a finite number, 0 or more")
    for stage, speed in enumerate(speeds or ()):
        if not (speed > 0 and math.isfinite(speed)):
            raise UserError(f"stage {stage} has speed {speed}: give a finite number above 0")
    until = np.array(list(accumulate(costs, initial=0.0)))  # until[j]: cost of the layers before j
    starts, ends = np.arange(len(until))[:, None], np.arange(len(until))[None, :]
    cost_of = np.where(starts < ends, until[None, :] - until[:, None], math.inf)
    speed_of = [speeds[stage] if speeds else 1.0 for stage in stage_of]

    def seconds(chunk: int) -> Matrix:
        return cost_of / speed_of[chunk]

    def with_even_stages(split: list[range]) -> list[range]:
        """Where stages hold several chunks and it fits; else the split as it is."""
        if len(stage_of) == stages:
            return split
        moved = _move_cuts(split, until, np.array(stage_of), np.array(speed_of))
        return moved if memory is None or _fits(moved, stage_of, memory) else split

    if memory is None or len(stage_of) > stages:
        split = with_even_stages(_lightest(seconds, stage_of))
        if memory is None or _fits(split, stage_of, memory):
            return split
    limits = [memory.limits[stage] / stage_of.count(stage) for stage in stage_of]

    def needed(chunk: int) -> Matrix:
        needed_bytes = np.asarray(memory.bytes_of(starts, ends, chunk), dtype=np.float64)
        return np.where(starts < ends, needed_bytes / limits[chunk], math.inf)

    least = _least_maximum(needed, len(stage_of))
    if least > 1:
        raise DoesNotFit(_explain(len(costs), stages, len(stage_of), least, memory.limits), least)
    return with_even_stages(
        _lightest(lambda chunk: np.where(needed(chunk) <= 1, seconds(chunk), math.inf), stage_of)
    )


def split_by_hand(sizes: Sequence[int], num_layers: int, stages: int, chunks: int = 1) -> list[range]:
    """The split in which the next chunk holds the next `sizes[chunk]` layers; `chunks` of them a stage.

    Raises:
        UserError: the sizes do not give every chunk a layer and every layer a chunk.
    """
    _check_chunks(num_layers, stages, stages * chunks)
    text = f"pipeline.split={list(sizes)}"
    noun, several = ("stage", "") if chunks == 1 else ("chunk", f" of {chunks} chunks")
    if len(sizes) != stages * chunks:
        raise UserError(
            f"{text} has {len(sizes)} numbers for {stages} stages{several}: give one number a {noun}"
        )
    if min(sizes) < 1:
        raise UserError(f"{text} leaves a {noun} without layers: every {noun} needs at least 1")
    if sum(sizes) != num_layers:
        raise UserError(f"{text} holds {sum(sizes)} layers, but the model has {num_layers}: make them add up")
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _check_chunks(num_layers: int, stages: int, chunks: int) -> None:
    if num_layers < chunks:
        several = "" if chunks == stages else f" of {chunks // stages} chunks"
        most = max(1, num_layers * stages // chunks)
        raise UserError(
            f"{num_layers} layer{'s' * (num_layers != 1)} cannot fill {stages} stages{several}: "
            f"set grid.stages to at most {most}"
        )


def _lightest(seconds: Callable[[int], Matrix], stage_of: Sequence[int]) -> list[range]:
    """The split whose slowest chunk is the lightest, and then the most even one; there must be one.

    `seconds`: of a chunk, by its first layer and its end, [n + 1, n + 1]; inf where it may not be.
    """
    chunks = len(stage_of)
    limit = _least_maximum(seconds, chunks)
    unit = limit or 1.0
    most = (limit / unit) * (1 + 1e-12)  # sums of the same layers may round apart
    squares = _nothing_placed(len(seconds(0)))  # squares[j]: least sum when the layers before j are placed
    starts = []  # starts[chunk][j]: where the chunk that ends at j begins
    for chunk in range(chunks):
        shares = seconds(chunk) / unit
        totals = squares[:, None] + np.where(shares <= most, shares * shares, math.inf)
        squares = totals.min(axis=0)
        # equal up to rounding: begin earlier, so that the chunks before hold fewer layers
        starts.append((totals <= squares * (1 + 1e-12)).argmax(axis=0))
    ends = [len(squares) - 1]
    for chunk in range(chunks - 1, 0, -1):
        ends.append(int(starts[chunk][ends[-1]]))
    return [range(start, end) for start, end in pairwise([0, *ends[::-1]])]


def _least_maximum(weights: Callable[[int], Matrix], chunks: int) -> float:
    """The heaviest chunk's weight in the split in which it is the lightest; inf where there is no split."""
    best = _nothing_placed(
        len(weights(0))
    )  # best[j]: of the chunks so far, when they hold the layers before j
    for chunk in range(chunks):
        best = np.maximum(best[:, None], weights(chunk)).min(axis=0)
    return float(best[-1])


def _move_cuts(
    split: list[range], until: NDArray[np.float64], stage_of: NDArray[np.int64], speeds: NDArray[np.float64]
) -> list[range]:
    """Move cuts while that makes the slowest stage lighter; the split itself where it cannot.

    A move gives one layer from a chunk to another one: all cuts between them go one layer back or on.

        chunk    0 0 0|1 1|2 2 2|3       the last two cuts one back: chunk 3 takes a layer, and 1 loses one
        chunk    0 0 0|1|2 2 2|3 3
    """
    cuts = np.array([layers.start for layers in split[1:]])
    num_stages, size = int(stage_of.max()) + 1, len(cuts)
    # heavier[k]: what a second of layers that cut k gives to the chunk before it adds to each stage
    heavier = np.zeros((size, num_stages))
    heavier[np.arange(size), stage_of[:-1]] += 1 / speeds[:-1]
    heavier[np.arange(size), stage_of[1:]] -= 1 / speeds[1:]
    # moves over fewer cuts than there are stages reach every other stage
    firsts, lasts = np.nonzero(np.tri(size, k=num_stages - 1) * np.tri(size).T)
    work_s = np.diff(until[[0, *cuts, len(until) - 1]]) / speeds
    load_s = np.bincount(stage_of, weights=work_s, minlength=num_stages)
    begun_s = load_s.max()
    while size and begun_s:
        slowest_s, square = load_s.max(), (load_s**2).sum()
        sizes = np.diff([0, *cuts, len(until) - 1])
        moves = []
        for step in (-1, 1):
            given_s = until[cuts + max(step, 0)] - until[cuts + min(step, 0)]
            change_s = np.vstack([np.zeros(num_stages), np.cumsum(step * given_s[:, None] * heavier, axis=0)])
            loads_s = load_s + change_s[lasts + 1] - change_s[firsts]
            giver = lasts + 1 if step > 0 else firsts
            most_s = np.where(sizes[giver] > 1, loads_s.max(axis=1), math.inf)
            squares = (loads_s**2).sum(axis=1)
            move = int(np.lexsort((squares, (most_s / slowest_s).round(9)))[0])
            moves.append((most_s[move], squares[move], firsts[move], lasts[move], step, loads_s[move]))
        most_s, fewer, first, last, step, loads_s = min(moves, key=lambda move: move[:2])
        lighter = most_s < slowest_s * (1 - 1e-9)
        if not lighter and not (most_s <= slowest_s * (1 + 1e-12) and fewer < square * (1 - 1e-9)):
            break
        cuts[first : last + 1] += step
        load_s = loads_s
    if load_s.max() >= begun_s * (1 - 1e-9):
        return split
    return [range(start, end) for start, end in pairwise([0, *cuts.tolist(), len(until) - 1])]


def _nothing_placed(length: int) -> NDArray[np.float64]:
    return np.where(np.arange(length) == 0, 0.0, math.inf)


def _fits(split: Sequence[range], stage_of: Sequence[int], memory: MemoryBound) -> bool:
    needed = [0.0] * len(memory.limits)
    for chunk, layers in enumerate(split):
        needed[stage_of[chunk]] += float(memory.bytes_of(layers.start, layers.stop, chunk))
    return all(has <= limit for has, limit in zip(needed, memory.limits, strict=True))


def _explain(num_layers: int, stages: int, chunks: int, least: float, limits: Sequence[float]) -> str:
    memory = f"{max(limits) / 1e9:.3g} GB" if len(set(limits)) == 1 else "its memory"
    needs = "at least" if chunks == stages else "with equal chunks"
    return (
        f"no split of {num_layers} layers into {stages} stages fits: the fullest one needs {needs} "
        f"{least:.0%} of {memory}: take more stages, smaller micro-batches or pipeline.recompute=all"
    )

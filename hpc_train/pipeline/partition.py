"""Which layers each stage holds.  PURE: neither torch nor MPI."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from hpc_train.errors import UserError


def split_evenly(costs: Sequence[float], stages: int) -> list[range]:
    """Cut the layers into stages of neighbouring layers, each at least one, as evenly as can be.

    The slowest stage is as light as possible; among such splits the sum of the squares of the
    stages' costs is least (so that the others are even as well), and among those the first stages
    have the fewest layers, for they keep the most activations. Exact, by dynamic programming.

    Args:
        costs: time of each layer, in any unit, none negative.
        stages: how many to make.

    Raises:
        UserError: there are fewer layers than stages, or a cost is not a number from 0 up.
    """
    _check_stages(len(costs), stages)
    for layer, cost in enumerate(costs):
        if not (cost >= 0 and math.isfinite(cost)):
            raise UserError(f"layer {layer} has cost {cost}: give a finite number, 0 or more")
    until = list(accumulate(costs, initial=0.0))  # until[j]: cost of the layers before j
    limit = _lightest_maximum(until, stages) * (1 + 1e-12)  # sums of the same layers may round apart
    ends = _most_even_ends(until, stages, limit)
    return [range(start, end) for start, end in pairwise([0, *ends])]


def split_by_hand(sizes: Sequence[int], num_layers: int, stages: int) -> list[range]:
    """The split in which stage s holds the next `sizes[s]` layers.

    Raises:
        UserError: the sizes do not give every stage a layer and every layer a stage.
    """
    _check_stages(num_layers, stages)
    text = f"pipeline.split={list(sizes)}"
    if len(sizes) != stages:
        raise UserError(f"{text} has {len(sizes)} numbers for {stages} stages: give one number a stage")
    if min(sizes) < 1:
        raise UserError(f"{text} leaves a stage without layers: every stage needs at least 1")
    if sum(sizes) != num_layers:
        raise UserError(f"{text} holds {sum(sizes)} layers, but the model has {num_layers}: make them add up")
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _check_stages(num_layers: int, stages: int) -> None:
    if num_layers < stages:
        raise UserError(
            f"{num_layers} layer{'s' * (num_layers != 1)} cannot fill {stages} stages: "
            f"set grid.stages to at most {num_layers}"
        )


def _lightest_maximum(until: Sequence[float], stages: int) -> float:
    """The least possible cost of the slowest stage."""
    num_layers = len(until) - 1
    best = list(until)  # best[j]: the slowest stage's cost when one stage holds the layers before j
    for stage in range(1, stages):
        previous = best
        best = [math.inf] * (num_layers + 1)
        start = stage  # of the new stage; the later it starts, the lighter it is and the heavier the others
        for end in range(stage + 1, num_layers + 1):
            while start < end - 1 and previous[start] < until[end] - until[start]:
                start += 1  # the balance is here or further on, for this end and those to come
            near = (start - 1, start) if start > stage else (start,)
            best[end] = min(max(previous[i], until[end] - until[i]) for i in near)
    return best[num_layers]


def _most_even_ends(until: Sequence[float], stages: int, limit: float) -> list[int]:
    """Where each stage ends, with no stage above `limit` and the least sum of squares."""
    num_layers = len(until) - 1
    squares = [0.0] + [math.inf] * num_layers  # squares[j]: least sum when the layers before j are placed
    starts: list[list[int]] = []  # starts[stage][j]: where the stage that ends at j begins
    for stage in range(stages):
        previous = squares
        squares = [math.inf] * (num_layers + 1)
        starts.append([0] * (num_layers + 1))
        for end in range(stage + 1, num_layers + 1 - (stages - 1 - stage)):
            for start in range(end - 1, stage - 1, -1):
                cost = until[end] - until[start]
                if cost > limit:
                    break  # and so are all that begin earlier
                total = previous[start] + cost * cost
                # equal up to rounding: begin earlier, so that the stages before hold fewer layers
                if total <= squares[end] * (1 + 1e-12):
                    squares[end] = min(total, squares[end])
                    starts[stage][end] = start
    ends = [num_layers]
    for stage in range(stages - 1, 0, -1):
        ends.append(starts[stage][ends[-1]])
    return ends[::-1]

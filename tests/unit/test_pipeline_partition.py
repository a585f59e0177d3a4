"""Layers to stages: as even as can be, against every possible split."""

import random
from itertools import combinations, pairwise

import pytest

from hpc_train.errors import UserError
from hpc_train.pipeline.partition import split_by_hand, split_evenly


def sizes(costs, stages):
    return [len(layers) for layers in split_evenly(costs, stages)]


def test_the_best_of_all_splits():
    draw = random.Random(1)
    for _ in range(300):
        costs = [draw.choice([0, 1, 1, 2, 3, 5, 9]) for _ in range(draw.randint(1, 9))]
        stages = draw.randint(1, len(costs))
        split = split_evenly(costs, stages)
        assert [layer for layers in split for layer in layers] == list(range(len(costs)))
        assert all(split)
        cuts = [[0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), stages - 1)]
        sums = [[sum(costs[i:j]) for i, j in pairwise(cut)] for cut in cuts]
        best = min((max(stage), sum(cost**2 for cost in stage)) for stage in sums)
        found = [sum(costs[i] for i in layers) for layers in split]
        assert (max(found), sum(cost**2 for cost in found)) == best, (costs, stages)


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        ([0.1, 1, 1, 1, 1, 0.2], 1, [6]),
        ([0.1, 1, 1, 1, 1, 0.2], 2, [3, 3]),  # embedding and two blocks | two blocks and head
        ([0.1, 1, 1, 1, 1, 0.2], 4, [2, 1, 1, 2]),
        ([1] * 7, 3, [2, 2, 3]),  # first stages keep the most activations: they get fewer layers
        ([0.1] * 10, 5, [2] * 5),  # sums that round differently are still equal
        ([5, 1, 1, 1, 1, 1], 3, [1, 2, 3]),
        ([0] * 4, 2, [1, 3]),
    ],
)
def test_known_splits(costs, stages, expected):
    assert sizes(costs, stages) == expected


def test_many_layers_are_quick():
    assert sizes([1.0] * 96, 64) == [1] * 32 + [2] * 32
    assert sizes([1.0] * 1024, 64) == [16] * 64


def test_what_cannot_be_split():
    with pytest.raises(UserError, match=r"2 layers cannot fill 3 stages: set grid\.stages to at most 2"):
        split_evenly([1, 1], 3)
    with pytest.raises(UserError, match=r"layer 1 has cost -1"):
        split_evenly([1, -1], 2)
    with pytest.raises(UserError, match=r"layer 0 has cost nan"):
        split_evenly([float("nan"), 1], 1)


def test_by_hand():
    assert split_by_hand([4, 2], 6, 2) == [range(4), range(4, 6)]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ([4, 2], r"pipeline.split=\[4, 2\] has 2 numbers for 3 stages"),
        ([4, 0, 2], r"pipeline.split=\[4, 0, 2\] leaves a stage without layers"),
        ([4, 2, 1], r"pipeline.split=\[4, 2, 1\] holds 7 layers, but the model has 6"),
    ],
)
def test_by_hand_what_does_not_fit(split, message):
    with pytest.raises(UserError, match=message):
        split_by_hand(split, 6, 3)

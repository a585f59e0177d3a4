"""Layers to stages: as even as can be, against every possible split."""

import random
from itertools import combinations, pairwise

import numpy as np
import pytest

from hpc_train.errors import UserError
from hpc_train.pipeline.partition import DoesNotFit, MemoryBound, split_by_hand, split_evenly


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


def splits(num_layers, chunks):
    """Every way to cut the layers into chunks."""
    for inner in combinations(range(1, num_layers), chunks - 1):
        yield [range(i, j) for i, j in pairwise([0, *inner, num_layers])]


def additive(layer_bytes, limits):
    """A bound under which layer i takes `layer_bytes[chunk][i]` as part of a chunk."""
    until = [np.cumsum([0, *row]) for row in layer_bytes]
    return MemoryBound(lambda start, end, chunk: until[chunk][end] - until[chunk][start], limits)


def test_unequal_stages_with_little_memory_against_every_split():
    draw = random.Random(2)
    impossible = 0
    for _ in range(300):
        num_layers = draw.randint(1, 8)
        stages = draw.randint(1, num_layers)
        costs = [draw.choice([0, 1, 1, 2, 3, 5, 9]) for _ in range(num_layers)]
        speeds = [draw.choice([0.25, 1, 1.5, 2]) for _ in range(stages)]
        layer_bytes = [[draw.randint(0, 5) for _ in range(num_layers)] for _ in range(stages)]
        limits = [draw.randint(3, 20) for _ in range(stages)]

        def times(split, costs=costs, speeds=speeds):
            return [
                sum(costs[i] for i in layers) / speed for layers, speed in zip(split, speeds, strict=True)
            ]

        def share(split, layer_bytes=layer_bytes, limits=limits):
            needed = [sum(row[i] for i in layers) for row, layers in zip(layer_bytes, split, strict=True)]
            return max(bytes_ / limit for bytes_, limit in zip(needed, limits, strict=True))

        fitting = [times(split) for split in splits(num_layers, stages) if share(split) <= 1]
        memory = additive(layer_bytes, limits)
        if fitting:
            best = min((max(seconds), sum(s**2 for s in seconds)) for seconds in fitting)
            found = split_evenly(costs, stages, speeds=speeds, memory=memory)
            assert share(found) <= 1
            assert (max(times(found)), sum(s**2 for s in times(found))) == pytest.approx(best)
        else:
            impossible += 1
            with pytest.raises(DoesNotFit) as caught:
                split_evenly(costs, stages, speeds=speeds, memory=memory)
            assert caught.value.share == pytest.approx(min(map(share, splits(num_layers, stages))))
    assert 20 < impossible < 280


def test_faster_stages_take_more_layers():
    assert split_evenly([1] * 6, 2, speeds=[1, 2]) == [range(2), range(2, 6)]
    assert split_evenly([1] * 6, 2, speeds=[5, 1]) == [range(5), range(5, 6)]


def test_chunks_have_the_speed_of_their_stage():
    split = split_evenly([1] * 12, 2, stage_of=[0, 1, 1, 0], speeds=[1, 2])
    assert [len(layers) for layers in split] == [2, 4, 4, 2]


def stage_times(split, costs, stage_of, speeds):
    times = [0.0] * len(speeds)
    for chunk, layers in enumerate(split):
        times[stage_of[chunk]] += sum(costs[i] for i in layers) / speeds[stage_of[chunk]]
    return times


def test_the_slowest_stage_of_several_chunks_is_nearly_as_light_as_in_the_best_of_all_splits():
    """Interleaved and zb-v. The lightest slowest chunk alone is the best split in half of them."""
    draw = random.Random(1)
    ratios = []
    for _ in range(300):
        stages = draw.randint(2, 4)
        there = list(range(stages))
        stage_of = there + draw.choice([there, there[::-1]])
        costs = [draw.choice([0.5, 1, 1, 1, 2, 3, 5]) for _ in range(draw.randint(2 * stages, 11))]
        speeds = [draw.choice([1, 1, 0.5, 2]) for _ in there]
        split = split_evenly(costs, stages, stage_of=stage_of, speeds=speeds)
        assert [layer for layers in split for layer in layers] == list(range(len(costs)))
        assert all(split)
        assert split == split_evenly(costs, stages, stage_of=stage_of, speeds=speeds)
        every = (stage_times(one, costs, stage_of, speeds) for one in splits(len(costs), 2 * stages))
        ratios.append(max(stage_times(split, costs, stage_of, speeds)) / min(map(max, every)))
    assert min(ratios) > 1 - 1e-9
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) > 0.85 * len(ratios)
    assert sum(ratios) / len(ratios) < 1.02


def test_a_stage_with_the_head_gets_fewer_layers_beside_it():
    """zb-v: no chunk need take more than 4, but cut 2 2 2 1 stage 0 would take 6 of 10."""
    costs, stage_of = [1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 0]
    split = split_evenly(costs, 2, stage_of=stage_of)
    assert [len(layers) for layers in split] == [1, 3, 2, 1]
    assert stage_times(split, costs, stage_of, [1, 1]) == [5, 5]
    assert split_evenly([0.0] * 5, 2, stage_of=stage_of)  # nothing to make lighter


def test_cuts_are_not_moved_to_where_memory_does_not_suffice():
    costs, stage_of = [1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 0]

    def sizes(*limits):
        memory = additive([[1] * 7] * 4, limits)
        return [len(layers) for layers in split_evenly(costs, 2, stage_of=stage_of, memory=memory)]

    assert sizes(2, 5) == [1, 3, 2, 1]
    assert sizes(4, 4) == [2, 2, 2, 1]


def test_memory_of_a_stage_is_the_sum_over_its_chunks():
    costs = [3, 1, 1, 1, 1, 3]
    one = additive([[1] * 6] * 4, [6, 6])
    free = split_evenly(costs, 2, stage_of=[0, 1, 0, 1])
    assert [len(layers) for layers in free] == [1, 2, 2, 1]
    assert split_evenly(costs, 2, stage_of=[0, 1, 0, 1], memory=one) == free
    big = additive([[4, 1, 1, 1, 1, 1]] * 4, [8, 4])  # of stages 0 and 1: 4 + 2 and 2 + 1
    assert split_evenly(costs, 2, stage_of=[0, 1, 0, 1], memory=big) == free
    with pytest.raises(DoesNotFit, match=r"fullest one needs with equal chunks 160% of 5e-09 GB: take more"):
        split_evenly(costs, 2, stage_of=[0, 1, 0, 1], memory=additive([[4, 1, 1, 1, 1, 1]] * 4, [5, 5]))


def test_what_no_memory_holds():
    with pytest.raises(
        DoesNotFit, match=r"no split of 4 layers into 2 stages fits: .* 150% of 80 GB: take mo"
    ):
        split_evenly([1] * 4, 2, memory=additive([[60e9] * 4] * 2, [80e9, 80e9]))


def test_what_cannot_be_split():
    with pytest.raises(UserError, match=r"2 layers cannot fill 3 stages: set grid\.stages to at most 2"):
        split_evenly([1, 1], 3)
    with pytest.raises(UserError, match=r"layer 1 has cost -1"):
        split_evenly([1, -1], 2)
    with pytest.raises(UserError, match=r"layer 0 has cost nan"):
        split_evenly([float("nan"), 1], 1)
    with pytest.raises(UserError, match=r"stage 1 has speed 0"):
        split_evenly([1, 1], 2, speeds=[1, 0])
    with pytest.raises(
        UserError, match=r"6 layers cannot fill 4 stages of 2 chunks: set grid.stages to at mo.* 3"
    ):
        split_evenly([1] * 6, 4, stage_of=[0, 1, 2, 3, 3, 2, 1, 0])


def test_by_hand():
    assert split_by_hand([4, 2], 6, 2) == [range(4), range(4, 6)]
    assert split_by_hand([1, 2, 1, 2], 6, 2, chunks=2) == [range(1), range(1, 3), range(3, 4), range(4, 6)]
    with pytest.raises(UserError, match=r"has 2 numbers for 2 stages of 2 chunks: give one number a chunk"):
        split_by_hand([4, 2], 6, 2, chunks=2)


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

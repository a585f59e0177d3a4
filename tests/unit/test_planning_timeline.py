"""Many micro-batches foreseen from few, and what is kept at most."""

import random

import numpy as np
import pytest

from hpc_train.pipeline.schedules import find
from hpc_train.pipeline.simulate import simulate
from hpc_train.planning.timeline import ChunkTimes, Pipe, live, play

NAMES = ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved"]


def pipe(name, stages, chunks=3):
    return Pipe(name, chunks if name == "interleaved" else find(name).chunks, stages)


def random_times(draw, num_chunks, comm_s):
    """Chunks of which some take up to 6 times as long as others, and lines that are no faster."""

    def seconds():
        return [draw.uniform(0.5, 1.5) * draw.choice([1, 1, 1, 2]) for _ in range(num_chunks)]

    lines = [[draw.uniform(0, comm_s) for _ in range(num_chunks - 1)] for _ in range(2)]
    return ChunkTimes(seconds(), seconds(), seconds(), *lines)


def whole_step(pipe, micro_batches, times):
    order = find(pipe.schedule, pipe.chunks).order(pipe.stages, micro_batches)
    return simulate(order, *times[:3], comm_s=times.latency_s, line_s=times.line_s)


@pytest.mark.parametrize("name", NAMES)
def test_a_long_step_is_foreseen_from_short_ones(name):
    draw = random.Random(name)
    shorter = 0
    for _ in range(15):
        some = pipe(name, draw.choice([1, 2, 3, 4, 6]))
        micro_batches = some.stages * draw.choice([40, 60])
        times = random_times(draw, some.stages * some.chunks, draw.choice([0, 0.1, 1, 2]))
        expected = whole_step(some, micro_batches, times)
        foreseen = play(some, micro_batches, times)
        assert foreseen.step_s == pytest.approx(expected.step_s, rel=0.01)
        assert foreseen.bubble == pytest.approx(expected.bubble, abs=0.01)
        ends_s = [row[-1] for row in expected.ends_s]
        assert foreseen.ends_s == pytest.approx(ends_s, rel=0.01)
        shorter += foreseen.actions < sum(map(len, expected.order))
    assert shorter >= 5


def test_very_many_micro_batches_cost_no_more():
    times = ChunkTimes([1.0] * 8, [1.0] * 8, [1.0] * 8, [0.0] * 7, [0.0] * 7)
    timeline = play(pipe("1f1b", 8), 1_000_000, times)
    assert timeline.step_s == pytest.approx((1_000_000 + 7) * 3)
    assert timeline.actions < 3000


@pytest.mark.parametrize("name", NAMES)
def test_few_micro_batches_are_played_as_they_are(name):
    some = pipe(name, 3)
    times = random_times(random.Random(1), some.stages * some.chunks, 0.3)
    for micro_batches in (1, 2, 3, 7):
        expected, played = whole_step(some, micro_batches, times), play(some, micro_batches, times)
        assert (played.step_s, played.bubble) == (expected.step_s, expected.bubble)


def test_when_the_last_backwards_run():
    """2 stages, 2 micro-batches, 1f1b, every time 1: stage 1 is done at 7 and stage 0 at 9."""
    times = ChunkTimes([1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0], [0.0])
    timeline = play(pipe("1f1b", 2), 2, times)
    assert timeline.last_backward_s == [(7, 9), (5, 7)]
    assert timeline.ends_s == [9, 7]
    halves = play(pipe("zb-h1", 2), 2, times)  # stage 1 puts off W0, and ends with W1
    assert halves.last_backward_s[1] == (6, 7)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_at_most_is_what_the_simulation_counts(name):
    draw = random.Random(name)
    for stages in (1, 2, 3, 5):
        for micro_batches in (1, 2, 5, 10, 15, 100):
            some = pipe(name, stages)
            kept_bytes = [float(draw.randint(1, 50)) for _ in range(stages * some.chunks)]
            order = find(name, some.chunks).order(stages, micro_batches)
            expected = simulate(order, 1, 1, 1, activation_bytes=kept_bytes).peak_bytes
            moments = live(some, micro_batches)
            assert [max(counts @ np.array(kept_bytes)) for counts in moments] == expected


def test_a_step_that_waits_for_its_host_ends_later():
    times = ChunkTimes([1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0], [0.0])
    timeline = play(pipe("1f1b", 2), 2, times)
    assert timeline.lasting(9) is timeline
    later = timeline.lasting(12)
    assert (later.step_s, later.ends_s, later.last_backward_s) == (12, [12, 10], [(10, 12), (8, 10)])
    assert later.bubble == pytest.approx(1 - 12 / 24)

"""Schedules: sound at every size, with the bubble and the activations that the papers promise."""

import time

import pytest

from hpc_train.errors import UserError
from hpc_train.pipeline.actions import Kind, parse, placement
from hpc_train.pipeline.check import validate
from hpc_train.pipeline.schedules import (
    find,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from hpc_train.pipeline.simulate import simulate

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8, 13) for m in (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 64)]
ALL = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]


def idle_s(order, stages, times=(1.0, 1.0, 1.0)):
    """Of a stage, on average, in the seconds of one micro-batch's F, I and W on a stage."""
    per_stage = max(1, len(placement(order)) // stages)
    simulation = simulate(order, *(s / per_stage for s in times))
    return simulation.step_s * simulation.bubble


def test_gpipe_as_drawn():
    assert gpipe(2, 3) == parse("""
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1F2 1B0 1B1 1B2
    """)


def test_one_f_one_b_as_drawn():
    assert one_f_one_b(3, 4) == parse("""
        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """)


def test_one_f_one_b_with_fewer_micro_batches_than_stages():
    assert one_f_one_b(4, 2) == parse("""
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2F1 2B0 2B1
        3F0 3B0 3F1 3B1
    """)


def test_interleaved_as_drawn():
    assert interleaved(2, 4) == parse("""
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """)


def test_zb_h1_as_drawn():
    """As in the paper's figure 2, but that chunk 0's backward is never split."""
    assert zb_h1(3, 4) == parse("""
        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """)


def test_zb_v_as_drawn():
    assert zb_v(2, 4) == parse("""
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0B0 3F2 3I2 3W2 0B1 3F3 3I3 3W3 0B2 0B3
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """)


@pytest.mark.parametrize(("name", "chunks"), ALL)
def test_every_size_is_sound(name, chunks):
    schedule = find(name, chunks)
    for stages, micro_batches in SIZES:
        order = schedule.order(stages, micro_batches)
        assert len(order) == stages
        validate(order)
        if micro_batches:
            expected = [schedule.stage_of(chunk, stages) for chunk in range(stages * schedule.chunks)]
            assert placement(order) == expected
        else:
            assert order == [[]] * stages


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("weight_s", [0.0, 1.0])
def test_bubble_is_that_of_the_papers(name, weight_s):
    for stages, micro_batches in SIZES:
        simulation = simulate(find(name).order(stages, micro_batches), 1.0, 1.0, weight_s)
        expected = (stages - 1) / (micro_batches + stages - 1) if micro_batches else 0.0
        assert simulation.bubble == pytest.approx(expected, abs=1e-9), (stages, micro_batches)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaving_divides_the_idle_time_also_where_groups_are_unequal(chunks):
    for stages, micro_batches in SIZES:
        if micro_batches >= stages:
            idle = idle_s(interleaved(stages, micro_batches, chunks), stages)
            assert idle == pytest.approx(3 * (stages - 1) / chunks, abs=1e-9), (stages, micro_batches)


def test_zb_h1_has_a_third_of_the_idle_time_and_no_higher_peak():
    for stages, micro_batches in SIZES:
        if micro_batches >= stages:
            ours, theirs = zb_h1(stages, micro_batches), one_f_one_b(stages, micro_batches)
            assert idle_s(ours, stages) == pytest.approx(idle_s(theirs, stages) / 3, abs=1e-9)
            peak = max(simulate(theirs, 1, 1, 1).peak_live)
            assert max(simulate(ours, 1, 1, 1).peak_live) <= peak == stages


@pytest.mark.parametrize("times", [(1.0, 1.2, 0.8), (1.0, 1.5, 1.0), (1.0, 1.0, 0.5)])
def test_zb_h1_idles_as_the_paper_says(times):
    forward_s, input_s, weight_s = times
    assert idle_s(zb_h1(4, 16), 4, times) == pytest.approx(3 * (forward_s + input_s - weight_s))


@pytest.mark.parametrize("micro_batches", [8, 16, 32])
def test_four_stages_without_a_bubble_to_speak_of(micro_batches):
    """The last stage cannot begin before three chunks are done: nothing else is lost with zb-v."""
    usual = idle_s(one_f_one_b(4, micro_batches), 4)
    assert (usual, idle_s(zb_h1(4, micro_batches), 4)) == (pytest.approx(9), pytest.approx(3))
    order = zb_v(4, micro_batches)
    assert idle_s(order, 4) == pytest.approx(3 / 2)
    assert simulate(order, 1, 1, 1).bubble == pytest.approx(3 / (6 * micro_batches + 3))


def test_zb_v_loses_only_the_start_and_keeps_what_1f1b_keeps():
    for stages, micro_batches in SIZES:
        simulation = simulate(zb_v(stages, micro_batches), 1, 1, 1)
        assert max(simulation.peak_live) <= 2 * stages  # chunks of half a stage
        if micro_batches >= 2 * stages - 1:
            assert simulation.step_s == 6 * micro_batches + stages - 1


def test_live_activations_are_those_of_the_papers():
    for stages, micro_batches in SIZES:
        assert simulate(gpipe(stages, micro_batches), 1, 1, 1).peak_live == [micro_batches] * stages
        assert simulate(one_f_one_b(stages, micro_batches), 1, 1, 1).peak_live == [
            min(micro_batches, stages - stage) for stage in range(stages)
        ]
        if micro_batches and micro_batches % stages == 0:
            assert simulate(interleaved(stages, micro_batches, 3), 1, 1, 1).peak_live == [
                min(3 * micro_batches, 2 * stages + 2 * (stages - 1 - stage) + 1) for stage in range(stages)
            ]


def runs_with_one_output_under_way(order):
    """Play forwards whose sends end once their receiver's turn has come, one at a time to each stage."""
    stage_of = placement(order)
    position, computed = [0] * len(order), [False] * len(order)
    under_way, taken, sent = {}, set(), set()
    progress = True
    while progress:
        progress = False
        for stage, row in enumerate(order):
            if position[stage] == len(row):
                continue
            chunk, _, number = row[position[stage]]
            if not computed[stage] and (chunk == 0 or (chunk, number) in sent):
                taken.add((chunk, number))
                computed[stage] = progress = True
            if computed[stage]:
                receiver = stage_of[chunk + 1] if chunk + 1 < len(stage_of) else stage
                if receiver != stage:
                    if under_way.get((stage, receiver)) not in (None, *taken):
                        continue
                    under_way[stage, receiver] = (chunk + 1, number)
                sent.add((chunk + 1, number))
                position[stage] += 1
                computed[stage] = False
                progress = True
    return all(at == len(row) for at, row in zip(position, order, strict=True))


@pytest.mark.parametrize(("name", "chunks"), ALL)
def test_forwards_alone_are_sound_with_one_output_under_way_to_each_stage(name, chunks):
    for stages in (1, 2, 3, 5):
        for micro_batches in (1, 2, 5, 8, 13):
            order = find(name, chunks).forwards(stages, micro_batches)
            assert {action.kind for row in order for action in row} == {Kind.F}
            validate(order)
            assert runs_with_one_output_under_way(order)


def test_a_thousand_micro_batches_through_256_stages_are_quick():
    began = time.process_time()
    order = one_f_one_b(256, 1024)
    validate(order)
    assert simulate(order, 1, 1, 1).bubble == pytest.approx(255 / 1279)
    assert time.process_time() - began < 15  # about 1.5 s; an order walked in squared time takes minutes


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        UserError, match="no schedule 'zigzag': known are gpipe, 1f1b, interleaved, zb-h1, zb-v"
    ):
        find("zigzag")


def test_how_many_chunks_a_stage_a_schedule_takes():
    assert [find(name).chunks for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")] == [
        1,
        1,
        2,
        1,
        2,
    ]
    assert find("interleaved", 5).chunks == 5
    with pytest.raises(UserError, match="schedule gpipe gives each stage 1 chunks, not 2"):
        find("gpipe", 2)
    with pytest.raises(UserError, match="schedule zb-v gives each stage 2 chunks, not 3"):
        find("zb-v", 3)
    with pytest.raises(UserError, match="schedule interleaved gives each stage 2 chunks, not 1: take 1f1b"):
        find("interleaved", 1)

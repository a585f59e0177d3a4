"""Schedules: sound at every size, with the bubble and the activations that the papers promise."""

import time

import pytest

from hpc_train.pipeline.actions import Kind, parse
from hpc_train.pipeline.check import simulate, validate
from hpc_train.pipeline.schedules import forward_only, gpipe, make, one_f_one_b

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8, 13, 16) for m in (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 64)]


def test_gpipe_as_drawn():
    assert gpipe(2, 3) == parse("""
        F0 F1 F2 B0 B1 B2
        F0 F1 F2 B0 B1 B2
    """)


def test_one_f_one_b_as_drawn():
    assert one_f_one_b(3, 4) == parse("""
        F0 F1 F2 B0 F3 B1 B2 B3
        F0 F1 B0 F2 B1 F3 B2 B3
        F0 B0 F1 B1 F2 B2 F3 B3
    """)


def test_one_f_one_b_with_fewer_micro_batches_than_stages():
    assert one_f_one_b(4, 2) == parse("""
        F0 F1 B0 B1
        F0 F1 B0 B1
        F0 F1 B0 B1
        F0 B0 F1 B1
    """)


@pytest.mark.parametrize("make_order", [gpipe, one_f_one_b, forward_only])
def test_every_size_is_sound(make_order):
    for stages, micro_batches in SIZES:
        order = make_order(stages, micro_batches)
        assert len(order) == stages
        validate(order)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("backward_s", [1.0, 2.0])
def test_bubble_is_that_of_the_papers(name, backward_s):
    for stages, micro_batches in SIZES:
        simulation = simulate(make(name, stages, micro_batches), 1.0, backward_s)
        expected = (stages - 1) / (micro_batches + stages - 1) if micro_batches else 0.0
        assert simulation.bubble == pytest.approx(expected, abs=1e-9), (stages, micro_batches)


def test_live_activations_are_those_of_the_papers():
    for stages, micro_batches in SIZES:
        assert simulate(gpipe(stages, micro_batches), 1, 2).peak_live == [micro_batches] * stages
        assert simulate(one_f_one_b(stages, micro_batches), 1, 2).peak_live == [
            min(micro_batches, stages - stage) for stage in range(stages)
        ]
        assert simulate(forward_only(stages, micro_batches), 1, 2).peak_live == [0] * stages


def test_a_thousand_micro_batches_through_256_stages_are_quick():
    began = time.process_time()
    order = one_f_one_b(256, 1024)
    validate(order)
    assert simulate(order, 1, 2).bubble == pytest.approx(255 / 1279)
    assert time.process_time() - began < 15  # about 2 s; an order walked in squared time takes minutes


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no schedule 'zigzag': known are gpipe, 1f1b"):
        make("zigzag", 2, 2)


def test_forward_only_has_no_backward():
    assert {action.kind for row in forward_only(3, 5) for action in row} == {Kind.F}

"""What a rank keeps, counted by hand."""

import numpy as np
from profiles import even_layers

from hpc_train.comm.interface import Wire
from hpc_train.planning.memory import Memory, ties_of
from hpc_train.planning.profile import Curve, LayerProfile, Profile
from hpc_train.planning.timeline import Pipe, live

# 10 bytes of parameters a layer: with gradients and two numbers of AdamW 40
FOUR = even_layers(4, activation_bytes=100, output_bytes=7, parameter_bytes=10)


def test_two_stages():
    """1f1b: stage 0 keeps 2 micro-batches of 3 samples and room for 2 gradients, stage 1 keeps 1."""
    memory = Memory(FOUR, micro_batch=3, recompute="none")
    moments = live(Pipe("1f1b", 1, 2), 8)
    rank_bytes = memory.rank_bytes([range(3), range(3, 4)], [0, 1], moments)
    gradients = 2 * 3 * 7  # one that is computed with, one under way
    coming = 3 * 7  # the next input
    assert rank_bytes == [3 * 40 + 2 * 3 * (300 + 7) + gradients, 40 + 3 * 100 + gradients + coming]
    assert memory.least_bytes(2) == 80


def test_gpipe_has_room_for_a_gradient_of_every_micro_batch_before_the_first_comes():
    memory = Memory(FOUR, micro_batch=3, recompute="none")
    first, last = memory.rank_bytes([range(2), range(2, 4)], [0, 1], live(Pipe("gpipe", 1, 2), 8))
    gradients = 2 * 3 * 7
    assert first == 2 * 40 + 8 * 3 * (200 + 7) + gradients
    assert last == 2 * 40 + 8 * 3 * 200 + gradients + 3 * 7


def test_recompute_keeps_inputs_and_room_for_a_gradient_and_one_layer():
    memory = Memory(FOUR, micro_batch=3, recompute="all")
    moments = live(Pipe("1f1b", 1, 2), 8)
    kept = 2 * 3 * (0 + 7 + 7)  # the batch itself is not counted
    assert memory.rank_bytes([range(2), range(2, 4)], [0, 1], moments)[0] == 80 + kept + 300 + 2 * 3 * 7


def test_an_input_that_is_kept_and_a_gradient_that_comes_encoded():
    """What the layer before would keep anyway is the receiver's memory as well."""
    relu = even_layers(4, activation_bytes=100, output_bytes=8, kept_output_bytes=8)
    moments = live(Pipe("gpipe", 1, 2), 5)
    for wire, room in ((Wire.FP32, 8), (Wire.BF16, 4)):
        memory = Memory(relu, 1, "none", wire=wire)
        first, last = memory.rank_bytes([range(2), range(2, 4)], [0, 1], moments)
        assert (first, last) == (5 * (200 + room) + 16, 5 * (200 + 8) + 16 + 8)


def test_chunks_of_one_stage_send_nothing_to_each_other():
    """zb-v on a single stage: what goes from its first chunk to its second is no message."""
    memory = Memory(FOUR, 1, "none")
    held = [np.array([[3, 3]])]
    apart = [np.array([[3, 0]]), np.array([[0, 3]])]
    split = [range(2), range(2, 4)]
    one = memory.rank_bytes(split, [0, 0], held)
    assert sum(memory.rank_bytes(split, [0, 1], apart)) == one[0] + 3 * 7


def test_a_sharded_optimizer_and_a_residual():
    assert Memory(FOUR, 1, "none", optimizer_share=0.25).least_bytes(1) == 4 * (10 + 10 + 5)
    assert Memory(FOUR, 1, "none", residual=True).least_bytes(1) == 4 * (10 + 10 + 20 + 10)


def test_frozen_parameters_have_neither_gradient_nor_state():
    layer = LayerProfile(forward=Curve.line(0, 1), parameter_bytes=10, frozen_bytes=4)
    assert Memory(Profile(layers=[layer]), 1, "none").least_bytes(1) == 10 + 6 + 12


def test_a_tie_is_one_parameter_on_a_stage_and_a_loan_between_stages():
    tied = LayerProfile(forward=Curve.line(0, 1), parameter_bytes=10, tied={"embedding": 10})
    plain = LayerProfile(forward=Curve.line(0, 1), parameter_bytes=1)
    profile = Profile(layers=[tied, plain, tied, tied])
    assert [tie.layers for tie in ties_of(profile)] == [(0, 2, 3)]
    memory = Memory(profile, 1, "none")
    assert memory.least_bytes(1) == 44
    one = [np.zeros((1, 1), dtype=np.int64)]
    assert memory.rank_bytes([range(4)], [0], one) == [44]
    two = [np.zeros((1, 2), dtype=np.int64)] * 2
    # the borrower has the parameter and its gradient, once
    assert memory.rank_bytes([range(2), range(2, 4)], [0, 1], two) == [44, 20]


def test_whole_chunks_and_matrices_of_them_agree():
    memory = Memory(FOUR, 2, "all")
    starts, ends = np.arange(5)[:, None], np.arange(5)[None, :]
    matrix = memory.fixed_bytes(starts, ends) + 3 * memory.kept_bytes(starts, ends)
    for start in range(5):
        for end in range(start + 1, 5):
            one = memory.fixed_bytes(start, end) + 3 * memory.kept_bytes(start, end)
            assert matrix[start, end] == one

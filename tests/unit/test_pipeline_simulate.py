"""The time and the memory that an order takes."""

from itertools import pairwise

import pytest

from hpc_train.pipeline.actions import Action, Kind, parse
from hpc_train.pipeline.schedules import gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from hpc_train.pipeline.simulate import simulate


def test_times_of_unequal_stages():
    """The slow stage sets the pace: 1 + 4 x (2 + 3) + 1 seconds, of 2 x 22 that both stages have."""
    simulation = simulate(one_f_one_b(2, 4), [1.0, 2.0], [0.5, 1.0], [0.5, 2.0])
    assert simulation.step_s == pytest.approx(22.0)
    assert simulation.bubble == pytest.approx(1 - (4 * 2 + 4 * 5) / 44)


def test_a_whole_backward_takes_the_time_of_its_halves():
    split = parse("0F0 0I0 0W0\n1F0 1I0 1W0")
    whole = parse("0F0 0B0\n1F0 1B0")
    times = 1.0, [2.0, 3.0], [4.0, 5.0]
    assert [cell[1:] for cell in simulate(split, *times).cells[0]] == [(0, 1), (5, 7), (7, 11)]
    assert [cell[1:] for cell in simulate(whole, *times).cells[0]] == [(0, 1), (10, 16)]


def test_messages_take_time_but_do_not_hold_up_their_sender():
    without, with_comm = (simulate(gpipe(3, 4), 1, 0.5, 0.5, comm_s) for comm_s in (0.0, 0.5))
    assert with_comm.step_s == pytest.approx(without.step_s + 4 * 0.5)  # two hops there, two back
    cells = with_comm.cells
    assert [(cell.start_s, cell.end_s) for cell in cells[0][:4]] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert (cells[1][0].start_s, cells[2][0].start_s) == (1.5, 3.0)


def test_each_boundary_has_its_own_time_and_none_within_a_stage():
    """Down 0 -> 1, 2 -> 3 on one stage, and up again: 4 chunks, 2 stages, as a V."""
    (down, turn, up), order = (10.0, 1000.0, 0.5), zb_v(2, 1)
    cells = {cell.action: cell for row in simulate(order, 1, 1, 1, [down, turn, up]).cells for cell in row}
    starts = [cells[Action(chunk, Kind.F, 0)].start_s for chunk in range(4)]
    assert starts == [0, 1 + 10, 12, 13 + 0.5]
    assert cells[Action(2, Kind.I, 0)].start_s == 13.5 + 1 + 1 + 0.5  # 3F0, 3I0, and up


def test_a_slow_line_carries_one_message_after_the_other():
    """4 micro-batches of 1 + 2 seconds, 3 seconds for a message: the line sets the pace, each way."""
    simulation = simulate(gpipe(2, 4), 1, 1, 1, 0.5, line_s=3)
    last = simulation.cells[1]
    assert [cell.start_s for cell in last[:4]] == [4.5, 7.5, 10.5, 13.5]
    assert [cell.start_s for cell in simulation.cells[0][4:]] == [20, 23, 26, 29]  # from 14.5 + 2 + 3.5
    assert simulate(gpipe(2, 1), 1, 1, 1, 3.5).step_s == simulate(gpipe(2, 1), 1, 1, 1, 0.5, line_s=3).step_s
    assert simulate(zb_v(1, 4), 1, 1, 1, line_s=3).step_s == 4 * 6  # both chunks on one stage


def test_outputs_and_gradients_of_a_stage_share_its_line():
    """Stage 1 sends the output of 1F2 from 19 to 24, so that 1B1's gradient, there at 23, leaves at 24."""
    simulation = simulate(one_f_one_b(3, 3), 1, 1, 1, line_s=[1, 5])
    cells = {str(cell.action): cell for row in simulation.cells for cell in row}
    assert (cells["1F2"].end_s, cells["1B1"].end_s, cells["0B1"].start_s) == (19, 23, 25)


def test_cells_never_overlap_and_follow_their_input():
    simulation = simulate(interleaved(2, 9), [1, 2, 1, 3], [2, 3, 1, 1], [2, 1, 0, 4], 0.25)
    for row in simulation.cells:
        assert all(a.end_s <= b.start_s for a, b in pairwise(row))
    ends = {cell.action: cell.end_s for row in simulation.cells for cell in row}
    for action, start_s, _ in (cell for row in simulation.cells for cell in row):
        if action.kind is Kind.F and action.chunk > 0:
            assert start_s >= ends[action._replace(chunk=action.chunk - 1)] + 0.25
        if action.kind is Kind.B and action.chunk < 3:
            assert start_s >= ends[action._replace(chunk=action.chunk + 1)] + 0.25
    assert simulation.step_s == max(ends.values())


def test_activations_are_kept_until_the_weights_have_their_gradient():
    order = parse("0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1I1 1W0 1W1")
    simulation = simulate(order, 1, 1, 1, activation_bytes=[100, 7])
    assert simulation.peak_live == [2, 2]
    assert simulation.peak_bytes == [200, 14]


def test_bytes_are_counted_by_chunk():
    """What a micro-batch keeps in one chunk of a stage may be other than what it keeps in the other."""
    simulation = simulate(zb_v(2, 8), 1, 1, 1, activation_bytes=[10, 0, 0, 1])
    assert simulation.peak_live[0] == 4
    assert simulation.peak_bytes == [40, 0]  # four micro-batches in chunk 0 while none is in chunk 3


def test_forwards_alone_keep_nothing():
    simulation = simulate(parse("0F0 0F1\n1F0 1F1"), 1, 1, 1, activation_bytes=5)
    assert (simulation.step_s, simulation.peak_live, simulation.peak_bytes) == (3, [0, 0], [0, 0])


def test_nothing_to_do():
    simulation = simulate(zb_h1(3, 0), 1, 1, 1, 1)
    assert (simulation.step_s, simulation.bubble, simulation.peak_live) == (0, 0, [0] * 3)
    assert simulation.cells == [[]] * 3


def test_times_must_be_one_a_chunk_and_a_boundary():
    with pytest.raises(ValueError, match="2 values for 3: give one for each chunk"):
        simulate(gpipe(3, 1), [1.0, 1.0], 1.0, 1.0)
    with pytest.raises(ValueError, match="3 values for 2: give one for each boundary between chunks"):
        simulate(gpipe(3, 1), 1, 1, 1, [1, 1, 1])

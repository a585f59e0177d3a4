"""A bad order is refused with a table that marks the failing cell; a good one is timed."""

import random
from itertools import pairwise

import pytest

from hpc_train.pipeline.actions import parse
from hpc_train.pipeline.check import simulate, validate
from hpc_train.pipeline.schedules import gpipe, one_f_one_b


def refusal(text):
    with pytest.raises(ValueError, match=r".") as caught:
        validate(parse(text))
    return str(caught.value)


def test_parse_is_the_inverse_of_the_text_of_actions():
    order = one_f_one_b(4, 12)
    assert parse("\n".join(" ".join(map(str, row)) for row in order)) == order
    with pytest.raises(ValueError, match="'X1' is not an action"):
        parse("F0 X1")
    with pytest.raises(ValueError, match="'F' is not an action"):
        parse("F")


def test_an_action_twice():
    assert refusal("F0 F0 B0") == ("0F0 is there twice\n             #0  #1    #2\n    stage 0  F0  >F0<  B0")


def test_an_action_missing():
    assert refusal("F0 F1 B0 B1\nF0 F1 B0") == (
        "1B1 is missing\n"
        "             #0  #1  #2  #3\n"
        "    stage 0  F0  F1  B0  B1\n"
        "    stage 1  F0  F1  B0  >?<"
    )


def test_a_stage_that_does_nothing():
    assert refusal("F0 B0\n\nF0 B0").startswith("1F0 is missing")


def test_a_micro_batch_number_left_out():
    assert refusal("F0 F2 B0 B2").startswith("0F1 is missing")


def test_backward_before_forward():
    message = refusal("F0 B1 B0 F1")
    assert message.startswith("0B1 comes before 0F1")
    assert ">B1<" in message


def test_deadlock_names_who_waits_for_whom():
    assert refusal("F0 B0 F1 B1\nF0 F1 B0 B1") == (
        "deadlock: 0B0 waits for 1B0; 1F1 waits for 0F1\n"
        "             #0  #1    #2  #3\n"
        "    stage 0  F0  >B0<  F1  B1\n"
        "    stage 1  F0  >F1<  B0  B1"
    )


def test_a_failure_in_a_long_order_shows_its_surroundings_only():
    order = one_f_one_b(64, 256)
    order[40][100], order[40][101] = order[40][101], order[40][100]
    order[40].insert(200, order[40][3])
    with pytest.raises(ValueError, match="40F3 is there twice") as caught:
        validate(order)
    lines = str(caught.value).splitlines()
    assert [line.split("  ")[2].strip() for line in lines[2:]] == ["stage 39", "stage 40", "stage 41"]
    assert max(map(len, lines)) < 120


def test_other_orders_than_ours_may_be_sound():
    validate(parse("F0 F1 B1 B0\nF1 F0 B0 B1"))


def test_orders_shuffled_at_random_run_or_are_refused():
    """validate against a slow walker that tries every stage again and again."""

    def can_run(order):
        done, position = set(), [0] * len(order)
        progress = True
        while progress:
            progress = False
            for stage, row in enumerate(order):
                if position[stage] < len(row):
                    action = row[position[stage]]
                    sender = stage - 1 if action.kind.name == "F" else stage + 1
                    if not 0 <= sender < len(order) or (sender, action) in done:
                        done.add((stage, action))
                        position[stage] += 1
                        progress = True
        return all(at == len(row) for at, row in zip(position, order, strict=True))

    draw = random.Random(3)
    outcomes = {True: 0, False: 0}
    for _ in range(400):
        order = one_f_one_b(3, 3)
        for _ in range(draw.randint(1, 12)):
            row = draw.choice(order)
            at = draw.randrange(len(row) - 1)
            if row[at].micro_batch != row[at + 1].micro_batch:  # keeps backward after forward
                row[at], row[at + 1] = row[at + 1], row[at]
        sound = can_run(order)
        outcomes[sound] += 1
        if sound:
            validate(order)
        else:
            with pytest.raises(ValueError, match="deadlock"):
                validate(order)
    assert min(outcomes.values()) > 20


def test_times_of_unequal_stages():
    """The slow stage sets the pace: 1 + 4 x (2 + 3) + 1 seconds, of 2 x 22 that both stages have."""
    simulation = simulate(one_f_one_b(2, 4), [1.0, 2.0], [1.0, 3.0])
    assert simulation.step_s == pytest.approx(22.0)
    assert simulation.bubble == pytest.approx(1 - (4 * 2 + 4 * 5) / 44)


def test_messages_take_time_but_do_not_hold_up_their_sender():
    without, with_comm = (simulate(gpipe(3, 4), 1.0, 1.0, comm_s) for comm_s in (0.0, 0.5))
    assert with_comm.step_s == pytest.approx(without.step_s + 4 * 0.5)  # two hops there, two back
    cells = with_comm.cells
    assert [(cell.start_s, cell.end_s) for cell in cells[0][:4]] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert (cells[1][0].start_s, cells[2][0].start_s) == (1.5, 3.0)


def test_cells_never_overlap_and_follow_their_input():
    simulation = simulate(one_f_one_b(4, 9), [1, 2, 1, 3], [2, 4, 1, 5], 0.25)
    for row in simulation.cells:
        assert all(a.end_s <= b.start_s for a, b in pairwise(row))
    ends = [{cell.action: cell.end_s for cell in row} for row in simulation.cells]
    for stage in range(1, 4):
        for cell in simulation.cells[stage]:
            if cell.action.kind.name == "F":
                assert cell.start_s >= ends[stage - 1][cell.action] + 0.25


def test_times_must_be_one_a_stage():
    with pytest.raises(ValueError, match="2 times for 3 stages"):
        simulate(gpipe(3, 1), [1.0, 1.0], 1.0)

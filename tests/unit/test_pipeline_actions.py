"""Actions and orders as text."""

import pytest

from hpc_train.pipeline.actions import Action, Kind, count_micro_batches, parse, parse_action, placement
from hpc_train.pipeline.schedules import zb_v


def test_an_action_is_written_as_pytorch_writes_it():
    assert str(Action(12, Kind.I, 345)) == "12I345"
    assert parse_action("3W0") == Action(3, Kind.W, 0)


def test_parse_is_the_inverse_of_the_text_of_actions():
    order = zb_v(4, 12)
    assert parse("\n".join(" ".join(map(str, row)) for row in order)) == order


@pytest.mark.parametrize(
    "word", ["0X1", "F1", "0F", "0F-1", "0F1 ", "0f1", "", "0F1x", "0F9999999999", "०F1"]
)
def test_what_is_no_action(word):
    with pytest.raises(ValueError, match=r"is not an action: write for instance 0F3, 0B3, 0I3 or 0W3"):
        parse_action(word)


def test_numbers_of_micro_batches_and_places_of_chunks():
    order = parse("0F0 3F0\n1F0 2F0 1F4")
    assert count_micro_batches(order) == 5
    assert placement(order) == [0, 1, 1, 0]
    assert (count_micro_batches([[], []]), placement([[], []])) == (0, [])

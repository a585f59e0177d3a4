"""The drawing of an order on the terminal."""

from hpc_train.pipeline import drawing, schedules
from hpc_train.pipeline.drawing import draw
from hpc_train.pipeline.schedules import gpipe, interleaved, one_f_one_b, zb_h1, zb_v


def test_one_f_one_b_with_backward_twice_as_long():
    assert draw(one_f_one_b(2, 3)).splitlines() == [
        "stage 0  F0 F1 .  .  B0=== F2 B1=== .  B2===",
        "stage 1  .  F0 B0=== F1 B1=== F2 B2=== .  .",
        "time runs to the right, .: idle",
        "F3: forward of micro-batch 3, B3: its backward (2 x as long)",
    ]


def test_gpipe_with_equal_times():
    assert draw(gpipe(3, 4), columns=(1, 1, 0)).splitlines()[:3] == [
        "stage 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3",
        "stage 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .",
        "stage 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .",
    ]


def test_the_halves_of_a_backward():
    assert draw(zb_h1(2, 2)).splitlines() == [
        "stage 0  F0 F1 .  B0=== B1===",
        "stage 1  .  F0 I0 F1 I1 W0 W1",
        "time runs to the right, .: idle",
        "F3: forward of micro-batch 3, B3: its backward (2 x as long), "
        "I3 and W3: backward for the input and for the weights",
    ]


def test_several_chunks_a_stage_are_named():
    assert draw(zb_v(2, 1)).splitlines() == [
        "stage 0  0F0 .   .   3F0 3I0 3W0 .   .   0B0====",
        "stage 1  .   1F0 2F0 .   .   2I0 2W0 1I0 1W0 .",
        "time runs to the right, .: idle",
        "2F3: forward of micro-batch 3 through chunk 2, 2B3: its backward (2 x as long), "
        "2I3 and 2W3: backward for the input and for the weights",
    ]
    assert draw(interleaved(2, 2)).splitlines()[0] == (
        "stage 0  0F0 0F1 2F0 2F1 .   .   2B0==== .   2B1==== 0B0==== 0B1===="
    )


def test_the_drawings_in_docstrings():
    for order in (one_f_one_b(3, 4), zb_h1(3, 4)):
        for line in draw(order).splitlines()[:3]:
            assert line in schedules.__doc__
    for line in draw(one_f_one_b(2, 3)).splitlines()[:2]:
        assert line in drawing.__doc__


def test_a_long_order_keeps_its_beginning_and_its_end():
    *rows, time, _ = draw(one_f_one_b(12, 100), width=100).splitlines()
    assert len(rows) == 12
    assert max(map(len, rows)) <= 100
    assert rows[0].startswith("stage 0   F0  F1  F2")
    assert rows[0].endswith("B99====")
    assert rows[-1].startswith("stage 11  .   .")
    assert all("~" in row for row in rows)
    assert time.endswith("~: left out")


def test_of_many_stages_the_first_and_the_last_are_drawn():
    rows = draw(one_f_one_b(100, 3)).splitlines()[:-2]
    assert len(rows) == 24
    assert [row.split()[:2] for row in rows[18:21]] == [["stage", "18"], ["..."], ["stage", "96"]]
    assert rows[-1].startswith("stage 99")


def test_nothing_to_do():
    assert draw(gpipe(2, 0)).splitlines()[:2] == ["stage 0", "stage 1"]

"""The drawing of an order."""

from hpc_train.pipeline.drawing import draw
from hpc_train.pipeline.schedules import gpipe, one_f_one_b


def test_one_f_one_b_with_backward_twice_as_long():
    assert draw(one_f_one_b(2, 3)).splitlines() == [
        "stage 0  F0 F1 .  .  B0=== F2 B1=== .  B2===",
        "stage 1  .  F0 B0=== F1 B1=== F2 B2=== .  .",
        "time runs to the right; F3: forward of micro-batch 3, B3: its backward (2 x as long), .: idle",
    ]


def test_gpipe_with_equal_times():
    assert draw(gpipe(3, 4), forward=1, backward=1).splitlines()[:3] == [
        "stage 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3",
        "stage 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .",
        "stage 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .",
    ]


def test_a_long_order_keeps_its_beginning_and_its_end():
    *rows, legend = draw(one_f_one_b(12, 100), width=100).splitlines()
    assert len(rows) == 12
    assert max(map(len, rows)) <= 100
    assert rows[0].startswith("stage 0   F0  F1  F2")
    assert rows[0].endswith("B99====")
    assert rows[-1].startswith("stage 11  .   .")
    assert all("~" in row for row in rows)
    assert legend.endswith("~: left out")


def test_nothing_to_do():
    assert draw(gpipe(2, 0)).splitlines()[:2] == ["stage 0", "stage 1"]

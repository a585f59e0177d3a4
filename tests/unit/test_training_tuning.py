"""Which ways to sum are tried."""

from hpc_train.config import GradientSettings
from hpc_train.coordinator.plan import TRIALS
from hpc_train.training.tuning import describe, ways_to_try


def test_the_settings_as_they_are_come_first():
    settings = GradientSettings(wire="fp16", bucket_bytes="2MiB", tune_wires=("int8",))
    first, *others = ways_to_try(settings)
    assert first == settings
    assert {(way.wire, way.bucket_bytes >> 20) for way in others} == {
        *(("fp16", size) for size in (1, 4, 16, 64)),
        *(("int8", size) for size in (1, 2, 4, 16, 64)),
    }


def test_only_wires_that_the_user_allows_are_tried():
    assert {way.wire for way in ways_to_try(GradientSettings())} == {"fp32"}


def test_a_plan_has_room_for_all_of_them():
    settings = GradientSettings(bucket_bytes="3MiB", tune_wires=("fp16", "bf16", "int8"))
    assert len(ways_to_try(settings)) == TRIALS


def test_what_was_tried_is_told_in_one_line():
    ways = ways_to_try(GradientSettings(tune_wires=("fp16",)))[:2]
    line = describe(ways, (0.2, 0.1), 1)
    assert line == (
        "gradients tuned: 1 MiB fp32 from now on; a step took with 1 MiB fp32 100 ms, 4 MiB fp32 200 ms"
    )

"""Which ways to sum are tried."""

from hpc_train.config import GradientSettings
from hpc_train.coordinator.plan import TRIALS, Plan
from hpc_train.training.tuning import Tuning, describe, ways_to_try


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


def test_the_way_changes_when_the_plan_says_so_and_the_result_is_told_once():
    taken, told = [], []
    tuning = Tuning(GradientSettings(), 1, taken.append, told.append)
    ways = ways_to_try(GradientSettings())
    times = (0.4, 0.3, 0.2, 0.3) + (0.0,) * (TRIALS - 4)
    for step, trial in enumerate([0] * 5 + [1] * 5 + [2] * 5 + [3] * 5 + [2] * 5, start=1):
        known = times[:trial] + (0.0,) * (TRIALS - trial) if step <= 20 else times
        tuning.follow(Plan(step, 4, (4,), trial=trial, trial_s=known))
    assert taken == [ways[1], ways[2], ways[3], ways[2]]
    assert len(told) == 1
    assert told[0].startswith("gradients tuned: 16 MiB fp32")

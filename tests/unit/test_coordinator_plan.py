"""Plans as records: what is packed comes back, the size depends on the replicas alone."""

import dataclasses

import pytest

from hpc_train.coordinator.plan import REASON_BYTES, TRIALS, Plan

FULL = Plan(
    step=2**40,
    batch_size=100,
    shares=(60, 0, 40),
    learning_rate_scale=0.125,
    save=True,
    stop=True,
    reason="SIGTERM on rank 3 and 2 more",
    trial=3,
    trial_s=tuple(0.1 * i for i in range(TRIALS)),
)


@pytest.mark.parametrize(
    "plan", [FULL, Plan(1, 7, (7,)), Plan(1, 0, ()), Plan(5, 4096, (1,) * 4096, save=True)]
)
def test_what_is_packed_comes_back(plan):
    record = plan.pack()
    assert Plan.unpack(record) == plan
    assert len(record) == Plan.num_bytes(len(plan.shares))


def test_the_size_depends_on_the_number_of_replicas_alone():
    assert len(FULL.pack()) == len(Plan(1, 3, (1, 1, 1)).pack())
    longer = dataclasses.replace(FULL, reason="x" * 1000, shares=(2**40, 0, 0))
    assert len(longer.pack()) == len(FULL.pack())
    assert Plan.num_bytes(4) - Plan.num_bytes(3) == 8


def test_a_long_reason_is_cut():
    back = Plan.unpack(dataclasses.replace(FULL, reason="why " * 100).pack())
    assert back.reason == ("why " * 100)[:REASON_BYTES]


def test_a_reason_is_cut_between_two_characters():
    back = Plan.unpack(dataclasses.replace(FULL, reason="é" * 100 + "x").pack())
    assert back.reason == "é" * (REASON_BYTES // 2)
    back = Plan.unpack(dataclasses.replace(FULL, reason="x" + "é" * 100).pack())
    assert back.reason == "x" + "é" * (REASON_BYTES // 2 - 1)


def test_another_version_is_told():
    with pytest.raises(ValueError, match="version 07, where this program sends version 01"):
        Plan.unpack(b"\x07" + FULL.pack()[1:])


@pytest.mark.parametrize("cut", [0, 10, -1])
def test_a_record_of_another_size_is_told(cut):
    record = FULL.pack()[:cut]
    with pytest.raises(ValueError, match=f"a plan of {len(record)} bytes.*different versions of hpc_train"):
        Plan.unpack(record)


def test_the_next_draft_keeps_all_but_what_was_for_this_step_alone():
    following = FULL.following()
    assert following == Plan(
        FULL.step + 1, 100, (60, 0, 40), learning_rate_scale=0.125, trial=3, trial_s=FULL.trial_s
    )

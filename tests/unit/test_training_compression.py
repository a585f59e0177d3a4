"""Settings become a way to sum, and what it remembers goes through checkpoints onto any grid."""

import pytest
import torch
from checkpoints import assert_same_bits
from shards import on_ranks, settings, state

from hpc_train.comm.interface import Wire
from hpc_train.config import Settings
from hpc_train.gradients.bucket_sum import Whole
from hpc_train.gradients.powersgd import PowerSGD
from hpc_train.training.compression import sum_method

pytestmark = pytest.mark.usefixtures("threads_as_before")

POWERSGD = {"compression": "powersgd", "powersgd_rank": 2, "powersgd_warm_up_steps": 0}
INT8 = {"wire": "int8"}


@pytest.mark.parametrize(
    ("gradients", "method"),
    [
        ({}, Whole(Wire.FP32)),
        ({"wire": "fp16"}, Whole(Wire.FP16)),
        ({"wire": "int8"}, Whole(Wire.INT8, feedback=True)),
        ({"wire": "int8", "error_feedback": False}, Whole(Wire.INT8)),
        ({"wire": "bf16", "error_feedback": True}, Whole(Wire.BF16, feedback=True)),
        ({"compression": "powersgd"}, PowerSGD(16, 100, Wire.FP32, True, 7)),
        (
            {"wire": "fp16", "error_feedback": False, **POWERSGD},
            PowerSGD(2, 0, Wire.FP16, False, 7),
        ),
    ],
)
def test_settings_say_how_buckets_are_summed(gradients, method):
    assert sum_method(Settings(task="x", seed=7, gradients=gradients)) == method


def test_a_sharded_optimizer_wants_shards():
    assert sum_method(Settings(task="x", optimizer={"sharded": True})) == Whole(sharded=True)


def saved_and_gone_on(directory):
    def body(run):
        run.train(3).save(directory)
        run.train(2)

    return body


@pytest.mark.parametrize("gradients", [INT8, POWERSGD, {**INT8, **POWERSGD}])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_resumed_run_ends_with_the_bits_of_the_unbroken_one(tmp_path, gradients, num_ranks):
    chosen = settings(False, **gradients)
    unbroken = state(num_ranks, saved_and_gone_on(tmp_path), chosen)
    owed = [tensor for name, tensor in unbroken.items() if name.startswith("residual/")]
    assert any(bool(tensor.any()) for tensor in owed)
    assert any(name.startswith("powersgd/") for name in unbroken) is ("compression" in gradients)
    assert_same_bits(state(num_ranks, lambda run: run.load(tmp_path).train(2), chosen), unbroken)


@pytest.mark.parametrize("gradients", [INT8, POWERSGD])
@pytest.mark.parametrize(("num_ranks", "stages"), [(4, 1), (4, 2), (2, 1)])
def test_another_grid_takes_over_what_is_owed(tmp_path, gradients, num_ranks, stages):
    before = state(3, lambda run: run.train(3).save(tmp_path), settings(False, **gradients))
    after = state(num_ranks, lambda run: run.load(tmp_path), settings(False, stages=stages, **gradients))
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        # a total that is divided and summed again
        torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-9, msg=name)


def test_a_checkpoint_without_residuals_begins_with_zeros(tmp_path):
    on_ranks(2, lambda run: run.train(2).save(tmp_path), settings(False))
    loaded = state(2, lambda run: run.load(tmp_path), settings(False, **INT8))
    owed = [tensor for name, tensor in loaded.items() if name.startswith("residual/")]
    assert owed
    assert not any(bool(tensor.any()) for tensor in owed)


def test_residuals_are_left_where_nobody_wants_them(tmp_path):
    on_ranks(2, lambda run: run.train(2).save(tmp_path), settings(False, **INT8))
    loaded = state(2, lambda run: run.load(tmp_path), settings(False))
    assert not any(name.startswith("residual/") for name in loaded)
    assert any(name.startswith("optimizer/") for name in loaded)


def test_a_basis_of_another_rank_begins_anew(tmp_path):
    on_ranks(2, lambda run: run.train(2).save(tmp_path), settings(False, **POWERSGD))
    other = settings(False, **{**POWERSGD, "powersgd_rank": 3})
    loaded = state(2, lambda run: run.load(tmp_path).train(1), other)
    assert {t.shape[1] for name, t in loaded.items() if name.startswith("powersgd/")} == {3}


def test_what_wires_lose_is_known_to_all_ranks():
    """Over 3 replicas, two of which are poisoned: each of their values counts where it is encoded."""

    def body(run):
        run.train(1)
        run.backward(factor=float("inf") if run.worker.place.replica else 1.0)
        run.train(1)
        return run.outcomes

    for outcomes in on_ranks(3, body, settings(False, wire="fp16")):
        assert [outcome.overflows > 0 for outcome in outcomes] == [False, True, False]
        assert [outcome.finite for outcome in outcomes] == [True, False, True]


def test_sums_are_told_in_words():
    def about(chosen, num_ranks=2):
        return on_ranks(num_ranks, lambda run: run.worker.about_sums(), chosen)[0]

    (line, *_) = about(settings(False, wire="int8"))
    assert line.startswith("gradient sums: int8 wire with error feedback, 0.0")
    assert line.endswith(" buckets")
    assert "int8 wire without error feedback" in about(settings(False, **INT8, error_feedback=False))[0]
    assert "PowerSGD of rank 2 on the fp32 wire, with error feedback" in about(settings(False, **POWERSGD))[0]
    assert about(settings(False), num_ranks=1) == []


def test_times_of_sums_are_known():
    def body(run):
        run.train(1)
        return run.worker.sum_times()

    for times in on_ranks(2, body, settings(False)):
        assert times["gradient_sum_s"] > 0
        assert times["exposed_comm_s"] > 0
        assert times["hidden_share"] == max(0.0, 1 - times["exposed_comm_s"] / times["gradient_sum_s"])
    (times,) = on_ranks(1, body, settings(False))
    assert times["gradient_sum_s"] == 0.0
    assert times["hidden_share"] is None

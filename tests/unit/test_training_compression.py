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


def owed_in(tensors):
    return {name.removeprefix("residual/"): t for name, t in tensors.items() if name.startswith("residual/")}


def owed_in_saved(directory, **gradients):
    return owed_in(on_ranks(3, lambda run: run.train(3).save(directory), settings(False, **gradients))[0])


def gradients_now(run):
    """Of the same samples and parameters whenever it is called, as nothing is updated."""
    run.backward()
    run.worker.complete_gradients()
    return {name: p.grad.clone() for name, p in run.worker.reducer.named.items()}


def assert_paid_once(run, owed):
    """The next gradient has all that is owed, the one after it nothing of it."""
    assert any(bool(tensor.any()) for tensor in owed.values())
    first, second = gradients_now(run), gradients_now(run)
    for name, gradient in first.items():
        torch.testing.assert_close(gradient, second[name] + owed[name], rtol=1e-5, atol=1e-6, msg=name)
    assert run.worker.reducer.settle() == {}


@pytest.mark.parametrize("gradients", [INT8, POWERSGD])
@pytest.mark.parametrize(("num_ranks", "sharded"), [(1, False), (2, False), (2, True)])
def test_what_is_owed_goes_into_one_gradient_where_sums_keep_no_residual(
    tmp_path, gradients, num_ranks, sharded
):
    """It was dropped, on one replica without a word."""
    owed = owed_in_saved(tmp_path, **gradients)
    on_ranks(
        num_ranks, lambda run: assert_paid_once(run.load(tmp_path), owed), settings(sharded, wire="fp32")
    )


def test_one_replica_of_the_same_settings_pays_too(tmp_path):
    """They say int8, but one replica makes no sums."""
    owed = owed_in_saved(tmp_path, **INT8)
    on_ranks(1, lambda run: assert_paid_once(run.load(tmp_path), owed), settings(False, **INT8))


def test_what_is_owed_goes_into_one_gradient_when_the_wire_is_changed():
    """As `gradients.tune` does: from int8 over fp32, which owes nothing, back and forth."""

    def body(run):
        run.train(3)
        owed = {name: total.clone() for name, total in run.worker.reducer.settle().items()}
        for wire in ("fp32", "int8", "fp32"):
            run.worker.sum_by(settings(False, wire=wire, bucket_bytes=10_000).gradients)
        assert_paid_once(run, owed)

    on_ranks(2, body, settings(False, **INT8))


def test_what_is_owed_is_saved_again_until_it_is_paid(tmp_path):
    owed = owed_in_saved(tmp_path, **INT8)
    assert_same_bits(owed_in(state(2, lambda run: run.load(tmp_path), settings(False))), owed)

    def skipped(run):
        run.load(tmp_path).train(1, factor=float("inf"))
        assert not run.outcomes[-1].finite

    assert_same_bits(owed_in(state(2, skipped, settings(False))), owed)
    assert not owed_in(state(2, lambda run: run.load(tmp_path).train(1), settings(False)))


@pytest.mark.parametrize("gradients", [INT8, POWERSGD, {**INT8, **POWERSGD}])
@pytest.mark.parametrize("factor", [1e30, float("inf")])
def test_nothing_of_a_skipped_step_is_in_later_ones(gradients, factor):
    """Gradients of 1e30 have an infinite norm; what rounding left of them, 1e27, came into the next step."""

    def body(run):
        run.train(2).train(1, factor)
        assert not run.outcomes[-1].finite
        run.train(1)
        return run.outcomes[-1]

    plain, *_ = on_ranks(2, body, settings(False))
    for outcome in on_ranks(2, body, settings(False, **gradients)):
        assert outcome.finite
        assert outcome.grad_norm < 2 * plain.grad_norm


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

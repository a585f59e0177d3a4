"""The judge of parity: what it keeps, what it calls equal, and that it notices when something is wrong."""

import json
import math
from dataclasses import replace

import pytest
import torch

from hpc_train.comm.loopback import run_ranks
from hpc_train.config import Settings
from hpc_train.errors import UserError
from hpc_train.grid import Grid
from hpc_train.tasks.regression import Regression
from hpc_train.training.layout import Layout
from hpc_train.training.parity import (
    Difference,
    Tolerance,
    _Judge,
    compare,
    relative,
    render,
    tolerances,
)
from hpc_train.training.worker import Worker

NAN = math.nan
LIMITS = {"loss": Tolerance(1e-3, "why"), "gradients": Tolerance(1e-2, "because")}
TASK = Regression(samples=40, inputs=3, hidden=8, depth=3)


def settings(**sections):
    small = {"batch": {"size": 10, "micro_batch": 3}, "train": {"threads": 1, "steps": 5}}
    return Settings(task="regression", **{**small, **sections})


def largest(differences):
    judge = _Judge(LIMITS)
    for step, difference in enumerate(differences):
        judge.see("loss", difference, f"step {step}")
    return judge.differences[0]


def test_the_largest_difference_is_kept_with_its_place():
    kept = largest([1e-6, 3e-4, 1e-5])
    assert (kept.largest, kept.where) == (3e-4, "step 1")
    assert kept.holds
    assert not largest([1e-6, 2e-3, 0.0]).holds


@pytest.mark.parametrize("differences", [[NAN, 1e-6, 1e-6], [1e-6, NAN, 1e-6], [1e-6, 1e-6, NAN], [NAN, NAN]])
def test_a_difference_that_is_no_number_is_not_forgotten(differences):
    """A NaN of an early step was once replaced by the next step's number, and parity seemed to hold."""
    kept = largest(differences)
    assert math.isnan(kept.largest)
    assert kept.where == f"step {[math.isnan(d) for d in differences].index(True)}"
    assert not kept.holds


def test_what_was_never_seen_does_not_hold():
    differences = _Judge(LIMITS).differences
    assert [d.quantity for d in differences] == ["loss", "gradients"]
    assert not any(d.holds for d in differences)
    assert differences[0].where == "never seen"


def test_exactly_the_limit_holds():
    assert Difference("loss", 1e-3, "step 1", LIMITS["loss"]).holds


@pytest.mark.parametrize("number", [NAN, math.inf])
def test_json_gets_null_for_what_is_not_finite(number):
    difference = Difference("loss", number, "step 1", LIMITS["loss"])
    tolerance = {"limit": 1e-3, "reason": "why"}
    assert json.loads(json.dumps(difference.as_dict(), allow_nan=False)) == {
        "quantity": "loss",
        "largest": None,
        "where": "step 1",
        "tolerance": tolerance,
        "holds": False,
    }


@pytest.mark.parametrize(
    ("distance", "size", "expected"), [(1, 4, 0.25), (0, 0, 0), (0, 4, 0), (1e-30, 0, math.inf)]
)
def test_relative(distance, size, expected):
    assert relative(distance, size) == expected


def seen_tensors(got, expected):
    judge = _Judge(LIMITS)
    judge.see_tensors("gradients", got, expected, "step 1")
    return judge.differences[1]


def test_each_tensor_is_measured_by_its_own_norm():
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([100.0])}
    seen = seen_tensors({"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([101.0])}, expected)
    assert seen.largest == pytest.approx(0.5 / 5)
    assert seen.where == "step 1, a"


def test_a_gradient_that_is_zero_but_for_rounding_is_measured_by_a_thousandth_of_the_whole():
    expected = {"bias": torch.tensor([1e-9]), "weight": torch.tensor([10.0])}
    seen = seen_tensors({"bias": torch.tensor([3e-9]), "weight": torch.tensor([10.0])}, expected)
    assert seen.largest == pytest.approx(2e-9 / 1e-2)


def test_gradients_that_are_all_zero_are_equal():
    zero = {"a": torch.zeros(2)}
    assert seen_tensors(zero, zero).largest == 0
    assert seen_tensors({"a": torch.ones(2)}, zero).largest == math.inf


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"]])
def test_a_tensor_on_one_side_only_does_not_hold(names):
    expected = {"a": torch.ones(1), "b": torch.ones(1)}
    seen = seen_tensors({name: torch.ones(1) for name in names}, expected)
    assert not seen.holds
    assert seen.where == f"step 1: only one side has {'b' if 'b' not in names else 'c'}"


def test_tensors_are_measured_together():
    judge = _Judge(LIMITS)
    expected = {"a": torch.tensor([[3.0]]), "b": torch.tensor([0.0, 4.0])}
    judge.see_together(
        "loss", {"b": torch.tensor([0.0, 4.0]), "a": torch.tensor([[3.5]])}, expected, "step 2"
    )
    assert judge.differences[0].largest == pytest.approx(0.1)
    judge = _Judge(LIMITS)
    zero = {"a": torch.zeros(2)}
    judge.see_together("loss", zero, zero, "step 1")  # a learning rate of zero moves nothing on either side
    assert judge.differences[0].largest == 0


def test_tolerances_are_wider_where_the_reason_says_so():
    fp32, fp16 = settings(), settings(gradients={"wire": "fp16"})
    for chosen in (fp32, fp16):
        assert list(tolerances(chosen)) == ["loss", "gradients", "parameters"]
        assert all(limit.reason for limit in tolerances(chosen).values())
    for quantity in ("loss", "gradients"):
        assert tolerances(fp32)[quantity].limit < tolerances(fp16)[quantity].limit
    assert "2^-11" in tolerances(fp16)["gradients"].reason
    adamw, sgd = tolerances(fp32)["parameters"], tolerances(settings(optimizer={"name": "sgd"}))["parameters"]
    assert sgd.limit < adamw.limit
    assert "AdamW" in adamw.reason
    assert "AdamW" not in sgd.reason


def test_the_table():
    differences = [
        Difference("loss", 2e-7, "step 3", LIMITS["loss"]),
        Difference("gradients", NAN, "step 1, layers.0.weight", LIMITS["gradients"]),
    ]
    assert render(settings(), Grid(2, 3), 5, differences).splitlines() == [
        "2 replicas x 3 stages against plain PyTorch: 5 steps of 10 samples, fp32 wire, 1f1b",
        "largest relative difference of         is   allowed",
        "loss                              2.0e-07   1.0e-03  holds, at step 3",
        "    allowed because: why",
        "gradients                             nan   1.0e-02  FAILS, at step 1, layers.0.weight",
        "    allowed because: because",
    ]


def compared(chosen, num_ranks, **more):
    """Rank 0's differences; the others have none."""
    first, *others = run_ranks(
        num_ranks, lambda world: compare(chosen, TASK, world, Layout(chosen, TASK, world), 3, **more)
    )
    assert others == [None] * (num_ranks - 1)
    return {difference.quantity: difference for difference in first}


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize(
    ("replicas", "stages", "wire"), [(1, 1, "fp32"), (3, 1, "fp16"), (1, 4, "fp32"), (2, 2, "fp32")]
)
def test_grids_hold_in_one_process(replicas, stages, wire):
    chosen = settings(grid={"stages": stages}, gradients={"wire": wire}, optimizer={"clip_norm": 0.1})
    seen = []
    differences = compared(chosen, replicas * stages, progress=seen.append)
    assert all(difference.holds for difference in differences.values()), differences
    assert sorted(seen) == sorted([1, 2, 3] * replicas * stages)


COMPRESSED = {
    "bf16": {"wire": "bf16"},
    "bf16 with feedback": {"wire": "bf16", "error_feedback": True},
    "int8": {"wire": "int8"},
    "warm-up of PowerSGD": {"compression": "powersgd", "powersgd_warm_up_steps": 3},
    "and in fp16": {"compression": "powersgd", "powersgd_warm_up_steps": 3, "wire": "fp16"},
}


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize("gradients", COMPRESSED.values(), ids=COMPRESSED.keys())
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_every_compression_holds_within_its_own_tolerance(gradients, optimizer):
    chosen = settings(gradients=gradients, optimizer={"name": optimizer, "clip_norm": 0.1})
    differences = compared(chosen, 3)
    assert all(difference.holds for difference in differences.values()), differences
    if "wire" in gradients:  # and they did travel in few bits
        assert differences["gradients"].largest > 1e-5


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        ({"local_steps": 4}, "gradients.local_steps=4 each replica has its own"),
        ({"compression": "powersgd", "powersgd_warm_up_steps": 2}, "of 3 steps, but PowerSGD sends"),
    ],
)
def test_what_is_no_gradient_of_the_step_is_refused(gradients, words):
    chosen = settings(gradients=gradients)

    def body(world):
        with pytest.raises(UserError, match=words) as caught:
            compare(chosen, TASK, world, Layout(chosen, TASK, world), 3)
        return "\n" not in str(caught.value)

    assert all(run_ranks(2, body))


@pytest.mark.usefixtures("threads_as_before")
def test_shares_may_differ():
    differences = compared(settings(), 3, shares=(7, 0, 3))
    assert all(difference.holds for difference in differences.values()), differences


def wrong_loss(worker, outcome):
    return replace(outcome, loss=outcome.loss * 1.001)


def wrong_gradients(worker, outcome):
    for gradient in worker.gradients():
        gradient.mul_(1.001)
    return outcome


def one_wrong_gradient(worker, outcome):
    if worker.place == (0, 1):
        worker.gradients()[-1].mul_(1.001)
    return outcome


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize(
    ("spoil", "fails"),
    [(wrong_loss, "loss"), (wrong_gradients, "gradients"), (one_wrong_gradient, "gradients")],
)
def test_what_is_wrong_by_a_thousandth_is_noticed(monkeypatch, spoil, fails):
    plain = Worker.backward
    monkeypatch.setattr(Worker, "backward", lambda self, *args: spoil(self, plain(self, *args)))
    assert not compared(settings(grid={"stages": 2}), 4)[fails].holds


@pytest.mark.usefixtures("threads_as_before")
def test_a_wrong_update_is_noticed(monkeypatch):
    plain = Worker.update
    monkeypatch.setattr(Worker, "update", lambda self, outcome, rate: plain(self, outcome, rate * 1.05))
    differences = compared(settings(grid={"stages": 2}), 4)
    assert not differences["parameters"].holds

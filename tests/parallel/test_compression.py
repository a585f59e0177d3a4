"""Runs that send less than their gradients: lossy wires, PowerSGD, local SGD, as a user meets them."""

import json
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "regression.toml"
SMALL = [
    "task_options.hidden=64",
    "batch.micro_batch=8",
    "train.steps=8",
    "train.evaluate_every=0",
    "checkpoint.every=4",
]
POWERSGD = ["gradients.compression=powersgd", "gradients.powersgd_warm_up_steps=2"]
# Through Gloo every rank sends, while MPI rounds nothing inside one host.
INT8 = ["gradients.wire=int8", "comm.backend=gloo"]


def train(mpirun, num_ranks, run_dir, *more):
    command = ["-m", "hpc_train", "train", EXAMPLE, *SMALL, *more, "--run-dir", run_dir]
    done = mpirun(num_ranks, command, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}


@pytest.mark.parametrize("sums", [POWERSGD, INT8], ids=["powersgd", "int8"])
def test_a_resumed_run_makes_the_losses_of_the_unbroken_one(mpirun, tmp_path, sums):
    whole, stopped, resumed = tmp_path / "whole", tmp_path / "stopped", tmp_path / "resumed"
    said = train(mpirun, 2, whole, *sums)
    assert "with error feedback" in said
    train(mpirun, 2, stopped, *sums, "--stop-at", "4")
    train(mpirun, 2, resumed, *sums, "--resume", stopped)
    expected = metrics(whole)
    for step, line in metrics(resumed).items():
        assert (line["loss"], line["grad_norm"]) == (expected[step]["loss"], expected[step]["grad_norm"])
    assert sorted(metrics(resumed)) == [5, 6, 7, 8]

    other = tmp_path / "other"
    train(mpirun, 4, other, *sums, "grid.stages=2", "--resume", stopped)
    for step, line in metrics(other).items():
        # 2 stages have other buckets, and so other blocks that round together
        assert line["loss"] == pytest.approx(expected[step]["loss"], rel=1e-2)

    without = tmp_path / "without"
    said = train(mpirun, 2, without, "--resume", stopped)
    assert (
        "what earlier gradient sums left out is added to the next gradient: these keep no residuals" in said
    )


def test_warm_up_counts_from_where_powersgd_began(mpirun, tmp_path):
    """Turned to on a resume, it had no warm-up: steps before it counted, too."""
    plain, resumed = tmp_path / "plain", tmp_path / "resumed"
    train(mpirun, 2, plain)
    with_powersgd = [*POWERSGD, "gradients.powersgd_warm_up_steps=3", "--run-dir", resumed]
    train(
        mpirun,
        2,
        resumed,
        *with_powersgd,
        "--resume",
        plain / "checkpoints" / "step-00000004",
        "--stop-at",
        "6",
    )
    train(mpirun, 2, resumed, *with_powersgd)  # goes on counting
    expected, found = metrics(plain), metrics(resumed)
    whole = {step: line["grad_norm"] == expected[step]["grad_norm"] for step, line in found.items()}
    assert whole == {5: True, 6: True, 7: True, 8: False}


def test_metrics_tell_what_sums_took_hid_and_lost(mpirun, tmp_path):
    train(mpirun, 2, tmp_path / "run", *INT8)
    for line in metrics(tmp_path / "run").values():
        assert line["gradient_sum_s"] > 0
        assert 0 <= line["hidden_share"] <= 1
        assert line["exposed_comm_s"] <= line["comm_s"]
        assert line["wire_overflows"] == 0
        assert line["wire_underflows"] > 0  # what is small beside the largest of its block
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["gradient_sums"][0].startswith("gradient sums: int8 wire with error feedback")


def test_one_replica_has_no_sums_to_tell_of(mpirun, tmp_path):
    train(mpirun, 1, tmp_path / "run", "gradients.wire=int8")
    for line in metrics(tmp_path / "run").values():
        assert line["gradient_sum_s"] == 0
        assert line["hidden_share"] is None
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["gradient_sums"] == []


def test_local_steps_train_one_model(mpirun, tmp_path):
    """Means at steps 3, 6 and before each checkpoint; what is saved is one model of all replicas."""
    local = ["gradients.local_steps=3", "gradients.wire=fp32", "grid.stages=2"]
    said = train(mpirun, 4, tmp_path / "run", *local)
    assert "parameters are averaged" in said
    lines = metrics(tmp_path / "run")
    assert [step for step, line in lines.items() if line["gradient_sum_s"] > 0] == [3, 6]
    assert lines[8]["loss"] < lines[1]["loss"]
    train(mpirun, 2, tmp_path / "resumed", *local[:2], "--resume", tmp_path / "run", "train.steps=12")
    resumed = metrics(tmp_path / "resumed")
    assert sorted(resumed) == [9, 10, 11, 12]
    assert resumed[9]["loss"] == pytest.approx(lines[8]["loss"], rel=0.5)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["gradients.local_steps=4", "gradients.wire=int8"], "gradients.wire=int8: set it to fp32"),
        (["gradients.local_steps=4", "optimizer.sharded=true"], "optimizer.sharded=true"),
    ],
)
def test_settings_that_contradict_each_other_are_one_line(mpirun, tmp_path, more, words):
    done = mpirun(
        2, ["-m", "hpc_train", "train", EXAMPLE, *more, "--run-dir", tmp_path / "run"], timeout_s=60
    )
    assert done.returncode == 2
    told = [line for line in (done.stdout + done.stderr).splitlines() if "error: " in line]
    assert len(told) == 1, told
    assert words in told[0]

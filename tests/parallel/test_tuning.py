"""`gradients.tune` on several ranks: ways are tried, one is kept, the model is that of any other run."""

import json

from test_train import metrics, train

TRIED = ["train.steps=45", "checkpoint.every=0", "gradients.overlap=true"]


def test_ways_are_tried_and_the_result_is_told_once(mpirun, tmp_path):
    plain = mpirun(2, train("regression", *TRIED, "--run-dir", tmp_path / "plain", small=()), timeout_s=120)
    assert plain.returncode == 0, plain.stdout + plain.stderr
    more = ["gradients.tune=true", 'gradients.tune_wires=["fp16"]', "--run-dir", tmp_path / "tuned"]
    env = {"HPC_TRAIN_RANKS_A_HOST": "1"}
    done = mpirun(2, train("regression", *TRIED, *more, small=()), timeout_s=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("gradients tuned:")]
    assert len(told) == 1
    assert told[0].count(" ms") == 8  # 4 bucket sizes, 2 wires
    environment = json.loads((tmp_path / "tuned" / "environment.json").read_text())
    assert environment["gradients_tuned"] == told[0]
    sums = [line for line in done.stdout.splitlines() if line.startswith("gradient sums:")]
    assert len(sums) == 2  # at the start, and as it was chosen
    assert environment["gradient_sums"][0] == sums[1]
    assert told[0].split(" from now on")[0].endswith(sums[1].split()[2])  # the wire
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("plain", "tuned")]
    for one, other in zip(*losses, strict=True):
        assert abs(one - other) <= 0.01 * abs(one) + 1e-3

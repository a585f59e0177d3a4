"""`train --init` under mpirun: weights of one grid's run are what another grid's begins with."""

import pytest
from plain_loss import plain_loss
from test_train import exported, metrics, train

from hpc_train.config import load
from hpc_train.tasks.find import load_task

TIED = ["task_options.tied=true", "train.steps=2", "train.evaluate_every=0", "checkpoint.every=0"]


def test_a_tied_model_goes_from_2_x_2_over_an_export_to_1_x_2_and_to_plain_pytorch(mpirun, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    more = [*TIED, "grid.stages=2", "pipeline.schedule=zb-h1", "--run-dir", first]
    done = mpirun(4, train("bytelm", *more), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    before = exported(first, tmp_path)
    file = tmp_path / "first.safetensors"
    more = [*TIED, "grid.stages=2", "pipeline.schedule=interleaved", "--run-dir", second, "--init", file]
    done = mpirun(2, train("bytelm", *more), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    told = " ".join(done.stdout.split())
    assert "began with the weights in" in told
    settings = load(second / "config.toml")
    task = load_task(settings.task, settings.task_options)
    losses = [[line["loss"] for line in metrics(run)] for run in (first, second)]
    assert losses[1][0] == pytest.approx(plain_loss(settings, task, file), rel=1e-5)
    assert losses[1][0] < losses[0][0]  # the two runs' first batches are the same
    after = exported(second, tmp_path)
    assert after.keys() == before.keys()
    assert any(not after[name].equal(before[name]) for name in before)

"""grid="auto" and pipeline.recompute="auto" under mpirun: measured, chosen, told, trained with, resumed."""

import re

from test_train import exported, metrics, train

from hpc_train.config import load

FEW = ["train.steps=4", "checkpoint.every=2", "train.threads=1"]


def best(done):
    """The grid in the first row of the table that rank 0 tells."""
    return re.search(r"^1 (\d+x\d+) ", done.stderr, re.MULTILINE)[1]


def test_a_grid_left_open_is_chosen_told_trained_with_and_resumed(mpirun, tmp_path):
    run_dir = tmp_path / "run"
    command = train("bytelm", *FEW, "grid=auto", "--run-dir", run_dir)
    done = mpirun(4, [*command, "--stop-at", "2"], timeout_s=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("measuring layers and network") == 1
    settings = load(run_dir / "config.toml")
    stages, replicas = settings.grid.stages, 4 // settings.grid.stages
    assert best(done) == f"{replicas}x{stages}"
    assert settings.grid.auto is False
    assert settings.batch.micro_batch == 3  # which the command gives
    assert sum(settings.pipeline.split) == 6
    assert len(metrics(run_dir)) == 2
    # On as many ranks it goes on as it began: another micro-batch would draw other random numbers.
    done = mpirun(4, command, timeout_s=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stdout
    assert "measuring" not in done.stderr
    assert f"had chosen: {replicas}x{stages} replicas x stages, " in done.stderr
    assert load(run_dir / "config.toml") == settings
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4]
    # The grid that was chosen at last can be asked for, without measuring.
    more = ["--run-dir", run_dir, "--stop-at", "4"]
    done = mpirun(4, ["-m", "hpc_train", "train", run_dir / "config.toml", *more], timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "measuring" not in done.stderr
    assert "nothing to do" in done.stdout
    assert len(exported(run_dir, tmp_path)) > 0


def test_recomputation_left_open_keeps_the_grid_and_is_not_needed_by_a_small_model(mpirun, tmp_path):
    given = ["grid.stages=2", "pipeline.schedule=gpipe", "pipeline.recompute=auto"]
    done = mpirun(4, train("bytelm", *FEW, *given, "--run-dir", tmp_path / "run"), timeout_s=180)
    assert done.returncode == 0, done.stdout + done.stderr
    settings = load(tmp_path / "run" / "config.toml")
    assert settings.pipeline.recompute == "none"
    assert (settings.grid.stages, settings.pipeline.schedule, settings.pipeline.split) == (2, "gpipe", "auto")
    assert best(done) == "2x2"
    assert len(metrics(tmp_path / "run")) == 4


def test_one_sample_a_step_leaves_a_stage_to_each_rank(mpirun, tmp_path):
    more = ["grid=auto", "batch.size=1", "batch.micro_batch=1", "--run-dir", tmp_path / "run"]
    done = mpirun(2, train("bytelm", *FEW, *more), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert load(tmp_path / "run" / "config.toml").grid.stages == 2


def test_a_grid_that_cannot_be_is_one_line_once_before_anything_is_measured(mpirun, tmp_path):
    more = ["grid.stages=2", "pipeline.recompute=auto", "--run-dir", tmp_path / "run"]
    done = mpirun(3, train("bytelm", *FEW, *more), timeout_s=120)
    assert done.returncode == 2, done.stdout + done.stderr
    told = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(told) == 1
    assert "2 stages cannot share 3 ranks evenly" in told[0]
    assert "measuring" not in done.stderr
    assert "Traceback" not in done.stderr

"""The sharded optimizer under mpirun: parity with plain PyTorch, and checkpoints that go on without it."""

import pytest
from test_parity import case, check
from test_train import assert_same_model, exported, metrics, train

SHARDED = "optimizer.sharded=true"
BUCKETS = "gradients.bucket_bytes=48KiB"  # several buckets, of some blocks each


@pytest.mark.parametrize(("replicas", "stages"), [(4, 1), (2, 2), (3, 1)])
def test_parity(mpirun, replicas, stages):
    grid = [SHARDED, BUCKETS, f"grid.stages={stages}", "optimizer.weight_decay=0.1"]
    cases = [
        *(case("bytelm", *grid, f"gradients.wire={wire}") for wire in ("fp32", "fp16")),
        case("bytelm", *grid, "gradients.wire=fp32", "optimizer.name=sgd", "optimizer.clip_norm=0.05"),
        case("bytelm", *grid, "gradients.wire=fp32", "gradients.overlap=false"),
        case("digits", *grid, "gradients.wire=fp32"),
        case("bytelm", *grid, "gradients.wire=fp32", shares=[1, *[0] * (replicas - 1)]),
    ]
    check(mpirun, replicas * stages, cases)


def test_parity_through_torch_distributed(mpirun):
    cases = [
        case("bytelm", SHARDED, BUCKETS, "grid.stages=2", f"gradients.wire={w}") for w in ("fp32", "fp16")
    ]
    check(mpirun, 4, cases, "gloo")


@pytest.fixture(scope="module")
def unbroken(mpirun, tmp_path_factory):
    """Eight steps on 2 x 2, neither sharded nor stopped."""
    run_dir = tmp_path_factory.mktemp("runs") / "unbroken"
    done = mpirun(4, train("bytelm", "grid.stages=2", "--run-dir", run_dir), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


@pytest.mark.parametrize(
    ("first", "then"),
    [((3, 1, "true"), (4, 2, "true")), ((4, 2, "true"), (2, 1, "false")), ((2, 1, "false"), (3, 1, "true"))],
)
def test_resumed_with_other_shards_as_if_never_stopped(mpirun, unbroken, tmp_path, first, then):
    run_dir = tmp_path / "run"
    for (ranks, stages, sharded), stop in ((first, ["--stop-at", "5"]), (then, [])):
        more = [f"grid.stages={stages}", f"optimizer.sharded={sharded}", BUCKETS, "--run-dir", run_dir, *stop]
        done = mpirun(ranks, train("bytelm", *more), timeout_s=120)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stdout
    assert "begins anew" not in done.stdout
    whole = {line["step"]: line["loss"] for line in metrics(unbroken)}
    losses = {line["step"]: line["loss"] for line in metrics(run_dir)}
    assert losses == {step: pytest.approx(whole[step], rel=1e-5) for step in range(1, 9)}
    assert_same_model(exported(run_dir, tmp_path), exported(unbroken, tmp_path))


def test_buckets_may_be_tuned(mpirun, tmp_path):
    """Trials of other buckets move the state with them, also between hosts and on a lossy wire."""
    plain, tuned = tmp_path / "plain", tmp_path / "tuned"
    run = ["train.steps=45", "checkpoint.every=0"]
    done = mpirun(3, train("regression", *run, "--run-dir", plain, small=()), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    more = [*run, SHARDED, "gradients.tune=true", 'gradients.tune_wires=["int8"]', "--run-dir", tuned]
    env = {"HPC_TRAIN_RANKS_A_HOST": "1"}
    done = mpirun(3, train("regression", *more, small=()), timeout_s=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gradients tuned:" in done.stdout
    for one, other in zip(metrics(plain), metrics(tuned), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0.02, abs=2e-3)

"""Runs whose gradients Horovod sums, and what is said where it cannot."""

import json
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["task_options.samples=256", "batch.size=32", "batch.micro_batch=4", "train.evaluate_every=0"]
OWN_LOOP = """
import torch, hpc_train
hpc_train.init("horovod")
torch.manual_seed(hpc_train.rank())
model = torch.nn.Linear(3, 2)
hpc_train.broadcast_parameters(model.state_dict())
optimizer = hpc_train.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
before = model.weight.detach().clone()
model(torch.full((1, 3), 1.0 + hpc_train.rank())).sum().backward()
optimizer.step()
torch.testing.assert_close(model.weight.detach(), before - 0.1 * 1.5)  # the mean of 1 and 2
print("own loop on rank", hpc_train.rank())
"""


def train(run_dir, *more):
    config = EXAMPLES / "regression.toml"
    return ["-m", "hpc_train", "train", config, *SMALL, *more, "--run-dir", run_dir]


def losses(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_with_horovod_is_that_with_mpi(mpirun_horovod, tmp_path):
    settings = ["grid.stages=2", "train.steps=6", "gradients.wire=fp32"]
    for backend in ("horovod", "mpi"):
        more = [*settings, f"comm.backend={backend}"]
        done = mpirun_horovod(4, train(tmp_path / backend, *more), timeout_s=120)
        assert done.returncode == 0, done.stdout + done.stderr
        named = "HOROVOD_STALL_CHECK_TIME_SECONDS" in done.stderr
        assert named == (backend == "mpi"), done.stderr  # Horovod reads its own variables
    assert len(losses(tmp_path / "horovod")) == 6
    for ours, theirs in zip(losses(tmp_path / "mpi"), losses(tmp_path / "horovod"), strict=True):
        assert abs(ours - theirs) < 1e-5 * abs(ours)  # fp32 sums in another order
    environment = json.loads((tmp_path / "horovod" / "environment.json").read_text())
    assert "0.28" in json.dumps(environment)


def test_an_own_loop_with_horovod(mpirun_horovod):
    done = mpirun_horovod(2, ["-c", OWN_LOOP], timeout_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["own loop on rank 0", "own loop on rank 1"]


def test_without_threads_in_mpi_horovod_is_refused(mpirun_horovod, tmp_path):
    level = {"HPC_TRAIN_THREAD_LEVEL": "serialized"}
    done = mpirun_horovod(2, train(tmp_path / "run", "comm.backend=horovod"), env=level)
    assert done.returncode == 2, done.stdout + done.stderr
    told = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    assert "MPI_THREAD_MULTIPLE" in told[0]


def test_settings_of_horovods_users_reach_the_run(mpirun, tmp_path):
    env = {"HOROVOD_FUSION_THRESHOLD": "2048", "HOROVOD_CYCLE_TIME": "5"}
    done = mpirun(2, train(tmp_path / "run", "train.steps=2"), env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("warning: HOROVOD_CYCLE_TIME: no effect with comm.backend=auto") == 1
    assert "bucket_bytes = 2048" in (tmp_path / "run" / "config.toml").read_text()

"""The command `hpc-train train` on several ranks: runs, resumes, stops and failures as a user meets them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = [
    "task_options.context=16",
    "task_options.hidden=32",
    "task_options.blocks=4",
    "task_options.heads=2",
    "batch.size=12",
    "batch.micro_batch=3",
    "optimizer.name=sgd",  # in proportion to gradients, so that curves of two grids stay together
    "optimizer.learning_rate=0.1",
    "optimizer.warmup_steps=2",
    "gradients.wire=fp32",
    "train.steps=8",
    "train.evaluate_every=0",
    "checkpoint.every=4",
]


def train(config="bytelm", *more, small=SMALL):
    return ["-m", "hpc_train", "train", EXAMPLES / f"{config}.toml", *small, *more]


def metrics(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def exported(run_dir, tmp_path):
    out = tmp_path / f"{run_dir.name}.safetensors"
    command = [sys.executable, "-m", "hpc_train", "export", run_dir, out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return load_file(out)


def assert_same_model(one, other):
    assert one.keys() == other.keys()
    for name in one:
        distance = (one[name] - other[name]).norm() / one[name].norm().clamp(min=1e-3)
        assert distance < 1e-4, name  # fp32 sums in another order, as in parity


@pytest.fixture(scope="module")
def unbroken(mpirun, tmp_path_factory):
    """Eight steps on 2 x 2, never stopped."""
    run_dir = tmp_path_factory.mktemp("runs") / "unbroken"
    done = mpirun(4, train("bytelm", "grid.stages=2", "--run-dir", run_dir), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


@pytest.fixture(scope="module")
def stopped(mpirun, tmp_path_factory):
    """The same, saved and stopped after step 5."""
    run_dir = tmp_path_factory.mktemp("runs") / "stopped"
    done = mpirun(4, train("bytelm", "grid.stages=2", "--run-dir", run_dir, "--stop-at", "5"), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4, 5]
    return run_dir


def test_a_run_leaves_what_it_promises(unbroken):
    lines = metrics(unbroken)
    assert [line["step"] for line in lines] == list(range(1, 9))
    wanted = {"time_s", "loss", "samples", "samples_per_s", "learning_rate", "grad_norm"}
    assert wanted | {"compute_s", "wait_s", "comm_s"} <= lines[0].keys()
    assert lines[-1]["loss"] < lines[0]["loss"]
    environment = json.loads((unbroken / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert (unbroken / "config.toml").read_text().startswith("task = ")
    saved = sorted(path.name for path in (unbroken / "checkpoints").iterdir())
    assert saved == ["step-00000004", "step-00000008"]


@pytest.mark.parametrize(("ranks", "stages"), [(4, 2), (4, 1), (4, 4), (1, 1), (6, 2)])
def test_resumed_on_another_grid_as_if_never_stopped(mpirun, unbroken, stopped, tmp_path, ranks, stages):
    run_dir = tmp_path / "resumed"
    more = [f"grid.stages={stages}", "--run-dir", run_dir, "--resume", stopped]
    done = mpirun(ranks, train("bytelm", *more), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stdout
    whole = {line["step"]: line["loss"] for line in metrics(unbroken)}
    losses = {line["step"]: line["loss"] for line in metrics(run_dir)}
    assert sorted(losses) == [6, 7, 8]
    assert losses == {step: pytest.approx(whole[step], rel=1e-5) for step in losses}
    assert_same_model(exported(run_dir, tmp_path), exported(unbroken, tmp_path))


def test_a_stop_before_the_step_that_is_done_does_nothing(mpirun, stopped):
    before = sorted((stopped / "checkpoints").iterdir())
    more = ["grid.stages=2", "--run-dir", stopped, "--stop-at", "3"]
    done = mpirun(4, train("bytelm", *more), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing to do up to step 3: 5 steps are done already" in done.stdout
    assert sorted((stopped / "checkpoints").iterdir()) == before
    assert [line["step"] for line in metrics(stopped) if "loss" in line] == [1, 2, 3, 4, 5]


def test_resume_auto_passes_over_a_broken_checkpoint(mpirun, tmp_path):
    run_dir = tmp_path / "run"
    small = [*SMALL, "checkpoint.every=2", "train.steps=6", "grid.stages=2", "--run-dir", run_dir]
    done = mpirun(2, train("bytelm", "--stop-at", "4", small=small), timeout_s=120)
    assert done.returncode == 0, done.stderr
    victim = next((run_dir / "checkpoints" / "step-00000004").glob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    done = mpirun(2, train("bytelm", small=small), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "step-00000004" in said
    assert "checksum" in said
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4, 5, 6]


def test_an_export_loads_into_the_plain_model_without_mpi(unbroken, tmp_path):
    exported(unbroken, tmp_path)
    program = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from safetensors.torch import load_file\n"
        "from hpc_train.tasks.bytelm import ByteLM\n"
        "task = ByteLM(context=16, hidden=32, blocks=4, heads=2)\n"
        "model = task.plain_model()\n"
        f"model.load_state_dict(load_file({str(tmp_path / 'unbroken.safetensors')!r}))\n"
        "inputs, target = task.dataset('train')[0]\n"
        "print(float(task.loss(model(inputs[None]), target[None])))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 6


@pytest.mark.parametrize(
    ("ranks", "more", "words"),
    [
        (3, ["grid.stages=2"], ["2 stages", "3 ranks"]),
        (2, ["batch.siez=2"], ["batch.siez"]),
        (2, ["grid.stages=1", "batch.size=1", "batch.micro_batch=1"], ["batch.size=1", "2 replicas"]),
        (2, ["grid.stages=2", "pipeline.split=[1, 1]"], ["[1, 1]", "2 layers", "has 6"]),
        (2, ["task_options.text=/no/such/file"], ["/no/such/file"]),
        (2, ["task_options.hiden=3"], ["hiden"]),
    ],
)
def test_a_mistake_is_one_line_once_and_exit_code_2(mpirun, ranks, more, words, tmp_path):
    done = mpirun(ranks, train("bytelm", *more, "--run-dir", tmp_path / "run"), timeout_s=60)
    assert done.returncode == 2, done.stdout + done.stderr
    told = [line for line in (done.stdout + done.stderr).splitlines() if "error: " in line]
    assert len(told) == 1, told
    assert all(word in told[0] for word in words), told
    assert "Traceback" not in done.stderr


FAILING = """
from hpc_train.tasks.regression import Regression

class Failing(Regression):
    def loss(self, output, target):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 4:
            raise ZeroDivisionError("the fourth loss")
        return super().loss(output, target)
"""


def test_an_exception_on_one_rank_ends_all(mpirun, tmp_path):
    task = tmp_path / "failing_task.py"
    task.write_text(FAILING)
    more = [f"task={task}:Failing", "grid.stages=2", "--run-dir", tmp_path / "run"]
    began = time.monotonic()
    done = mpirun(2, train("regression", *more, small=[]), timeout_s=60)
    assert done.returncode == 1
    assert time.monotonic() - began < 50
    assert "ZeroDivisionError: the fourth loss" in done.stderr
    assert "rank 1 of 2 on " in done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_on_any_rank_saves_and_stops(tmp_path, number):
    """One rank is signalled in the middle; all save the same step, end with 75, and resume to the end."""
    run_dir = tmp_path / "run"
    small = [*SMALL, "train.steps=100000", "checkpoint.every=0", "grid.stages=2", "--run-dir", run_dir]
    command = [sys.executable, "-m", "hpc_train", "launch", "-n", "4", *train("bytelm", small=small)[2:]]
    with (tmp_path / "out").open("w+") as out:
        process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=out, start_new_session=True)
        try:
            _wait_for_steps(process, run_dir, 5)
            victim = _ranks_of(process)[2]
            os.kill(victim, number)
            code = process.wait(60)
        finally:
            _kill_all(process)
        out.seek(0)
        text = out.read()
    assert code == 75, text
    assert f"{signal.Signals(number).name} on rank 2" in text
    last = metrics(run_dir)[-1]["step"]
    assert (run_dir / "checkpoints" / f"step-{last:08d}" / "manifest.json").exists()
    command += ["--stop-at", str(last + 2)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, last + 3))


def _wait_for_steps(process, run_dir, steps):
    deadline = time.monotonic() + 60
    file = run_dir / "metrics.jsonl"
    while not (file.exists() and file.read_text().count("\n") >= steps):
        assert process.poll() is None, f"ended with {process.poll()}"
        assert time.monotonic() < deadline, "no steps"
        time.sleep(0.05)


def _ranks_of(process):
    """Process ids by rank."""
    ranks = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        number = child.environ().get("OMPI_COMM_WORLD_RANK")
        if number is not None:
            ranks[int(number)] = child.pid
    return ranks


def _kill_all(process):
    if process.poll() is None:
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.kill()
        process.wait()

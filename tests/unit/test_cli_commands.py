"""The commands on one rank, as a person without a launcher runs them: output and exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hpc_train.config import load
from hpc_train.launch import launcher
from hpc_train.tasks.find import load_task
from hpc_train.training import preview

CONFIG = str(Path(__file__).parents[2] / "examples" / "regression.toml")
SMALL = ["train.steps=4", "task_options.samples=64", "train.evaluate_every=0"]
COMMANDS = ["train", "parity", "plan", "export", "launch", "bench", "doctor"]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch, signals_as_before, threads_as_before):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(hpc_train_here):
    """Runs a command; returns its exit code and what it printed."""
    return hpc_train_here


def test_help_names_every_command(run):
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    listed = out[out.index("Commands:") :]
    assert all(f"\n  {command} " in listed for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: hpc-train {command} ")


@pytest.mark.parametrize("args", [[], ["bench"]])
def test_without_a_command_the_help_page_is_the_answer(run, args):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: hpc-train")


def test_plan_prints_the_preview(run):
    code, out, err = run("plan", CONFIG, "grid.stages=2", "--ranks", "4")
    assert (code, err) == (0, "")
    settings = load(CONFIG, ["grid.stages=2"])
    assert out == preview.preview(settings, load_task(settings.task, settings.task_options), 4) + "\n"
    assert out.startswith("grid: 4 ranks = 2 replicas x 2 stages")


def test_an_interrupt_is_told_by_the_exit_code(run, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(preview, "preview", interrupt)
    assert run("plan", CONFIG) == (130, "", "")


def test_train_stop_resume_and_export(run, tmp_path):
    code, out, _ = run("train", CONFIG, *SMALL, "--stop-at", "2")
    assert code == 0
    assert out.endswith("step 2 of 4; all of it is in runs/regression\n")
    code, out, _ = run("train", CONFIG, *SMALL)
    assert code == 0
    assert "resumed from" in out
    lines = (tmp_path / "runs" / "regression" / "metrics.jsonl").read_text().splitlines()
    assert [step for step in (json.loads(line) for line in lines) if "loss" in step][-1]["step"] == 4
    code, out, err = run("export", "runs/regression", "model.safetensors")
    assert (code, err) == (0, "")
    assert out.startswith("model.safetensors: step 4, ")
    model = load_task("regression", {"samples": 64}).plain_model()
    model.load_state_dict(load_file("model.safetensors"))


def test_a_run_directory_may_be_named_and_an_earlier_run_moved_aside(run, tmp_path):
    for _ in range(2):
        assert run("train", CONFIG, *SMALL, "--run-dir", "a/lr=1", "--resume", "never")[0] == 0
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["lr=1", "lr=1.old-1"]


def test_parity_as_a_table_and_as_json(run):
    code, out, err = run("parity", CONFIG, *SMALL, "--steps", "2")
    assert (code, err) == (0, "")
    assert "1 replicas x 1 stages against plain PyTorch: 2 steps" in out
    assert out.count("holds, at step") == 3
    code, out, err = run("parity", CONFIG, *SMALL, "--steps", "2", "--json")
    records = json.loads(out)
    assert [record["quantity"] for record in records] == ["loss", "gradients", "parameters"]
    assert all(record["holds"] and record["largest"] <= record["tolerance"]["limit"] for record in records)


def test_parity_that_does_not_hold_is_exit_code_1(run, tmp_path):
    (tmp_path / "two_faced.py").write_text(
        "import torch\n"
        "from hpc_train.tasks.regression import Regression\n"
        "class TwoFaced(Regression):\n"
        "    def loss(self, output, target):\n"
        "        return super().loss(output, target) * (1 if len(output) < 64 else 2)\n"
    )
    code, out, _ = run("parity", CONFIG, *SMALL, "task=two_faced.py:TwoFaced", "--steps", "1")
    assert code == 1
    assert "FAILS" in out


def test_launch_passes_the_command_on_as_it_is(run, monkeypatch):
    started = []

    def start(*args):
        started.append(args)
        return 75

    monkeypatch.setattr(launcher, "launch", start)
    args = ["train", CONFIG, "grid.stages=2", "--run-dir", "runs/lr=0.1", "--resume", "auto"]
    assert run("launch", "-n", "4", "--hosts", "a:2,b:2", *args) == (75, "", "")
    assert started == [(4, "a:2,b:2", args, None)]


def test_help_of_a_launched_command_is_shown_once_and_starts_nothing(run, monkeypatch):
    monkeypatch.setattr(launcher, "launch", lambda *args: pytest.fail("started"))
    code, out, _ = run("launch", "-n", "4", "train", "--help")
    assert code == 0
    assert out.startswith("Usage: hpc-train train ")


@pytest.mark.parametrize(
    ("args", "code"), [(["--help"], 0), (["plan", CONFIG, "--ranks", "2"], 0), (["plan"], 2)]
)
def test_the_module_is_the_command(args, code):
    done = subprocess.run(
        [sys.executable, "-m", "hpc_train", *args], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert bool(done.stdout) is (code == 0)


def test_a_resume_in_another_order_is_told(run):
    run("train", CONFIG, *SMALL, "--stop-at", "1")
    code, out, _ = run("train", CONFIG, *SMALL, "seed=5", "--stop-at", "2")
    assert code == 0
    assert "warning: seed was 0 and is 5: this epoch goes on in another order" in out
    _, out, _ = run("train", CONFIG, *SMALL, "seed=5")
    assert "warning" not in out


def test_an_earlier_run_that_is_set_aside_is_told(run):
    run("train", CONFIG, *SMALL)
    code, out, _ = run("train", CONFIG, *SMALL, "--resume", "never")
    assert code == 0
    assert "an earlier run was moved to runs/regression.old-1" in out


@pytest.mark.parametrize("name", ["metrics.jsonl", "model.pt"])
def test_export_leaves_other_files_alone(run, name):
    run("train", CONFIG, *SMALL)
    precious = Path(name)
    precious.write_text("precious")
    code, _, err = run("export", "runs/regression", name)
    assert code == 2
    assert err.startswith(f"error: {name} is there")
    assert precious.read_text() == "precious"

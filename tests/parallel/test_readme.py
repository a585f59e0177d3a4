"""What README and the guides tell people to type is run here, as it stands there, with training cut short."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.config import Settings, load

TOP = Path(__file__).parents[2]
README = (TOP / "README.md").read_text()
GUIDE = (TOP / "docs" / "gradients.md").read_text()
PIPELINES = (TOP / "docs" / "pipelines.md").read_text()
FEW_STEPS = ["train.steps=2", "task_options.text=my.txt", "checkpoint.every=1"]
SMALL = {
    "examples/bytelm.toml": ["task_options.text=my.txt", "task_options.context=16", "task_options.hidden=32"],
    "examples/digits.toml": ["task_options.channels=8"],
    "examples/regression.toml": ["task_options.samples=256"],
    "planned.toml": [],  # which the guide makes of one of these
    "examples/translate.toml": ["task_options.hidden=32", "task_options.samples=1"],
}
SETTING = re.compile(
    r"(?<![\w/])(grid|batch|train|optimizer|gradients|pipeline|checkpoint|data|comm)\.(?!md\b)([a-z_]+)\b(?!\()"
)
# After 4 passes on each of 2 ranks, with gradients 1 and 2: each weight has moved by 4 times their mean.
OWN_LOOP = """
import torch, hpc_train
hpc_train.init()
model = torch.nn.Linear(3, 2)
hpc_train.broadcast_parameters(model.state_dict())
before = model.weight.detach().clone()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{}
for _ in range(4):
    model(torch.full((1, 3), 1.0 + hpc_train.rank())).sum().backward()
optimizer.step()
torch.testing.assert_close(model.weight.detach(), before - 0.1 * 4 * 1.5)
"""


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text):
    lines = "".join(blocks(text, "sh")).splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.partition("#")[0].strip()]


def run(args, cwd, env=None):
    return subprocess.run(
        args,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        encoding="utf-8",
        errors="replace",  # a sample of a model that has learned nothing
        timeout=240,
        stdin=subprocess.DEVNULL,
    )


def clone(path):
    """Make of `path` a directory as after a clone, with a text of one's own."""
    (path / "examples").symlink_to(TOP / "examples")
    (path / "my.txt").write_text("".join(f"{i} bottles hang on the wall. " for i in range(400)))
    return path


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return clone(tmp_path_factory.mktemp("clone"))


def test_every_hpc_train_command_runs(where):
    ours = [shlex.split(line) for line in commands(README) if line.startswith("hpc-train ")]
    assert {"train", "parity", "plan", "export", "bench", "doctor"} <= {
        word for args in ours for word in args
    }
    for args in ours:
        few = FEW_STEPS if "train" in args else ["--steps", "1"] if "parity" in args else []
        at = args.index("--run-dir") if "--run-dir" in args else len(args)
        done = run([sys.executable, "-m", "hpc_train", *args[1:at], *few, *args[at:]], where)
        # the doctor may find that ranks outnumber cores, and says so with code 1
        assert done.returncode == 0 or "doctor" in args, f"{args}: {done.stdout}{done.stderr}"
        assert done.stdout.strip(), args
    lines = (where / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "samples_per_s" in line] == [1, 2]
    assert (where / "runs" / "mine" / "checkpoints" / "step-00000002" / "manifest.json").exists()


def test_the_lines_of_plain_pytorch_load_the_export(where):
    """After the commands above: model.safetensors is what `export` left."""
    (program,) = blocks(README, "python")
    done = run([sys.executable, "-c", "import sys; sys.modules['mpi4py'] = None\n" + program], where)
    assert done.returncode == 0, done.stderr


def test_make_knows_the_targets_and_demo_is_the_first_command():
    for line in commands(README):
        if line.startswith("make "):
            done = run(["make", "-n", *shlex.split(line)[1:]], TOP)
            assert done.returncode == 0, done.stderr
    demo = run(["make", "-n", "demo"], TOP).stdout
    assert "hpc-train launch -n 4 train examples/bytelm.toml --run-dir runs/demo" in demo


def test_plain_mpirun_is_as_good_as_launch(mpirun, where):
    """`mpirun -n 4 hpc-train parity`: the command beside this Python."""
    script = Path(sys.executable).with_name("hpc-train")
    if not script.exists():
        pytest.skip("hpc-train is not installed beside this Python")
    args = ["examples/bytelm.toml", "grid.stages=2", "--steps", "1", "--json"]
    done = mpirun(4, [os.fspath(script), "parity", *args], cwd=where)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {d["quantity"] for d in json.loads(done.stdout)} == {"loss", "gradients", "parameters"}


def run_small(line, where):
    """Run a command of a guide with a small model and few steps; its arguments, and what it printed."""
    variables, command = re.fullmatch(r"((?:[A-Z_]+=\S+ )*)hpc-train (.*)", line).groups()
    env = dict(variable.split("=") for variable in variables.split())
    args = shlex.split(command)
    for config in SMALL.keys() & set(args):
        at = args.index(config) + 1
        while at < len(args) and "=" in args[at]:
            at += 1
        few = ["train.steps=2", "train.evaluate_every=0"] if "train" in args else []
        args[at:at] = [*SMALL[config], *few, *(["--steps", "1"] if "parity" in args else [])]
    done = run([sys.executable, "-m", "hpc_train", *args], where, env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    return args, env, done.stdout


def test_every_command_about_pipelines_runs(tmp_path):
    where = clone(tmp_path)
    for line in commands(PIPELINES):
        run_small(line, where)
    for made in ("planned.toml", "plan.png", "zb-v.png", "runs/auto/config.toml", "model.safetensors"):
        assert (where / made).stat().st_size > 0
    assert load(where / "runs/auto/config.toml").grid.auto is False


def test_a_bad_schedule_is_shown_as_the_guide_does(tmp_path):
    (tmp_path / "bad.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0\n")
    args = [
        "plan",
        TOP / "examples/regression.toml",
        "--ranks",
        "2",
        "pipeline.schedule=bad.csv",
        "grid.stages=2",
    ]
    done = run([sys.executable, "-m", "hpc_train", *args], tmp_path)
    shown = re.search(r"^```\n(error: .*?)^```", PIPELINES, re.DOTALL | re.MULTILINE)[1]
    assert (done.returncode, done.stderr) == (2, shown)


@pytest.mark.parametrize("line", commands(GUIDE))
def test_every_command_about_gradients_runs(tmp_path, line):
    args, env, printed = run_small(line, clone(tmp_path))
    if "train" not in args:
        return
    run_dir = tmp_path / args[args.index("--run-dir") + 1]
    first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    told = re.findall(r"^\| `(\w+_\w+|skipped)` \|", GUIDE.partition("`metrics.jsonl` has")[2], re.MULTILINE)
    assert len(told) == 7
    assert first.keys() >= set(told)
    if env:
        shown = re.search(r"^```\n(gradient sums.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)[1]
        whole, measured = shown.splitlines()
        assert whole.partition(",")[0] in printed
        assert measured.partition(": ")[0] in printed  # what is chosen differs from run to run
        assert re.search(r": (direct|halving), \d+ KiB messages \(measured with [\d.]+ MiB: ", printed)


@pytest.mark.parametrize("guide", [GUIDE, PIPELINES])
def test_runs_of_a_guide_do_not_resume_each_other(guide):
    run_dirs = re.findall(r"--run-dir (\S+)", guide)
    assert len(run_dirs) == len(set(run_dirs)) == sum(" train " in line for line in commands(guide))


def test_the_lines_for_an_own_loop_send_several_passes_at_once(mpirun):
    (lines,) = blocks(GUIDE, "python")
    done = mpirun(2, ["-c", OWN_LOOP.format(lines)])
    assert done.returncode == 0, done.stdout + done.stderr


def test_settings_that_are_named_exist():
    for text in (README, GUIDE, PIPELINES):
        named = SETTING.findall(text)
        assert named
        for section, name in named:
            assert name in Settings.model_fields[section].annotation.model_fields, f"{section}.{name}"

"""What README tells people to type is run here, as it stands there; only training is cut to a few steps."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
README = (TOP / "README.md").read_text()
FEW_STEPS = ["train.steps=2", "task_options.text=my.txt", "checkpoint.every=1"]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands():
    lines = "".join(blocks("sh")).splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.partition("#")[0].strip()]


def run(args, cwd):
    return subprocess.run(
        args, cwd=cwd, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    """A directory as after a clone, with a text of one's own."""
    path = tmp_path_factory.mktemp("clone")
    (path / "examples").symlink_to(TOP / "examples")
    (path / "my.txt").write_text("".join(f"{i} bottles hang on the wall. " for i in range(400)))
    return path


def test_every_hpc_train_command_runs(where):
    ours = [shlex.split(line) for line in commands() if line.startswith("hpc-train ")]
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
    (program,) = blocks("python")
    done = run([sys.executable, "-c", "import sys; sys.modules['mpi4py'] = None\n" + program], where)
    assert done.returncode == 0, done.stderr


def test_make_knows_the_targets_and_demo_is_the_first_command():
    for line in commands():
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

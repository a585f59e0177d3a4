"""Every mistake in a command is one line on stderr that starts with `error: `, and exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train import cli
from hpc_train.launch import launcher
from hpc_train.launch.mpirun import Mpirun

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = str(EXAMPLES / "regression.toml")


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch, signals_as_before):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def mistake(hpc_train_here):
    """Runs a command that must be refused; returns what stands behind `error: `."""

    def run(*args):
        code, out, err = hpc_train_here(*args)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        assert err.endswith("\n")
        return err.removeprefix("error: ").rstrip()

    return run


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trian", CONFIG], "no such command 'trian'"),
        (["train"], "missing argument 'config'"),
        (["plan", CONFIG, "--ranks"], "option '--ranks' requires an argument"),
        (["plan", CONFIG, "--ranks", "0"], "invalid value for '--ranks': "),
        (["plan", CONFIG, "--ranks", "four"], "invalid value for '--ranks': "),
        (["plan", CONFIG, "--rank", "4"], "no such option: --rank"),
        (["parity", CONFIG, "--steps", "0"], "invalid value for '--steps': "),
        (["train", CONFIG, "--stop-at", "0"], "invalid value for '--stop-at': "),
        (["export", "only-one"], "missing argument 'out'"),
        (["bench", "allgather"], "no such command 'allgather'"),
    ],
)
def test_a_command_that_cannot_be_read(mistake, args, words):
    assert words in mistake(*args)


@pytest.mark.parametrize("command", ["train", "parity", "plan"])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["none.toml"], "none.toml: no such file"),
        ([EXAMPLES], "cannot be read"),
        ([CONFIG, "batch.siez=3"], "unknown setting batch.siez: known here are micro_batch, size"),
        ([CONFIG, "batch.size=many"], "batch.size='many'"),
        ([CONFIG, "batch.size"], "write section.key=value"),
        ([CONFIG, "batch.size=4"], "batch.micro_batch=16 is more than batch.size=4"),
        ([CONFIG, "task=regresion"], "task='regresion' is unknown: built in are bytelm, digits, regression"),
        ([CONFIG, "task=mine.py:Mine"], "mine.py: no such file"),
        ([CONFIG, "task_options.hiden=3"], "unknown option task_options.hiden"),
        ([CONFIG, "task_options.hidden=0"], "task_options.hidden=0"),
        ([CONFIG, "grid.stages=2"], "2 stages cannot share 1 rank"),
        ([CONFIG, "pipeline.split=[1,2]"], "pipeline.split=[1, 2]"),
    ],
)
def test_settings_that_are_wrong(mistake, command, args, words):
    assert words in mistake(command, *args)


def test_a_batch_that_cannot_be_cut(mistake):
    more = ["batch.size=2", "batch.micro_batch=1", "--ranks", "4"]
    assert "batch.size=2 cannot be cut into 4 replicas" in mistake("plan", CONFIG, *more)


def test_a_run_directory_that_cannot_be_written(mistake, tmp_path):
    (tmp_path / "file").write_text("mine")
    text = mistake("train", CONFIG, "--run-dir", "file/run")
    assert text.startswith("file/run")
    assert "choose another --run-dir" in mistake("train", CONFIG, "--run-dir", "file", "--resume", "never")


def test_a_checkpoint_that_is_not_there(mistake):
    assert "elsewhere" in mistake("train", CONFIG, "--resume", "elsewhere")
    assert "elsewhere" in mistake("export", "elsewhere", "out.safetensors")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "1 rank has nothing to sum"),
        (["--wires", "fp32,fp8"], "--wires fp32,fp8: 'fp8' is unknown: known are fp32, fp16"),
        (["--sizes", "4MiB,big"], "--sizes 4MiB,big: 'big' is not a size"),
        (["--sizes", ""], "'' is not a size"),
    ],
)
def test_bench(mistake, args, words):
    assert words in mistake("bench", "allreduce", *args)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "launch what? for instance: hpc-train launch -n 4 train"),
        ([CONFIG], "launch cannot run '"),
        (["--rank", "2", "train", CONFIG], "launch cannot run '--rank': the commands are train, parity"),
        (["-n", "0", "train", CONFIG], "invalid value for '-n' / '--ranks'"),
        (["-n", "2", "train"], "missing argument 'config'"),
        (["-n", "2", "train", "none.toml"], "none.toml: no such file"),
        (["-n", "3", "train", CONFIG, "grid.stages=2"], "2 stages cannot share 3 ranks evenly"),
        (["-n", "2", "parity", "--steps", "3", CONFIG, "batch.siez=2"], "unknown setting batch.siez"),
        (["-n", "2", "train", CONFIG, "--runs", "x"], "no such option: --runs"),
        (["-n", "2", "--hosts", "a:x", "doctor"], "--hosts a:x"),
        (["-n", "4", "--hosts", "a:1,b:1", "doctor"], "2 slots for 4 ranks"),
    ],
)
def test_launch_finds_it_before_mpirun_starts(mistake, monkeypatch, args, words):
    monkeypatch.setattr(launcher, "find_mpirun", lambda: Mpirun("mpirun", "Open MPI", "5.0.11"))
    monkeypatch.setattr(launcher, "run", lambda *args: pytest.fail("mpirun was started"))
    assert words in mistake("launch", *args)


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_of_several_ranks_one_speaks(monkeypatch, capsys, rank, lines):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    monkeypatch.setattr(sys, "argv", ["hpc-train", "plan", "none.toml"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err.count("error: ") == lines


def test_as_a_process_of_its_own():
    command = [sys.executable, "-m", "hpc_train", "train", "none.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"error: none.toml: no such file (looked in {Path.cwd()})\n"

"""What a person sees: lines without a terminal, a bar with one, and where a terminal is found."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.observe import progress
from hpc_train.observe.progress import LINE_EVERY_S, Progress, terminal_columns


def metrics(step, **more):
    line = {
        "step": step,
        "loss": 2.34567,
        "samples_per_s": 12345.6,
        "learning_rate": 1e-3,
        "grad_norm": 0.1234,
    }
    return {**line, **more}


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""

    class Clock:
        now_s = 1000.0

        def monotonic(self):
            return self.now_s

    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_plain_lines_are_five_seconds_apart_and_the_last_is_shown(capsys, clock):
    with Progress(total=100, shown=True, columns=0) as shown:
        for step in range(1, 101):
            shown.step(metrics(step))
            clock.now_s += LINE_EVERY_S / 10
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split("/")[0].removeprefix("step")) for line in lines] == [*range(1, 100, 10), 100]
    assert lines[0] == "step   1/100  loss 2.3457  12,346 samples/s  grad norm 0.123  lr 1.00e-03"


@pytest.mark.parametrize(
    ("share", "text"), [(0.834, "  sums 83% hidden"), (0.0, "  sums 0% hidden"), (None, "")]
)
def test_the_share_of_hidden_sums_is_shown_where_there_are_any(capsys, share, text):
    with Progress(total=1, shown=True, columns=0) as shown:
        shown.step(metrics(1, hidden_share=share))
    assert capsys.readouterr().out.splitlines() == [
        f"step 1/1  loss 2.3457  12,346 samples/s  grad norm 0.123  lr 1.00e-03{text}"
    ]


def test_plain_output_holds_no_escape_codes_and_long_lines_stay_whole(capsys):
    path = "runs/" + "deep/" * 60
    with Progress(total=5, shown=True, columns=0) as shown:
        shown.note(f"saved {path}")
        shown.step(metrics(1))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.splitlines()[0] == f"saved {path}"


def test_what_looks_like_markup_is_shown_as_it_is(capsys):
    text = "saved runs/[bold]:x:/step-00000001"
    for columns in (0, 100):
        with Progress(total=5, shown=True, columns=columns) as shown:
            shown.note(text)
        assert text in capsys.readouterr().out


def test_a_step_that_was_skipped_says_so(capsys):
    with Progress(total=5, shown=True, columns=0) as shown:
        shown.step(metrics(1, loss=float("nan"), grad_norm=float("nan"), skipped=True))
    out = capsys.readouterr().out
    assert "loss nan" in out
    assert out.rstrip().endswith("skipped: not finite")


def test_no_skipped_step_is_passed_over(capsys, clock):
    with Progress(total=100, shown=True, columns=0) as shown:
        for step in range(1, 5):
            shown.step(metrics(step, skipped=step == 3))
    assert [line.split("/")[0] for line in capsys.readouterr().out.splitlines()] == ["step   1", "step   3"]
    with Progress(total=100, shown=True, columns=100) as shown:
        shown.step(metrics(7, skipped=True))
    assert "step 7 was skipped: its loss or gradients are not finite" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [20, 60, 80, 100])
def test_with_a_terminal_there_is_a_bar_with_the_step_in_it(capsys, columns):
    with Progress(total=400, shown=True, columns=columns) as shown:
        for step in range(1, 13):
            shown.step(metrics(step))
    out = capsys.readouterr().out
    assert "\x1b[?25l" in out  # the cursor is hidden while the bar is drawn
    assert "\x1b[?25h" in out  # and shown again
    drawn = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in out.split("\n")]
    assert all(len(line.replace("\r", "")) <= columns for line in drawn)
    last = next(line for line in reversed(drawn) if "━" in line)
    if columns >= 60:
        assert "step  12/400" in last
        assert "loss 2.3457" in last
        assert re.search(r" [-0-9]:[-0-9]{2}:[-0-9]{2}$", last), last  # the time that is left
    assert ("grad norm 0.123" in last) == (columns >= 80)


def test_notes_stand_above_the_bar(capsys):
    with Progress(total=4, shown=True, columns=100) as shown:
        shown.step(metrics(1))
        shown.note("evaluation: loss 2.1")
        shown.step(metrics(2))
    out = capsys.readouterr().out
    assert out.index("evaluation: loss 2.1") < out.rindex("2/4")


@pytest.mark.parametrize("columns", [0, 100])
def test_other_ranks_print_nothing(capsys, columns):
    with Progress(total=2, shown=False, columns=columns) as shown:
        shown.step(metrics(1))
        shown.note("saved")
        shown.step(metrics(2))
    assert capsys.readouterr() == ("", "")


def test_a_failure_leaves_the_terminal_in_order(capsys):
    def run():
        with Progress(total=4, shown=True, columns=100) as shown:
            shown.step({"step": 1})

    with pytest.raises(KeyError, match="loss"):
        run()
    assert "\x1b[?25h" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "columns"),
    [
        ({"HPC_TRAIN_TERMINAL": "120"}, 120),
        ({"HPC_TRAIN_TERMINAL": "0"}, 0),
        ({"HPC_TRAIN_TERMINAL": ""}, 0),
        ({"HPC_TRAIN_TERMINAL": "yes"}, 0),
        ({"HPC_TRAIN_TERMINAL": "120", "OMPI_COMM_WORLD_RANK": "0"}, 120),
        ({"HPC_TRAIN_TERMINAL": "120", "TERM": "dumb"}, 0),
        ({}, 0),  # output is captured here
    ],
)
def test_what_the_environment_says(environment, columns):
    assert terminal_columns(environment) == columns


@pytest.mark.parametrize("launcher", ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"])
def test_the_launcher_of_another_user_or_without_proc_shows_lines(monkeypatch, launcher):
    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(os, "readlink", refuse)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert terminal_columns({launcher: "0"}) == 0


RANK = """
import sys
from hpc_train.observe.progress import terminal_columns
open(sys.argv[1], "w").write(str(terminal_columns()))
"""
LAUNCHER = """
import os, subprocess, sys
out = int(sys.argv[2])
os.environ["OMPI_COMM_WORLD_RANK"] = "0"
subprocess.run([sys.executable, "-c", sys.argv[3], sys.argv[1]], stdout=out, check=True)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the launcher's output is found through /proc")
@pytest.mark.parametrize(("shown", "columns"), [(True, "91"), (False, "0")])
def test_under_a_launcher_its_own_output_tells(tmp_path, shown, columns):
    """Ranks get a pseudo-terminal from Open MPI in either case."""
    ours, theirs = pty.openpty()
    answer = tmp_path / "columns"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("HPC_TRAIN_TERMINAL", "TERM")
    }
    try:
        subprocess.run(
            [sys.executable, "-c", LAUNCHER, answer, str(theirs), RANK],
            stdout=theirs if shown else subprocess.DEVNULL,
            pass_fds=[theirs],
            env={**environment, "COLUMNS": "91"},
            check=True,
            timeout=60,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert answer.read_text() == columns


def test_alone_a_terminal_is_a_terminal(tmp_path):
    ours, theirs = pty.openpty()
    answer = tmp_path / "columns"
    launched = ("HPC_TRAIN_TERMINAL", "TERM", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    try:
        subprocess.run(
            [sys.executable, "-c", RANK, answer],
            stdout=theirs,
            env={**environment, "COLUMNS": "77"},
            check=True,
            timeout=60,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert answer.read_text() == "77"

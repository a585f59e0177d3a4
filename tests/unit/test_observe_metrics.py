"""A run directory: what is written, what a resumed run keeps, and what stands in its way."""

import json
import math
import sys
from pathlib import Path

import pytest

from hpc_train.comm.loopback import LoopbackWorld, run_ranks
from hpc_train.config import Settings, load
from hpc_train.errors import UserError
from hpc_train.observe.metrics import RunDirectory

SETTINGS = Settings(task="regression", name="run", pipeline={"split": (3, 2)})


def run(path, *steps, resumed_at=0):
    """A run of one rank that makes these steps; returns the metrics that are there after it."""
    directory = RunDirectory(path, writer=True)
    directory.start(SETTINGS, LoopbackWorld(), resumed_at)
    for step in steps:
        directory.record({"step": step, "loss": 1 / step})
    directory.close()
    return read(path)


def read(path):
    text = (path / "metrics.jsonl").read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_one_line_a_step(tmp_path):
    lines = run(tmp_path / "runs" / "a", 1, 2, 3)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[1] == {"step": 2, "loss": 0.5}


def test_a_line_is_in_the_file_as_soon_as_it_is_recorded(tmp_path):
    directory = RunDirectory(tmp_path, writer=True)
    directory.start(SETTINGS, LoopbackWorld(), 0)
    directory.record({"step": 1})
    assert read(tmp_path) == [{"step": 1}]
    directory.close()


def test_numbers_that_json_does_not_know_become_null(tmp_path):
    directory = RunDirectory(tmp_path, writer=True)
    directory.start(SETTINGS, LoopbackWorld(), 0)
    directory.record({"step": 1, "loss": math.nan, "grad_norm": -math.inf, "skipped": True, "lr": 0.5})
    directory.close()
    assert read(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "skipped": True, "lr": 0.5}]


def test_settings_read_back_the_same(tmp_path):
    run(tmp_path)
    assert load(tmp_path / "config.toml") == SETTINGS


def test_the_environment_names_versions_world_and_hosts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hpc-train", "train", "x.toml"])

    def body(world):
        world.host = f"node{world.rank // 2}"
        directory = RunDirectory(tmp_path / "run", writer=world.rank == 0)
        directory.start(SETTINGS, world, 0, gradient_sums=["fp16 wire", "measured"])
        directory.record({"step": 1, "rank": world.rank})
        directory.close()

    run_ranks(4, body)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["hosts"] == {"node0": [0, 1], "node1": [2, 3]}
    assert environment["gradient_sums"] == ["fp16 wire", "measured"]
    assert environment["world"]["backend"] == "loopback"
    assert environment["command"] == ["hpc-train", "train", "x.toml"]
    assert {"python", "torch", "hpc_train", "numpy", "mpi4py"} == environment["versions"].keys()
    assert read(tmp_path / "run") == [{"step": 1, "rank": 0}]  # rank 0 alone writes


def test_lines_after_the_resumed_step_are_dropped(tmp_path):
    run(tmp_path, 1, 2, 3, 4, 5)
    lines = run(tmp_path, 4, 5, 6, resumed_at=3)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert run(tmp_path, resumed_at=0) == []


@pytest.mark.parametrize("left", [1, 10, 16, 24])
def test_a_last_line_that_a_kill_has_torn_is_dropped(tmp_path, left):
    run(tmp_path, 1, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 0.25}'[:left])
    assert [line["step"] for line in run(tmp_path, 4, resumed_at=3)] == [1, 2, 4]


def test_a_line_of_which_only_the_end_is_torn_off_is_kept_and_the_next_one_stands_alone(tmp_path):
    run(tmp_path, 1, 2)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().removesuffix(b"\n"))
    assert [line["step"] for line in run(tmp_path, 3, resumed_at=2)] == [1, 2, 3]


@pytest.mark.parametrize("garbage", [b"\0\0\0\n", b"\xff\xfe\n", b"7\n", b'{"loss": 1.0}\n', b"\n"])
def test_what_is_no_line_of_metrics_is_dropped(tmp_path, garbage):
    """A file system may leave such blocks behind after a power cut."""
    run(tmp_path, 1, 2)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(garbage)
    assert [line["step"] for line in run(tmp_path, 3, resumed_at=2)] == [1, 2, 3]


def test_an_earlier_run_is_set_aside_under_the_next_number(tmp_path):
    path = tmp_path / "run"
    for number in range(1, 4):
        run(path, number)
        assert RunDirectory(path, writer=True).set_aside() == tmp_path / f"run.old-{number}"
        assert not path.exists()
    assert [read(tmp_path / f"run.old-{number}")[0]["step"] for number in range(1, 4)] == [1, 2, 3]


def test_there_is_nothing_to_set_aside(tmp_path):
    path = tmp_path / "run"
    assert RunDirectory(path, writer=True).set_aside() is None
    path.mkdir()
    assert RunDirectory(path, writer=True).set_aside() is None
    assert path.is_dir()
    run(path, 1)
    assert RunDirectory(path, writer=False).set_aside() is None
    assert path.is_dir()


def test_a_file_cannot_be_set_aside(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(
        UserError, match=r"file: an earlier run cannot be moved aside: Not a directory: choose"
    ):
        RunDirectory(file, writer=True).set_aside()
    assert file.read_text() == "mine"


def test_the_current_directory_cannot_be_set_aside(tmp_path, monkeypatch):
    run(tmp_path / "run", 1)
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(
        UserError, match=r"\.: an earlier run cannot be moved aside: .*choose another --run-dir"
    ):
        RunDirectory(Path("."), writer=True).set_aside()
    assert [line["step"] for line in read(tmp_path / "run")] == [1]


@pytest.mark.parametrize("below", [True, False])
def test_a_directory_that_cannot_be_written_is_a_users_mistake_on_all_ranks(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    path = file / "run" if below else file  # not by permissions, which root need not obey

    def body(world):
        directory = RunDirectory(path, writer=world.rank == 0)
        with pytest.raises(UserError) as caught:
            directory.start(SETTINGS, world, 0)
        directory.record({"step": 1})
        directory.close()
        return str(caught.value)

    told = run_ranks(3, body)
    assert len(set(told)) == 1
    assert told[0].startswith(f"{path}: cannot be written: ")
    assert told[0].endswith("choose another --run-dir")
    assert file.read_text() == "mine"

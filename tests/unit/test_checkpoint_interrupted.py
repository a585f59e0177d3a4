"""A save that dies or fails at any point leaves the earlier checkpoints whole, and nobody waiting.

save      touch  save_file  chmod  fsync  replace  unlink  fsync       every writer: its file
          fsync  open  fsync  replace  unlink  fsync                   rank 0: the manifest
          unlink  rmtree                                               rank 0: what is old
faults      ^      ^      ^      ^      ^      ^                       one after the other, on either rank
"""

import os
import re
import shutil
import socket
import threading
import warnings
from pathlib import Path

import pytest
from checkpoints import STATE, Held, assert_same_bits, cut, noise, on_disk, save, whole

from hpc_train.checkpoint import manifest as manifests
from hpc_train.checkpoint import tensor_file
from hpc_train.checkpoint.manifest import Broken
from hpc_train.checkpoint.names import layer_of
from hpc_train.checkpoint.store import Store
from hpc_train.comm.loopback import LoopbackWorld, run_ranks
from hpc_train.errors import UserError

DEEDS = [
    (Path, "mkdir"),
    (Path, "touch"),
    (tensor_file, "save_file"),
    (Path, "chmod"),
    (os, "fsync"),
    (os, "replace"),
    (Path, "unlink"),
    (manifests, "open"),
    (shutil, "rmtree"),
    (Path, "rmdir"),
]


class Killed(BaseException):
    """The process is gone: it does nothing more, not even what stands under `finally`."""


class Faults:
    """Lets what `rank` does to the disk fail from its `first` deed on, `times` in a row."""

    def __init__(self, rank, first, error, times):
        self.rank, self.failing, self.error = rank, range(first, first + times), error
        self.deeds = []
        self.struck = None  # the deed that failed first

    def patch(self, monkeypatch):
        for owner, name in DEEDS:
            real = getattr(owner, name, open)
            monkeypatch.setattr(owner, name, self._faulty(name, real), raising=False)

    def _faulty(self, name, real):
        def deed(*args, **options):
            if threading.current_thread().name != f"rank {self.rank}":
                return real(*args, **options)
            self.deeds.append(name)
            if len(self.deeds) - 1 not in self.failing:
                return real(*args, **options)
            self.struck = self.struck or name
            self._leave_half(name, args)
            raise self.error

        return deed

    def _leave_half(self, name, args):
        if name == "save_file":
            Path(args[1]).write_bytes(b"half of the tensors")
        elif name == "open":
            Path(args[0]).write_text('{"checksum": "half of')
        elif name == "rmtree":
            os.unlink(next(Path(args[0]).iterdir()))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Checkpoints of steps 1 and 2, written by two ranks."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (1, 2):
        save(directory, (2, 4), step, keep=2)
    return directory


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """Nobody cuts the power here: an fsync counts as a deed, and need not be waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def part(rank, split, tensors):
    """The tensors of a rank's layers."""
    return {name: tensor for name, tensor in tensors.items() if layer_of(name) in cut(split)[rank]}


def save_faulty(directory, step, faults):
    """Save what 5 steps give as `step`: each rank's path or UserError, by rank.  Raises Killed."""

    def body(world):
        tensors = part(world.rank, (3, 3), whole(5))
        try:
            return Store(directory, 2).save(step, tensors, STATE, world.control, writer=True)
        except UserError as error:
            return error

    with pytest.MonkeyPatch.context() as monkeypatch:
        faults.patch(monkeypatch)
        return run_ranks(2, body, timeout_s=20)


def is_new(directory, step):
    """Whether the manifest of the save that was disturbed got in place."""
    try:
        return any("layers-0-2-" in file for file in manifests.read(directory / f"step-{step:08d}").files)
    except Broken:
        return False


def assert_goes_on(directory, step, new):
    """The newest whole one is loaded, all of it; and the next save works and leaves nothing lying about."""
    assert_same_bits(loaded_by_two(directory), whole(5 if new else 2))
    Store(directory, 2).save(step, whole(6), STATE, LoopbackWorld().control, writer=True)
    assert_same_bits(loaded_by_two(directory), whole(6))
    assert sorted(path.name for path in directory.iterdir()) == [f"step-{n:08d}" for n in (step - 1, step)]
    for path in directory.iterdir():
        assert {file.name for file in path.iterdir()} == {"manifest.json", *manifests.read(path).files}


def loaded_by_two(directory):
    def body(world):
        tensors = part(world.rank, (1, 5), whole(1))
        wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return Store(directory, 2).load("auto", wanted, world.control).tensors

    first, second = run_ranks(2, body, timeout_s=20)
    return first | second


def at_every_point(run, tmp_path, rank, error, times):
    """(copy of the run, step, faults), once for each deed of the rank, until none is left to fail."""
    for step in (2, 3):  # again the one that is there, and a new one
        for first in range(100):
            directory = tmp_path / f"{step}-{first}"
            shutil.copytree(run, directory)
            faults = Faults(rank, first, error, times)
            yield directory, step, faults
            if faults.struck is None:
                break


EVERY_WRITER = {"mkdir", "touch", "save_file", "chmod", "fsync", "replace", "unlink"}
STRUCK = {0: EVERY_WRITER | {"open", "rmtree"}, 1: EVERY_WRITER}
FULL = OSError(28, "No space left on device")
ranks = pytest.mark.parametrize("rank", [0, 1])


@ranks
def test_a_rank_that_is_killed(run, tmp_path, rank):
    struck = set()
    for directory, step, faults in at_every_point(run, tmp_path, rank, Killed(), times=1000):
        before = on_disk(directory)
        try:
            save_faulty(directory, step, faults)
        except Killed:
            assert faults.struck
        else:
            assert faults.struck is None
        new = is_new(directory, step)
        assert new or (faults.struck and before.items() <= on_disk(directory).items())
        assert_goes_on(directory, step, new)
        struck.add(faults.struck)
    assert struck == STRUCK[rank] | {None}


@ranks
@pytest.mark.parametrize("times", [1, 1000], ids=["once", "for ever"])
def test_a_disk_error_on_one_rank_is_one_line_on_all(run, tmp_path, rank, times):
    struck, told = set(), 0
    for directory, step, faults in at_every_point(run, tmp_path, rank, FULL, times):
        before = on_disk(directory)
        with warnings.catch_warnings(record=True) as warned:
            results = save_faulty(directory, step, faults)
        new, after = is_new(directory, step), on_disk(directory)
        path = directory / f"step-{step:08d}"
        if isinstance(results[0], UserError):
            line = f"cannot save {path}: rank {rank} on {socket.gethostname()}: No space left on device"
            assert [str(error) for error in results] == [line] * 2
            assert new or before.items() <= after.items()
            if not new and times == 1:  # a disk that fails for ever cannot be tidied
                assert before == after
                assert path.exists() == (step == 2)
        else:
            assert results == [path] * 2
            assert new
            assert bool(faults.struck) == bool(warned)  # what was not removed is told
            told += len(warned)
        assert_goes_on(directory, step, new)
        struck.add(faults.struck)
    assert struck == STRUCK[rank] | {None}
    assert bool(told) == (rank == 0)


@pytest.mark.parametrize("rank", range(4))
def test_whichever_rank_has_no_room_for_its_file(tmp_path, monkeypatch, rank):
    """A real error: a file stands where the directory should be made."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    (tmp_path / "checkpoints").write_text("in the way")

    def body(world):
        directory = tmp_path / ("checkpoints" if world.rank == rank else "elsewhere")
        held = Held(cut((1, 1, 1, 3))[world.rank]).train(1)
        with pytest.raises(UserError) as error:
            Store(directory, 3).save(
                1, {"layers.9.x": noise("x", (2,)), **held.tensors()}, {}, world.control, True
            )
        return str(error.value)

    lines = run_ranks(4, body, timeout_s=20)
    assert [re.sub(r"^cannot save \S+: ", "", line) for line in lines] == [
        f"rank {rank} on node7: Not a directory ({tmp_path}/checkpoints/step-00000001)"
    ] * 4
    assert (tmp_path / "checkpoints").read_text() == "in the way"
    assert not on_disk(tmp_path / "elsewhere")


def test_a_directory_that_hosts_do_not_share_is_told(tmp_path):
    """Rank 1's host has a directory of its own under the same name: rank 0 does not see its file."""

    def body(world):
        held = Held(cut((3, 3))[world.rank]).train(1)
        store = Store(tmp_path / f"host{world.rank}", 3)
        with pytest.raises(UserError) as error:
            store.save(1, held.tensors(), {}, world.control, writer=True)
        return str(error.value)

    for line in run_ranks(2, body, timeout_s=20):
        assert re.search(
            r"layers-4-5-\w+\.safetensors, written by rank 1, is not to be seen here: put the", line
        )
    assert not on_disk(tmp_path)


@pytest.mark.parametrize("rank", range(3))
def test_reading_that_fails_on_one_rank_is_one_line_on_all(run, monkeypatch, rank):
    real = tensor_file.read

    def read(path, names, *more):
        if threading.current_thread().name == f"rank {rank}":
            raise OSError(5, "Input/output error", str(path))
        return real(path, names, *more)

    def body(world):
        with pytest.raises(UserError) as error:
            Store(run, 3).load("auto", Held(cut((2, 2, 2))[world.rank]).shapes(), world.control)
        return str(error.value)

    monkeypatch.setattr(tensor_file, "read", read)
    lines = run_ranks(3, body, timeout_s=20)
    assert set(lines) == {lines[0]}
    assert re.fullmatch(
        rf"cannot load {run}/step-00000002: rank {rank} on \S+: Input/output error \({run}/\S+\)", lines[0]
    )


def test_a_directory_that_rank_0_cannot_list_is_one_line_on_all(run, monkeypatch):
    def iterdir(path):
        raise OSError(13, "Permission denied", str(path))

    def body(world):
        with pytest.raises(UserError, match=f"^cannot resume: rank 0 on .*: Permission denied .{run}.$"):
            Store(run, 3).load("auto", {}, world.control)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    run_ranks(3, body, timeout_s=20)


def test_a_mistake_of_ours_on_one_rank_leaves_nobody_waiting(run, tmp_path):
    """A state that JSON lacks is no error of the disk: the rank ends, and the others with it."""

    def body(world):
        Store(tmp_path, 3).save(1, {}, {"loss": float("nan")}, world.control, writer=False)

    with pytest.raises(ValueError, match="JSON"):
        run_ranks(2, body, timeout_s=20)

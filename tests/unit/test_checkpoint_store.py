"""The store: what any grid has written, any other loads bit for bit; the newest K stay."""

import re
import warnings

import pytest
import torch
from checkpoints import STATE, EveryKind, Held, assert_same_bits, cut, joined, load, save, whole

from hpc_train.checkpoint import snapshot
from hpc_train.checkpoint import store as stores
from hpc_train.checkpoint.manifest import read as read_manifest
from hpc_train.checkpoint.store import Store
from hpc_train.comm.loopback import run_ranks
from hpc_train.errors import UserError
from hpc_train.grid import Grid


def kept(directory):
    return sorted(int(path.name.removeprefix("step-")) for path in directory.iterdir())


def refusal(directory, split, **how):
    """The one line that all ranks get, as rank 0 has it."""
    with pytest.raises(UserError) as error:
        load(directory, split, **how)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("readers", [(6,), (2, 4), (5, 1), (1, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("writers", [(6,), (2, 4), (1, 2, 2, 1)], ids=str)
def test_any_grid_loads_what_any_other_wrote(tmp_path, writers, readers, optimizer):
    path = save(tmp_path, writers, optimizer=optimizer)
    parts = load(tmp_path, readers, optimizer=optimizer)
    assert_same_bits(joined(parts), whole(4, optimizer))
    assert [(loaded.path, loaded.state) for loaded, _, _ in parts] == [(path, STATE)] * len(readers)
    assert [notes for _, _, notes in parts] == [[]] * len(readers)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path, optimizer):
    save(tmp_path, (3, 3), optimizer=optimizer)
    parts = load(tmp_path, (1, 5), optimizer=optimizer)
    for _, held, _ in parts:
        held.train(2, first=4)
    assert_same_bits(joined(parts), whole(6, optimizer))


def test_one_replica_writes_for_all(tmp_path):
    grid = Grid(replicas=2, stages=2)

    def body(world):
        replica, stage = grid.place(world.rank)
        held = Held(cut((2, 4))[stage], seed=replica).train(4)  # the other replica's must not be written
        tensors = held.tensors() if replica == 0 else {}
        Store(tmp_path, 3).save(4, tensors, STATE, world.control, writer=replica == 0)
        other = Held(cut((2, 4))[stage], seed=99)
        loaded = Store(tmp_path, 3).load("auto", other.shapes(), world.control)
        snapshot.restore(loaded.tensors, *other.all)
        return stage, other.copy()

    for stage, tensors in run_ranks(4, body):
        assert_same_bits(tensors, Held(cut((2, 4))[stage]).train(4).copy())
    assert len(list((tmp_path / "step-00000004").glob("*.safetensors"))) == 2


def test_files_are_of_layers_and_the_manifest_tells_which(tmp_path):
    path = save(tmp_path, (1, 2, 1, 2))
    names = sorted(re.sub(r"-[0-9a-f]{8}\.", ".", file.name) for file in path.iterdir())
    assert names == [
        "layers-0.safetensors",
        "layers-1-2.safetensors",
        "layers-4-5.safetensors",  # the rank of layer 3 alone has nothing to write
        "manifest.json",
    ]
    manifest = read_manifest(path)
    assert manifest.shapes == {name: tuple(tensor.shape) for name, tensor in whole(4).items()}
    assert manifest.tensors["layers.5.seen"].dtype == "int64"
    assert manifest.tensors["layers.2.running_mean"].file.startswith("layers-1-2-")


def test_rank_0s_state_is_what_all_get(tmp_path):
    def body(world):
        store = Store(tmp_path, 1)
        store.save(1, {}, {"rank": world.rank}, world.control, writer=False)
        return store.load("auto", {}, world.control).state

    assert run_ranks(3, body) == [{"rank": 0}] * 3


def test_nothing_saved_is_nothing_to_load(tmp_path):
    assert [loaded for loaded, _, _ in load(tmp_path / "checkpoints", (2, 4))] == [None, None]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_k_are_kept(tmp_path, keep):
    for step in (1, 2, 3, 4):
        save(tmp_path, (2, 4), step, keep)
    assert kept(tmp_path) == [1, 2, 3, 4][-keep:]


def test_a_run_that_went_back_keeps_what_it_has_written_since(tmp_path):
    """The step alone would keep 8 and 9, from which the run has parted, and remove what it saves."""
    for step in (4, 8, 9):
        save(tmp_path, (6,), step)
    for step in (5, 6):
        save(tmp_path, (6,), step, keep=2)
    assert kept(tmp_path) == [5, 6]
    assert load(tmp_path, (6,))[0][0].path.name == "step-00000006"


def test_the_same_step_again_replaces_the_earlier_one(tmp_path):
    save(tmp_path, (2, 4), steps=1)
    path = save(tmp_path, (3, 3), steps=4)
    assert_same_bits(joined(load(tmp_path, (6,))), whole(4))
    assert {file.name for file in path.iterdir()} == {"manifest.json", *read_manifest(path).files}


def test_the_same_step_again_at_once(tmp_path, monkeypatch):
    """Rank 0, tidying after the first writing, took rank 1's new file of the second one for an old one."""
    tidy = stores.Store._tidy
    rounds = 5

    def body(world):
        held = Held(cut((2, 4))[world.rank]).train(1)
        store = Store(tmp_path, 3)
        for _ in range(rounds):
            store.save(4, held.tensors(), STATE, world.control, writer=True)

    at_tidying = []

    def note(store, written):
        at_tidying.append({file.name for file in written.iterdir()} - {"manifest.json"})
        tidy(store, written)

    monkeypatch.setattr(stores.Store, "_tidy", note)
    run_ranks(2, body)
    assert [len(names) for names in at_tidying] == [
        2,
        *[4] * (rounds - 1),
    ]  # this writing's and the last one's


def test_what_killed_saves_and_people_leave(tmp_path):
    """Leftovers in the directory of a step go when that step is saved; what people put there stays."""
    path = save(tmp_path, (6,))
    for name in (".manifest.json.tmp", "layers-0-5-0badf00d.safetensors", ".tmpAb12Cd", "notes.txt"):
        (path / name).write_text("left")
    save(tmp_path, (6,))
    names = {file.name for file in path.iterdir()}
    assert names == {"manifest.json", "notes.txt", *read_manifest(path).files}


def test_unfinished_ones_older_than_those_kept_are_removed(tmp_path):
    for step in (2, 7):
        (tmp_path / f"step-{step:08d}").mkdir()
    save(tmp_path, (6,), 4, keep=1)
    assert kept(tmp_path) == [4, 7]


def test_too_few_whole_ones_remove_nothing(tmp_path):
    for step in (1, 2, 3):
        (save(tmp_path, (6,), step) / "manifest.json").unlink()
    save(tmp_path, (6,), 4, keep=2)
    assert kept(tmp_path) == [1, 2, 3, 4]


def test_one_that_cannot_be_removed_is_told_and_the_others_are_removed(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, (6,), step)
    rmtree = stores.shutil.rmtree

    def busy(path):
        if path.name == "step-00000001":
            raise OSError(16, "Device or resource busy", ".nfs01")
        rmtree(path)

    monkeypatch.setattr(stores.shutil, "rmtree", busy)
    with pytest.warns(UserWarning, match="step-00000001 was not removed: .*busy"):
        save(tmp_path, (6,), 4, keep=1)
    assert kept(tmp_path) == [1, 4]
    assert not (tmp_path / "step-00000001" / "manifest.json").exists()  # half removed, it is none any more
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path, (6,), 5, keep=1)
    assert kept(tmp_path) == [5]


@pytest.mark.parametrize("readers", [(6,), (1, 1, 2, 2)], ids=str)
def test_another_optimizer_begins_anew_and_is_told_once(tmp_path, readers):
    path = save(tmp_path, (2, 4), optimizer="adamw")
    parts = load(tmp_path, readers, optimizer="sgd")
    assert_same_bits(joined(parts), {n: t for n, t in whole(4).items() if not n.startswith("optimizer/")})
    (note,) = parts[0][2]
    assert re.fullmatch(
        rf"{path} has no optimizer state that fits layers\.0\.\w+ and others: it begins anew there", note
    )
    assert not any(notes for _, _, notes in parts[1:])


class Wider(EveryKind):
    """Layer 0 has another shape."""

    def layers(self):
        first, *others = super().layers()
        return [type(first)(lambda: torch.nn.Linear(5, 4)), *others]


def load_into(directory, specs, split):
    def body(world):
        held = Held(cut(split)[world.rank], specs=specs)
        with pytest.raises(UserError) as error:
            Store(directory, 3).load("auto", held.shapes(), world.control)
        return str(error.value)

    return run_ranks(len(split), body)


SPECS = EveryKind().layers()
ALL = "it holds layers 0-2, 4-5"


@pytest.mark.parametrize(
    ("specs", "split", "reason"),
    [
        (Wider().layers(), (1, 5), "layers.0.weight is [4, 4] there and [4, 5] in this model"),
        ([*SPECS, SPECS[0]], (3, 4), f"the model's layers.6.weight [4, 4] is not in it: {ALL}"),
        (SPECS[:5], (1, 4), f"{ALL}, and this model has only layers 0-2, 4"),
        ([SPECS[1], *SPECS[1:]], (1, 5), f"the model's layers.0.inward.weight [4, 4] is not in it: {ALL}"),
    ],
    ids=["wider", "longer", "shorter", "another layer"],
)
def test_another_model_is_one_line_with_the_numbers_on_all_ranks(tmp_path, specs, split, reason):
    path = save(tmp_path, (2, 4))
    hint = "use the settings it was made with, or begin anew with --resume never"
    assert load_into(tmp_path, specs, split) == [f"{path} is of another model: {reason}: {hint}"] * 2


def test_a_path_may_be_a_checkpoint_or_a_run(tmp_path):
    save(tmp_path / "other" / "checkpoints", (2, 4), step=2)
    save(tmp_path / "other" / "checkpoints", (2, 4), step=4)
    older = tmp_path / "other" / "checkpoints" / "step-00000002"
    for which, step in ((tmp_path / "other", 4), (older.parent, 4), (older, 2)):
        assert_same_bits(joined(load(tmp_path / "new", (3, 3), which)), whole(step))


@pytest.mark.parametrize(
    ("name", "cause"),
    [("none", "is not there"), ("file", "is a file"), ("empty", "holds no checkpoint")],
)
def test_a_path_that_is_no_checkpoint_is_told_on_all_ranks(tmp_path, name, cause):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    line = refusal(tmp_path, (2, 4), which=tmp_path / name)
    assert re.match(rf"cannot resume: rank 0 on \S+: {tmp_path / name} {cause}", line)

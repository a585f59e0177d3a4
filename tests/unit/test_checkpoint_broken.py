"""Broken checkpoints: each kind of harm is found, told with its cause, and an earlier whole one is loaded."""

import json
import re

import pytest
from checkpoints import assert_same_bits, joined, load, save, whole

from hpc_train.checkpoint import manifest as manifests
from hpc_train.checkpoint.manifest import Manifest
from hpc_train.checkpoint.store import Store
from hpc_train.comm.loopback import LoopbackWorld
from hpc_train.errors import UserError


def largest(path):
    return max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)


def truncate(path):
    largest(path).write_bytes(largest(path).read_bytes()[:-10])


def flip_a_bit(path):
    content = bytearray(largest(path).read_bytes())
    content[len(content) // 2] ^= 4
    largest(path).write_bytes(content)


def remove_a_file(path):
    largest(path).unlink()


def remove_the_manifest(path):
    (path / "manifest.json").unlink()


def garble_the_manifest(path):
    (path / "manifest.json").write_bytes(b"\x00\xffgarbage")


def cut_the_manifest(path):
    (path / "manifest.json").write_text((path / "manifest.json").read_text()[:50])


def change_the_manifest(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"offset": 17', '"offset": 18'))


def write_another_format(path):
    body = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(body | {"format": 2}))


HARMS = [
    (truncate, r"layers-2-5-\w+\.safetensors has \d+ bytes instead of \d+"),
    (flip_a_bit, r"the checksum of layers-2-5-\w+\.safetensors is wrong: its content has changed"),
    (remove_a_file, r"layers-2-5-\w+\.safetensors is missing: deleted, or written on a host that .*"),
    (remove_the_manifest, r"it has no manifest\.json: saving was not finished"),
    (garble_the_manifest, r"manifest\.json cannot be read: .*codec.*"),
    (cut_the_manifest, r"manifest\.json is not a readable manifest \(50 characters\)"),
    (change_the_manifest, r"the checksum of manifest\.json is wrong: it was changed after it was written"),
    (write_another_format, r"manifest\.json has format 2, and this version reads 1"),
]
harms = pytest.mark.parametrize(("harm", "cause"), HARMS, ids=[harm.__name__ for harm, _ in HARMS])


@harms
@pytest.mark.parametrize("readers", [(6,), (1, 1, 2, 2)], ids=str)
def test_a_broken_one_is_passed_over_and_named(tmp_path, harm, cause, readers):
    save(tmp_path, (2, 4), step=2)
    broken = save(tmp_path, (2, 4), step=4)
    harm(broken)
    parts = load(tmp_path, readers)
    assert_same_bits(joined(parts), whole(2))
    assert {loaded.path.name for loaded, _, _ in parts} == {"step-00000002"}
    (note,) = parts[0][2]
    assert re.fullmatch(f"warning: passing over {re.escape(str(broken))}: {cause}", note)
    assert not any(notes for _, _, notes in parts[1:])


@harms
def test_asked_for_by_path_it_is_refused_with_the_cause(tmp_path, harm, cause):
    save(tmp_path, (2, 4), step=2)
    broken = save(tmp_path, (2, 4), step=4)
    harm(broken)
    with pytest.raises(UserError, match=f"^{re.escape(str(broken))} is not whole: {cause}$"):
        load(tmp_path / "new", (3, 3), which=broken)


def test_a_run_with_nothing_whole(tmp_path):
    """By path that is a mistake; a run of one's own begins anew, and says what it could not use."""
    directory = tmp_path / "checkpoints"
    for step in (2, 4):
        truncate(save(directory, (2, 4), step))
    with pytest.raises(UserError, match=r"has no whole checkpoint, but 2 broken: step-00000004: layers-2-5-"):
        load(tmp_path / "new", (2, 4), which=tmp_path)
    (nothing, _, notes), (nothing_either, _, _) = load(directory, (2, 4))
    assert nothing is None
    assert nothing_either is None
    assert [re.search(r"step-\d+", note)[0] for note in notes] == ["step-00000004", "step-00000002"]


def test_every_rank_checks_some_of_the_files(tmp_path):
    """Whichever file is harmed, all ranks learn of it, though each reads but its own part."""
    for victim in range(3):
        path = save(tmp_path / str(victim), (1, 2, 3), step=4)
        file = sorted(path.glob("*.safetensors"))[victim]
        file.write_bytes(file.read_bytes()[:-1])
        for readers in ((6,), (3, 3), (1, 1, 1, 3)):
            parts = load(tmp_path / str(victim), readers)
            assert [loaded for loaded, _, _ in parts] == [None] * len(readers)
            assert file.name in parts[0][2][0]


def test_what_load_found_broken_does_not_count_as_kept(tmp_path):
    """A flipped bit leaves the size: pruning, which looks at sizes alone, would keep it for a whole one."""
    save(tmp_path, (6,), step=1)
    flip_a_bit(save(tmp_path, (6,), step=2))
    control = LoopbackWorld().control
    store = Store(tmp_path, keep=2)
    assert store.load("auto", {name: tuple(t.shape) for name, t in whole(1).items()}, control).path.name == (
        "step-00000001"
    )
    store.save(3, whole(3), {}, control, writer=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001",  # whole, and so one of two
        "step-00000002",  # broken, and younger than the oldest of these
        "step-00000003",
    ]
    store.save(4, whole(4), {}, control, writer=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_broken_step_that_is_saved_again_counts(tmp_path):
    flip_a_bit(save(tmp_path, (6,), step=4))
    control = LoopbackWorld().control
    store = Store(tmp_path, keep=1)
    wanted = {name: tuple(tensor.shape) for name, tensor in whole(1).items()}
    assert store.load("auto", wanted, control) is None
    for step in (3, 4):
        store.save(step, whole(step), {}, control, writer=True)
    assert_same_bits(store.load("auto", wanted, control).tensors, whole(4))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    """Not even with the right checksum, which anybody can make."""
    (tmp_path / "secret").write_text("another's")
    path = save(tmp_path / "checkpoints", (6,))
    manifest = manifests.read(path)
    (record,) = manifest.files.values()
    text = Manifest.model_construct(**{**dict(manifest), "files": {"../../secret": record}}).to_text()
    (path / "manifest.json").write_text(text)
    _, _, (note,) = load(tmp_path / "checkpoints", (6,))[0]
    assert "manifest.json: files." in note
    assert (tmp_path / "secret").read_text() == "another's"

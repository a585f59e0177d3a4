"""Manifests: what is written comes back, and anything else is told with its cause."""

import json

import pytest

from hpc_train.checkpoint import manifest as manifests
from hpc_train.checkpoint.manifest import FORMAT, Broken, FileRecord, Manifest, TensorRecord

FILE = "layers-0-1-1f0c9a2b.safetensors"
MANIFEST = Manifest(
    format=FORMAT,
    step=100,
    serial=3,
    files={FILE: FileRecord(bytes=1234, sha256="ab" * 32)},
    tensors={
        "layers.0.weight": TensorRecord(file=FILE, shape=(3, 4), dtype="float32"),
        "layers.1.scale": TensorRecord(file=FILE, shape=(), dtype="bfloat16"),
    },
    state={"epoch": 1, "rate": 0.1, "big": 2**60, "text": 'é\n"', "list": [1, None, True]},
)


def test_what_is_written_comes_back(tmp_path):
    manifests.write(tmp_path, MANIFEST)
    assert manifests.read(tmp_path) == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_it_replaces_an_earlier_one(tmp_path):
    manifests.write(tmp_path, MANIFEST)
    manifests.write(tmp_path, MANIFEST.model_copy(update={"serial": 4}))
    assert manifests.read(tmp_path).serial == 4


def test_shapes_are_by_name():
    assert MANIFEST.shapes == {"layers.0.weight": (3, 4), "layers.1.scale": ()}


def test_people_can_read_it():
    body = json.loads(MANIFEST.to_text())
    assert body["tensors"]["layers.0.weight"] == {"file": FILE, "shape": [3, 4], "dtype": "float32"}
    assert body["state"] == MANIFEST.state


def test_spaces_and_order_do_not_count():
    body = json.loads(MANIFEST.to_text())
    text = json.dumps(dict(reversed(body.items())), indent=None)
    assert Manifest.from_text(text) == MANIFEST


def sealed(**changes):
    """A manifest's text with other content and the checksum that goes with it."""
    body = json.loads(MANIFEST.to_text()) | changes
    del body["checksum"]
    return json.dumps({"checksum": manifests._checksum(body), **body})


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", r"manifest\.json is not a readable manifest \(0 characters\)"),
        (MANIFEST.to_text()[:100], r"not a readable manifest \(100 characters\)"),
        ("[]", "not a readable manifest"),
        ('"text"', "not a readable manifest"),
        ("null", "not a readable manifest"),
        ("{}", "not a readable manifest"),
        (MANIFEST.to_text().replace("1234", "1235"), "checksum of manifest.json is wrong: it was changed"),
        (sealed(format=2), "has format 2, and this version reads 1"),
        (sealed(format=None), "has format None, and this version reads 1"),
        (sealed(step="soon"), r"manifest\.json: step: Input should be a valid integer"),
        (sealed(surprise=1), r"manifest\.json: surprise: Extra inputs are not permitted"),
    ],
)
def test_anything_else_is_told_with_its_cause(text, cause):
    with pytest.raises(Broken, match=cause):
        Manifest.from_text(text)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", ".", "..", ".hidden", "a/b", "", "a\n", "a b"])
def test_files_outside_the_directory_are_refused(name):
    """A manifest that somebody else made must not make us read or delete what is elsewhere."""
    record = {"bytes": 1, "sha256": ""}
    with pytest.raises(Broken, match=r"manifest\.json: files\."):
        Manifest.from_text(sealed(files={name: record}))
    tensor = {"file": name, "shape": [1], "dtype": "float32"}
    with pytest.raises(Broken, match=r"manifest\.json: tensors\."):
        Manifest.from_text(sealed(tensors={"layers.0.weight": tensor}))


def test_no_manifest_is_a_save_that_was_not_finished(tmp_path):
    with pytest.raises(Broken, match=r"it has no manifest\.json: saving was not finished"):
        manifests.read(tmp_path)


def test_one_that_cannot_be_read_is_broken(tmp_path):
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(Broken, match=r"cannot be read: .*Is a directory"):
        manifests.read(tmp_path)


def test_bytes_that_are_no_text_are_broken(tmp_path):
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Broken, match=r"cannot be read: .*codec can't decode"):
        manifests.read(tmp_path)


def test_a_write_that_fails_leaves_the_earlier_one(tmp_path, monkeypatch):
    manifests.write(tmp_path, MANIFEST)

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifests.os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        manifests.write(tmp_path, MANIFEST.model_copy(update={"serial": 4}))
    assert manifests.read(tmp_path) == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_state_that_json_lacks_is_refused_before_anything_is_in_place(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        manifests.write(tmp_path, MANIFEST.model_copy(update={"state": {"loss": float("nan")}}))
    assert not list(tmp_path.iterdir())

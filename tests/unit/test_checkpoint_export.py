"""Export: one file with plain names that plain PyTorch loads, whatever grid has written the checkpoint."""

import os
import re

import pytest
import torch
from checkpoints import EveryKind, assert_same_bits, on_disk, save, whole
from safetensors.torch import load_file

from hpc_train.checkpoint import tensor_file
from hpc_train.checkpoint.export import export
from hpc_train.errors import UserError


@pytest.fixture
def run(tmp_path):
    """A run of two checkpoints, written by two and by three stages."""
    save(tmp_path / "run" / "checkpoints", (2, 4), step=2)
    save(tmp_path / "run" / "checkpoints", (1, 3, 2), step=4)
    return tmp_path / "run"


def model_of(steps):
    return {name: tensor for name, tensor in whole(steps).items() if not name.startswith("optimizer/")}


def test_it_loads_strictly_into_the_tasks_plain_model(run, tmp_path):
    out = tmp_path / "model.safetensors"
    export(run, out)
    model = EveryKind().plain_model(seed=99)
    model.load_state_dict(load_file(out), strict=True)
    assert_same_bits(model.state_dict(), model_of(4))
    assert model.layers[1].inward.weight is model.layers[1].outward.weight  # still tied


def test_names_are_plain_and_the_optimizer_is_left_out(run, tmp_path):
    out = tmp_path / "model.safetensors"
    export(run, out)
    assert set(load_file(out)) == set(EveryKind().plain_model().state_dict())


@pytest.mark.parametrize(
    ("source", "step"),
    [(".", 4), ("checkpoints", 4), ("checkpoints/step-00000002", 2), ("checkpoints/step-00000004", 4)],
)
def test_a_run_means_its_newest_a_checkpoint_itself(run, tmp_path, source, step):
    out = tmp_path / "model.safetensors"
    assert f": step {step}, " in export(run / source, out)
    assert_same_bits(load_file(out), model_of(step))


def test_the_line_tells_what_is_in_the_file(run, tmp_path):
    out = tmp_path / "model.safetensors"
    tensors = model_of(4)
    numbers = sum(tensor.numel() for tensor in tensors.values())
    assert export(run, out) == (
        f"{out}: step 4, {len(tensors)} tensors, {numbers} numbers, {out.stat().st_size:,} bytes"
    )


def test_it_replaces_an_earlier_export_and_leaves_the_run_alone(run, tmp_path):
    before = on_disk(run)
    out = tmp_path / "model.safetensors"
    out.write_text("earlier")
    export(run, out)
    assert_same_bits(load_file(out), model_of(4))
    assert on_disk(run) == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "model.safetensors"}


def test_a_broken_newest_is_passed_over_and_named(run, tmp_path):
    file = next((run / "checkpoints" / "step-00000004").glob("layers-1-2-*"))
    file.write_bytes(file.read_bytes()[:-1])
    out = tmp_path / "model.safetensors"
    first, warning = export(run, out).splitlines()
    assert ": step 2, " in first
    assert re.fullmatch(
        rf"warning: passed over {file.parent}: {file.name} has \d+ bytes instead of \d+", warning
    )
    assert_same_bits(load_file(out), model_of(2))


def test_a_broken_checkpoint_is_refused_and_nothing_is_written(run, tmp_path):
    path = run / "checkpoints" / "step-00000004"
    (path / "manifest.json").unlink()
    with pytest.raises(UserError, match=f"^{path} is not whole: it has no manifest.json"):
        export(path, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("none", "is not there: give the directory of a run or of a checkpoint"),
        ("file", "is a file: give the directory of a run or of a checkpoint"),
        ("empty", "holds no checkpoint (looked for checkpoints/step-*/manifest.json)"),
    ],
)
def test_a_path_that_is_none_is_a_mistake_in_one_line(tmp_path, source, cause):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as error:
        export(tmp_path / source, tmp_path / "model.safetensors")
    assert str(error.value) == f"{tmp_path / source} {cause}"


def test_out_may_not_be_a_directory(run, tmp_path):
    with pytest.raises(
        UserError, match=r"is a directory: give the name of a file, such as .*model\.safetensors$"
    ):
        export(run, tmp_path)


def test_a_missing_directory_for_out_is_told_plainly(run, tmp_path):
    out = tmp_path / "none" / "model.safetensors"
    with pytest.raises(UserError, match=f"^{out} cannot be written: No such file or directory$"):
        export(run, out)


def test_a_full_disk_leaves_the_earlier_export(run, tmp_path, monkeypatch):
    out = tmp_path / "model.safetensors"
    export(run / "checkpoints" / "step-00000002", out)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=f"^{out} cannot be written: No space left on device$"):
        export(run, out)
    assert_same_bits(load_file(out), model_of(2))
    assert {path.name for path in tmp_path.iterdir()} == {"run", "model.safetensors"}


def test_a_file_that_vanishes_while_it_is_read_is_told(run, tmp_path, monkeypatch):
    def gone(path, names):
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(tensor_file, "read", gone)
    with pytest.raises(UserError, match=f"^{run} cannot be read: No such file or directory$"):
        export(run, tmp_path / "model.safetensors")


def test_no_gradient_is_asked_of_what_was_loaded(run, tmp_path):
    export(run, tmp_path / "model.safetensors")
    assert not any(tensor.requires_grad for tensor in load_file(tmp_path / "model.safetensors").values())
    assert load_file(tmp_path / "model.safetensors")["layers.5.seen"].dtype == torch.int64

"""One file of tensors: the same bits come back; it is there whole or not at all; any change is found."""

import errno
import os
import stat

import pytest
import torch
from safetensors import SafetensorError

from hpc_train.checkpoint import tensor_file
from hpc_train.checkpoint.manifest import Broken, FileRecord

WEIGHT = torch.arange(12.0).view(3, 4)


def round_trip(path, tensors):
    tensor_file.write(path, tensors)
    return tensor_file.read(path, tensors)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool],
)
def test_every_dtype_comes_back(tmp_path, dtype):
    tensor = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    back = round_trip(tmp_path / "x", {"a": tensor})["a"]
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_numbers_that_are_none_come_back(tmp_path):
    tensor = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    back = round_trip(tmp_path / "x", {"a": tensor})["a"]
    assert torch.equal(back.view(torch.int32), tensor.view(torch.int32))


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param({"a": WEIGHT.t()}, id="transposed"),
        pytest.param({"a": WEIGHT, "b": WEIGHT}, id="tied"),
        pytest.param({"a": WEIGHT, "b": WEIGHT.t()}, id="tied and transposed"),
        pytest.param({"a": WEIGHT, "b": WEIGHT[1:]}, id="overlapping"),
        pytest.param({"a": WEIGHT[:2], "b": WEIGHT[2:]}, id="side by side in one buffer"),
        pytest.param({"a": torch.ones(1).expand(5)}, id="expanded"),
        pytest.param({"a": torch.tensor(3), "b": torch.empty(0), "c": WEIGHT[:0]}, id="scalar and empty"),
        pytest.param({}, id="nothing"),
    ],
)
def test_every_layout_in_memory_comes_back(tmp_path, tensors):
    back = round_trip(tmp_path / "x", tensors)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name], tensor)


def test_parameters_are_written_without_their_graph(tmp_path):
    parameter = torch.nn.Parameter(WEIGHT.clone())
    back = round_trip(tmp_path / "x", {"a": parameter, "b": parameter * 2})
    assert torch.equal(back["b"], WEIGHT * 2)
    assert not back["b"].requires_grad


def test_reading_takes_the_names_asked_for_and_memory_of_its_own(tmp_path):
    path = tmp_path / "x"
    tensor_file.write(path, {"a": WEIGHT, "b": torch.ones(2)})
    back = tensor_file.read(path, ["b"])
    assert list(back) == ["b"]
    back["b"] += 1  # a view of the mapped file would change it, or crash
    assert torch.equal(tensor_file.read(path, ["b"])["b"], torch.ones(2))


def test_the_record_is_that_of_the_file(tmp_path):
    path = tmp_path / "x"
    record = tensor_file.write(path, {"a": WEIGHT})
    assert record.bytes == path.stat().st_size
    tensor_file.check(path, record)


def test_others_may_read_it_as_far_as_the_umask_says(tmp_path):
    """safetensors 0.8 makes files of mode 0600: a colleague could not load a shared checkpoint."""
    (tmp_path / "plain").touch()
    tensor_file.write(tmp_path / "x", {"a": WEIGHT})
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_it_is_on_the_disk_before_it_has_its_name_and_the_name_is_too(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    path = tmp_path / "x"

    def note_fsync(descriptor):
        events.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def note_replace(source, target):
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    tensor_file.write(path, {"a": WEIGHT})
    assert events == ["file", "rename", "directory"]


def test_a_file_system_without_fsync_of_directories_will_do(tmp_path, monkeypatch):
    fsync = os.fsync

    def refuse_directories(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    assert torch.equal(round_trip(tmp_path / "x", {"a": WEIGHT})["a"], WEIGHT)


def fail_save(tensors, path, metadata):
    path.write_bytes(b"half of it")
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_a_full_disk_leaves_the_earlier_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x"
    tensor_file.write(path, {"a": WEIGHT})
    monkeypatch.setattr(tensor_file, "save_file", fail_save)
    with pytest.raises(OSError, match="No space left on device"):
        tensor_file.write(path, {"a": WEIGHT + 1})
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
    assert torch.equal(tensor_file.read(path, ["a"])["a"], WEIGHT)


def test_a_missing_directory_is_told_in_the_words_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        tensor_file.write(tmp_path / "none" / "x", {"a": WEIGHT})
    assert caught.value.strerror == "No such file or directory"


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize(
    ("harm", "cause"),
    [
        (flip, "the checksum of x is wrong: its content has changed"),
        (truncate, r"x has \d+ bytes instead of \d+"),
        (lengthen, r"x has \d+ bytes instead of \d+"),
        (lambda path: path.unlink(), "x is missing: deleted, or written on a host that does not share"),
    ],
)
def test_harm_is_found_and_named(tmp_path, harm, cause):
    path = tmp_path / "x"
    record = tensor_file.write(path, {"a": WEIGHT})
    harm(path)
    with pytest.raises(Broken, match=cause):
        tensor_file.check(path, record)


def test_what_cannot_be_read_is_broken(tmp_path):
    (tmp_path / "x").mkdir()
    size = (tmp_path / "x").stat().st_size
    with pytest.raises(Broken, match=r"x cannot be read: .*Is a directory"):
        tensor_file.check(tmp_path / "x", FileRecord(bytes=size, sha256=""))


def test_reading_what_is_not_there_is_an_error_of_the_system(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(OSError, match="No such file"):
        tensor_file.read(path, ["a"])
    path.write_bytes(b"no tensors")
    with pytest.raises(OSError, match="header"):
        tensor_file.read(path, ["a"])
    tensor_file.write(path, {"a": WEIGHT})
    with pytest.raises(OSError, match="does not contain tensor b"):
        tensor_file.read(path, ["b"])

"""Names of state and files: what is put together comes apart again; only our own files are ours."""

import pytest

from hpc_train.checkpoint.names import (
    basis_name,
    group_file,
    is_model,
    is_ours,
    layer_of,
    optimizer_name,
    residual_name,
    split_optimizer_name,
    split_sum_name,
    step_directory,
    step_of,
)


@pytest.mark.parametrize("step", [0, 7, 99_999_999, 123_456_789_012])
def test_a_step_comes_back_from_its_directory(step):
    assert step_of(step_directory(step)) == step


def test_directories_sort_by_step():
    names = [step_directory(step) for step in (9, 10, 99, 100, 10_000_000)]
    assert names == sorted(names)


@pytest.mark.parametrize(
    "name", ["step-1", "step-0000000x", "step-00000001.old", "xstep-00000001", "", "step-"]
)
def test_other_directories_are_of_no_step(name):
    assert step_of(name) is None


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("layers.0.weight", 0),
        ("layers.12.a.b.c", 12),
        ("optimizer/layers.3.weight/exp_avg", 3),
        ("residual/layers.4.weight", 4),
        ("powersgd/layers.5.weight", 5),
    ],
)
def test_state_tells_its_layer(name, layer):
    assert layer_of(name) == layer


@pytest.mark.parametrize(
    "name", ["weight", "layers.x.weight", "layers.3", "stage.layers.3.weight", "optimizer/a/b", "residual/a"]
)
def test_state_of_no_layer_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"named by layer.*'{name}' is not"):
        layer_of(name)


def test_optimizer_state_is_named_after_its_parameter():
    name = optimizer_name("layers.3.weight", "exp_avg")
    assert name == "optimizer/layers.3.weight/exp_avg"
    assert split_optimizer_name(name) == ("layers.3.weight", "exp_avg")
    assert not is_model(name)


@pytest.mark.parametrize(("name_of", "is_residual"), [(residual_name, True), (basis_name, False)])
def test_what_sums_remember_is_named_after_its_parameter(name_of, is_residual):
    name = name_of("layers.3.weight")
    assert split_sum_name(name) == ("layers.3.weight", is_residual)
    assert split_optimizer_name(name) is None
    assert not is_model(name)


def test_a_parameter_is_no_optimizer_state():
    assert split_sum_name("layers.3.weight") is None
    assert split_optimizer_name("layers.3.weight") is None
    assert is_model("layers.3.weight")


@pytest.mark.parametrize(
    ("layers", "file"),
    [
        ({3}, "layers-3-1f0c.safetensors"),
        ({10, 9, 11}, "layers-9-11-1f0c.safetensors"),
        (range(4), "layers-0-3-1f0c.safetensors"),
    ],
)
def test_a_file_tells_its_layers(layers, file):
    assert group_file(layers, "1f0c") == file
    assert is_ours(file)


@pytest.mark.parametrize(
    "file",
    [".layers-0-3-1f0c.safetensors.tmp", ".manifest.json.tmp", ".tmpX8Qa0k", "layers-0-1f.safetensors"],
)
def test_what_saving_leaves_when_it_is_killed_is_ours(file):
    assert is_ours(file)


@pytest.mark.parametrize(
    "file",
    [
        "manifest.json",
        "model.safetensors",
        "layers-notes.txt",
        "layers-0-3.safetensors.bak",
        ".tmp",
        "README.md",
    ],
)
def test_what_people_put_beside_it_is_not_ours(file):
    assert not is_ours(file)

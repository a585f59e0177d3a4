"""A stage: its layers alone, under the names they have in the whole model."""

import torch
from torch import nn

from hpc_train.pipeline.layers import LayerSpec, build_layer, layer_name, plain_model
from hpc_train.pipeline.stage import Stage

SPECS = [
    LayerSpec(b)
    for b in (lambda: nn.Linear(3, 3), lambda: nn.BatchNorm1d(3), nn.Tanh, lambda: nn.Linear(3, 2))
]


def stage_of(numbers):
    modules = [(layer_name(i), build_layer(SPECS[i], i, seed=4)) for i in numbers]
    return Stage({0: modules}, 1)


def through(stage, inputs):
    for layer in stage.layers.values():
        inputs = layer(inputs)
    return inputs


def test_stages_together_have_the_names_and_values_of_the_plain_model():
    stages = [stage_of([0]), stage_of([1, 2]), stage_of([3])]
    together = {name: value for stage in stages for name, value in stage.state_dict().items()}
    plain = plain_model(SPECS, seed=4).state_dict()
    assert list(together) == list(plain)
    for name, value in plain.items():
        torch.testing.assert_close(together[name], value)
    assert next(name for name, _ in stages[1].named_buffers()) == "layers.1.running_mean"


def test_a_stage_with_several_chunks():
    modules = {i: [(layer_name(i), build_layer(SPECS[i], i, seed=4))] for i in (3, 0)}
    stage = Stage(modules, num_chunks=4)
    assert stage.is_first
    assert stage.is_last
    assert list(stage.chunks) == [0, 3]
    assert [number for number, _ in stage.chunks[3].layers] == [3]
    assert [name for name, _ in stage.named_parameters()] == [
        "layers.0.weight", "layers.0.bias", "layers.3.weight", "layers.3.bias",
    ]  # fmt: skip
    between = Stage({1: [], 2: [(layer_name(2), nn.Tanh())]}, num_chunks=4)
    assert not between.is_first
    assert not between.is_last


def test_parameters_of_a_chunk_each_once_and_trained():
    one = nn.Linear(2, 2)
    chunk = Stage({0: [(layer_name(0), one), (layer_name(1), one)]}, 1).chunks[0]
    assert list(map(id, chunk.parameters)) == [id(one.weight), id(one.bias)]
    one.bias.requires_grad_(False)
    assert list(map(id, chunk.parameters)) == [id(one.weight)]


def test_a_stage_without_parameters():
    stage = stage_of([2])
    assert list(stage.named_parameters()) == []
    assert through(stage, torch.zeros(1, 3)).tolist() == [[0.0] * 3]


def test_evaluating_records_no_graph_and_brings_every_layers_own_mode_back():
    """A BatchNorm that the user has set to eval stays so after an evaluation."""
    stage = stage_of([0, 1, 2, 3])
    stage.layers["1"].eval()
    with stage.evaluating():
        assert not any(module.training for module in stage.modules())
        assert not through(stage, torch.ones(2, 3)).requires_grad
    assert stage.training
    assert stage.layers["0"].training
    assert not stage.layers["1"].training


def test_activations_are_received_where_the_parameters_are():
    assert stage_of([0]).device == torch.device("cpu")
    assert Stage({0: [("layers.0", nn.Linear(1, 1, device="meta"))]}, 1).device == torch.device("meta")
    assert Stage({0: [("layers.0", nn.Tanh())]}, 1, torch.device("meta")).device == torch.device("meta")

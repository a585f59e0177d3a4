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
    return Stage(modules, is_first=0 in numbers, is_last=3 in numbers)


def test_stages_together_have_the_names_and_values_of_the_plain_model():
    stages = [stage_of([0]), stage_of([1, 2]), stage_of([3])]
    together = {name: value for stage in stages for name, value in stage.state_dict().items()}
    plain = plain_model(SPECS, seed=4).state_dict()
    assert list(together) == list(plain)
    for name, value in plain.items():
        torch.testing.assert_close(together[name], value)
    assert next(name for name, _ in stages[1].named_buffers()) == "layers.1.running_mean"
    assert stages[1].layer_names == ("layers.1", "layers.2")


def test_a_stage_without_parameters():
    stage = stage_of([2])
    assert list(stage.named_parameters()) == []
    assert stage(torch.zeros(1, 3)).tolist() == [[0.0] * 3]


def test_evaluating_records_no_graph_and_brings_every_layers_own_mode_back():
    """A BatchNorm that the user has set to eval stays so after an evaluation."""
    stage = stage_of([0, 1, 2, 3])
    stage.layers["1"].eval()
    with stage.evaluating():
        assert not any(module.training for module in stage.modules())
        assert not stage(torch.ones(2, 3)).requires_grad
    assert stage.training
    assert stage.layers["0"].training
    assert not stage.layers["1"].training


def test_activations_are_received_where_the_parameters_are():
    assert stage_of([0]).device == torch.device("cpu")
    assert Stage([("layers.0", nn.Linear(1, 1, device="meta"))], True, True).device == torch.device("meta")
    assert Stage([("layers.0", nn.Tanh())], True, True, torch.device("meta")).device == torch.device("meta")

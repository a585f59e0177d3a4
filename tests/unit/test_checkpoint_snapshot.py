"""Snapshots: state of every kind is taken by name and put back bit for bit, the optimizer's too."""

import pytest
import torch
from checkpoints import EveryKind, Held, assert_same_bits
from torch import nn

from hpc_train.checkpoint import snapshot
from hpc_train.config import OptimizerSettings
from hpc_train.training.optimizer import make_optimizer

OPTIMIZERS = ["adamw", "sgd"]


def test_names_are_those_of_the_layers():
    names = set(Held([1, 2]).train(1).tensors())
    assert {name for name in names if not name.startswith("optimizer/")} == {
        "layers.1.inward.weight",
        "layers.1.outward.weight",
        "layers.1.outward.bias",
        "layers.2.weight",
        "layers.2.bias",
        "layers.2.running_mean",
        "layers.2.running_var",
        "layers.2.num_batches_tracked",
    }
    assert {name for name in names if name.startswith("optimizer/layers.1")} == {
        f"optimizer/layers.1.{parameter}/{key}"
        for parameter in ("inward.weight", "outward.bias")  # the tied one has its state once
        for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_a_frozen_parameter_is_kept_and_has_no_optimizer_state():
    names = Held([4]).train(2).tensors()
    assert "layers.4.weight" in names
    assert "optimizer/layers.4.bias/exp_avg" in names
    assert not any(name.startswith("optimizer/layers.4.weight") for name in names)


def test_a_buffer_that_is_not_persistent_is_left_out():
    names = Held([5]).tensors()
    assert "layers.5.seen" in names
    assert "layers.5.forgotten" not in names


def test_model_and_names_are_those_of_a_plain_state_dict():
    held = Held(range(6)).train(3)
    plain = EveryKind().plain_model()
    plain.load_state_dict(
        {name: t for name, t in held.tensors().items() if not name.startswith("optimizer/")}
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_taken_comes_back_bit_for_bit_and_goes_on_alike(optimizer):
    trained = Held(range(6), optimizer).train(3)
    other = Held(range(6), optimizer, seed=99)
    snapshot.restore(trained.copy(), *other.all)
    assert_same_bits(other.tensors(), trained.tensors())
    assert_same_bits(other.train(2, first=3).tensors(), trained.train(2, first=3).tensors())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_wanted_is_what_is_taken_after_a_step(optimizer):
    held = Held(range(6), optimizer)
    wanted = held.shapes()
    assert wanted == {name: tuple(tensor.shape) for name, tensor in held.train(1).tensors().items()}


def test_amsgrad_wants_its_maximum_too():
    layer = nn.Linear(2, 2)
    parameters = dict(layer.named_parameters())
    optimizer = torch.optim.AdamW(layer.parameters(), amsgrad=True)
    wanted = snapshot.shapes(parameters, {}, optimizer)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert wanted.keys() == snapshot.take(parameters, {}, optimizer).keys()
    assert "optimizer/weight/max_exp_avg_sq" in wanted


def test_plain_sgd_keeps_nothing():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    parameters = dict(layer.named_parameters())
    assert snapshot.take(parameters, {}, optimizer).keys() == {"weight", "bias"}
    assert snapshot.shapes(parameters, {}, optimizer) == {"weight": (2, 2), "bias": (2,)}


def test_an_optimizer_before_its_first_step_has_no_state():
    held = Held([0])
    assert held.tensors().keys() == {"layers.0.weight", "layers.0.bias"}
    other = Held([0]).train(2)
    snapshot.restore(held.copy(), *other.all)
    assert_same_bits(other.tensors(), held.tensors())
    assert_same_bits(other.train(1).tensors(), held.train(1).tensors())


def test_a_parameter_without_a_gradient_has_no_momentum():
    """SGD keeps None for it."""
    held = Held([0], "sgd")
    held.parameters["layers.0.weight"].grad = torch.ones(4, 4)
    held.optimizer.step()
    assert [name for name in held.tensors() if name.startswith("optimizer/")] == [
        "optimizer/layers.0.weight/momentum_buffer"
    ]


def test_a_stage_without_anything_to_train_has_no_optimizer():
    held = Held([3])
    assert held.optimizer is None
    assert held.tensors() == held.shapes() == {}
    snapshot.restore({}, *held.all)


def test_the_snapshot_shares_the_memory_of_the_model():
    held = Held([0])
    taken = held.tensors()["layers.0.weight"]
    with torch.no_grad():
        held.parameters["layers.0.weight"].fill_(7)
    assert torch.equal(taken, torch.full((4, 4), 7.0))
    assert not taken.requires_grad


def test_dtypes_stay_those_of_the_model():
    """A checkpoint of fp32 loads into a model of fp64; what counts steps stays as it is."""
    trained = Held([0]).train(2)
    other = Held([0])
    other.stage.double()
    other.optimizer = make_optimizer(OptimizerSettings(), other.parameters.values())
    snapshot.restore(trained.copy(), *other.all)
    taken = other.tensors()
    assert taken["layers.0.weight"].dtype == torch.float64
    assert taken["optimizer/layers.0.weight/exp_avg"].dtype == torch.float64
    assert taken["optimizer/layers.0.weight/step"].dtype == torch.float32
    assert torch.equal(taken["layers.0.weight"].float(), trained.tensors()["layers.0.weight"])


def test_the_learning_rate_is_the_settings_and_not_the_snapshots():
    trained, other = Held([0]).train(2), Held([0])
    for group in other.optimizer.param_groups:
        group["lr"] = 0.125
    snapshot.restore(trained.copy(), *other.all)
    assert {group["lr"] for group in other.optimizer.param_groups} == {0.125}


def test_a_missing_parameter_is_told_by_name():
    tensors = Held([0]).copy()
    del tensors["layers.0.bias"]
    with pytest.raises(KeyError, match=r"layers\.0\.bias"):
        snapshot.restore(tensors, *Held([0]).all)


class Remembers(nn.Module):
    def get_extra_state(self):
        return {"words": 3}

    def set_extra_state(self, state):
        pass


def test_state_that_is_no_tensor_is_refused_by_name():
    with pytest.raises(TypeError, match=r"0\._extra_state is a dict: a checkpoint keeps tensors only"):
        snapshot.buffers_of(nn.Sequential(Remembers()))
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state[layer.weight]["when"] = 3
    with pytest.raises(TypeError, match="SGD keeps when as int: not a tensor"):
        snapshot.take(dict(layer.named_parameters()), {}, optimizer)


def test_an_optimizer_whose_state_is_not_known_is_refused():
    layer = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="the state of Adagrad is not known: use Adam, AdamW or SGD"):
        snapshot.shapes(dict(layer.named_parameters()), {}, torch.optim.Adagrad(layer.parameters()))

"""One rank's parameters and optimizer state for all."""

import copy
import math

import pytest
import torch
from torch import nn

from hpc_train.comm.loopback import run_ranks
from hpc_train.errors import UserError
from hpc_train.gradients.broadcast import (
    broadcast_state,
    broadcast_tensor,
    check_same_tensors,
    named_tensors,
)
from hpc_train.grid import Grid

CPU = torch.device("cpu")


def collective(world):
    return world.collective(Grid(world.size, 1), CPU)


def broadcast(world, params, root):
    tensors = named_tensors(params)
    check_same_tensors(tensors, root, world.control)
    among_all = collective(world)
    for tensor in tensors.values():
        broadcast_tensor(tensor, root, among_all)


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4, dtype=torch.float64),
        torch.randn(5).bfloat16(),
        torch.tensor(7),  # BatchNorm's num_batches_tracked
        torch.tensor([True, False, True]),
        torch.randn(2, dtype=torch.complex64),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(4, 6)[:, ::2],
        torch.zeros(0, 3),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}{tensor.stride()}",
)
def test_tensors_of_every_kind_arrive(tensor, root):
    def body(world):
        mine = tensor.clone() if world.rank == root else torch.zeros_like(tensor)
        place = mine.data_ptr()
        broadcast(world, {"t": mine}, root)
        assert mine.data_ptr() == place
        return mine

    for found in run_ranks(3, body, timeout_s=30):
        assert found.equal(tensor)


@pytest.mark.parametrize("params", [nn.Module.state_dict, nn.Module.named_parameters])
def test_models_become_alike(params):
    models = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    expected = copy.deepcopy(models[1].state_dict())
    run_ranks(3, lambda world: broadcast(world, params(models[world.rank]), root=1), timeout_s=30)
    for model in models:
        assert all(model.state_dict()[name].equal(expected[name]) for name, _ in model.named_parameters())
        assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([torch.zeros(1)], "not Tensor: give model.state_dict()"),
        ({"a": 1.0}, "a is a float, not a tensor"),
    ],
)
def test_what_is_no_tensor_is_refused(params, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")):
        named_tensors(params)


def test_none_entries_are_passed_over():
    assert list(named_tensors([("a", None), ("b", torch.zeros(1))])) == ["b"]


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            {"w": torch.zeros(2), "b": torch.zeros(4)},
            r"rank 1 has b float32 \[4\] where rank 0 has b float32 \[3\]",
        ),
        ({"w": torch.zeros(2)}, r"rank 1 has nothing more where rank 0 has b float32 \[3\]"),
        ({"w": torch.zeros(2).double(), "b": torch.zeros(3)}, r"rank 1 has w float64"),
    ],
)
def test_models_that_differ_are_refused_on_all_ranks(odd, message):
    """MPI would fail with a truncated message, or fill the wrong tensor."""
    same = {"w": torch.zeros(2), "b": torch.zeros(3)}

    def body(world):
        with pytest.raises(UserError, match=message):
            broadcast(world, odd if world.rank == 1 else same, root=0)

    run_ranks(3, body, timeout_s=30)


def test_a_root_that_does_not_exist_is_refused():
    def body(world):
        with pytest.raises(UserError, match="root_rank=2 is not one of 2 ranks: use 0 to 1"):
            broadcast(world, {}, root=2)
        with pytest.raises(UserError, match="root_rank=-1 is not"):
            broadcast_state({}, -1, world.control, collective(world))

    run_ranks(2, body, timeout_s=30)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95)),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, max_iter=3),
    ],
)
def test_fresh_ranks_go_on_like_the_resumed_one(make):
    """Rank 0 has loaded a checkpoint; the optimizers of the others have no state at all."""

    def train(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    def body(world):
        model = nn.Linear(3, 2)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        optimizer = make(model.parameters())
        if world.rank == 0:
            train(model, optimizer)
        optimizer.load_state_dict(
            broadcast_state(optimizer.state_dict(), 0, world.control, collective(world))
        )
        broadcast(world, model.state_dict(), root=0)
        train(model, optimizer)
        return model.state_dict(), optimizer.state_dict()["param_groups"]

    (expected, groups), *others = run_ranks(3, body, timeout_s=30)
    for found, found_groups in others:
        assert found_groups == groups
        assert all(found[name].equal(expected[name]) for name in expected)


def test_trees_of_plain_values_arrive_unchanged():
    tree = {
        "state": {0: {"old": [torch.ones(2), None], "step": 3}},
        "groups": [{"betas": (0.9, math.inf), "on": True}],
    }
    found = run_ranks(
        2,
        lambda world: broadcast_state(tree if world.rank == 1 else {}, 1, world.control, collective(world)),
        timeout_s=30,
    )
    for copy_ in found:
        assert copy_["state"][0].pop("old")[0].tolist() == [1.0, 1.0]
        assert copy_ == {"state": {0: {"step": 3}}, "groups": [{"betas": (0.9, math.inf), "on": True}]}


def test_state_that_is_no_plain_value_is_named():
    def body(world):
        state = {"state": {}, "param_groups": [{"rule": print}]}
        with pytest.raises(UserError, match=r"state\['param_groups'\]\[0\]\['rule'\] is a builtin"):
            broadcast_state(state, 0, world.control, collective(world))

    run_ranks(1, body, timeout_s=30)

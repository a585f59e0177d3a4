"""A model, optimizers and steps on several ranks for the tests of DistributedOptimizer."""

import copy

import torch
from torch import nn

from hpc_train.comm.loopback import run_ranks
from hpc_train.gradients.distributed_optimizer import DistributedOptimizer
from hpc_train.grid import Grid

CPU = torch.device("cpu")


class Two(nn.Module):
    """Two layers that can be used apart, and one that never is."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def two():
    torch.manual_seed(0)
    return Two()


def batch(*key):
    """Samples of their own for every key."""
    return torch.randn(
        2, 4, generator=torch.Generator().manual_seed(sum(7**i * k for i, k in enumerate(key)))
    )


def adamw(parameters):
    # Weight decay moves a parameter whose gradient is zero, and leaves alone one without gradient.
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def wrapped(world, model, make=sgd, named=True, **options):
    return DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters() if named else None,
        collective=world.collective(Grid(world.size, 1), CPU),
        **{"bucket_bytes": 64, **options},
    )


def on_ranks(num_ranks, model, body):
    """The parameters of each rank after `body(world, its copy of the model)`."""

    def run(world):
        mine = copy.deepcopy(model)
        body(world, mine)
        return mine.state_dict()

    return run_ranks(num_ranks, run, timeout_s=60)


def alone(model, windows, make=sgd):
    """One process: per step the mean over ranks of the sums of their passes.  `windows[step][rank]`."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    for window in windows:
        optimizer.zero_grad()
        for passes in window:
            for x in passes:
                (model(x).square().sum() / len(window)).backward()
        optimizer.step()
    return model.state_dict()


def assert_same(ranks, expected, **tolerance):
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    for found in ranks:
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], **tolerance)


def train(optimizer, model, windows):
    for passes in windows:
        optimizer.zero_grad()
        for x in passes:
            model(x).square().sum().backward()
        optimizer.step()

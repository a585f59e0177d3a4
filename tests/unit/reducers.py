"""Models, samples and sums on several ranks for the tests of the reducer."""

import copy
import threading

import torch
from torch import nn

from hpc_train.comm.loopback import run_ranks
from hpc_train.gradients.reducer import Reducer
from hpc_train.grid import Grid

CPU = torch.device("cpu")


class Tied(nn.Module):
    """One matrix, used first and last."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.outward = nn.Linear(6, 6)
        self.outward.weight = self.inward.weight

    def forward(self, x):
        return self.outward(self.middle(self.inward(x).tanh()).tanh())


class Branching(nn.Module):
    """The middle layer is used for some inputs only: a branch that depends on the data."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        if x[0, 0] > 0:
            x = self.sometimes(x).tanh()
        return self.last(x)


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def frozen():
    model = plain()
    model[2].weight.requires_grad_(False)
    return model


def conv():
    layers = nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), *layers).to(memory_format=torch.channels_last)


def two_dtypes():
    return nn.Sequential(nn.Linear(6, 6), ToDouble(), nn.Linear(6, 3).double())


class ToDouble(nn.Module):
    def forward(self, x):
        return x.double()


MODELS = [plain, Tied, frozen, conv, Branching, two_dtypes]


def samples(num):
    return torch.randn(num, 6, generator=torch.Generator().manual_seed(1))


def backward(model, batch):
    if len(batch):
        model(batch).square().sum().backward()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def alone(model, batches):
    """The gradients of one process that runs all the batches."""
    model = copy.deepcopy(model)
    for batch in batches:
        backward(model, batch)
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    return gradients(model)


def build(make):
    torch.manual_seed(0)
    return make()


def summed(model, passes_by_rank, steps=1, wrap=lambda collective: collective, **options):
    """The gradients of each rank after its passes; the same samples in every step."""

    def body(world):
        mine = copy.deepcopy(model)
        collective = wrap(world.collective(Grid(world.size, 1), CPU))
        reducer = Reducer(list(mine.named_parameters()), collective, **{"bucket_bytes": 64, **options})
        for _ in range(steps):
            reducer.begin(len(passes_by_rank[world.rank]))
            for batch in passes_by_rank[world.rank]:
                backward(mine, batch)
            reducer.finish()
        reducer.close()
        return gradients(mine)

    return run_ranks(len(passes_by_rank), body, timeout_s=30)


def assert_same(ranks, expected, **tolerance):
    for found in ranks:
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], **tolerance)


class Recorded:
    """A collective that notes which buffer is summed in which thread, and can stop there."""

    def __init__(self, inner, threaded=True, on_sum=lambda: None):
        self._inner = inner
        self._on_sum = on_sum
        self.threaded = threaded
        self.sums = []
        self.lengths = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def sum_(self, buffer, wire, residual=None):
        self._on_sum()
        self._inner.sum_(buffer, wire, residual)
        self.lengths.append(buffer.numel())
        self.sums.append((buffer.data_ptr(), threading.current_thread().name))

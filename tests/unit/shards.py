"""A model with parameters of every kind, trained with a sharded or a whole optimizer, for their tests."""

from functools import partial

import torch
from torch import nn

from hpc_train.checkpoint.store import Store
from hpc_train.comm.loopback import run_ranks
from hpc_train.config import Settings
from hpc_train.pipeline.layers import LayerSpec
from hpc_train.tasks.task import Task
from hpc_train.training.layout import Layout
from hpc_train.training.worker import Worker

PAIR = 2  # samples of a replica's share


class Scaled(nn.Module):
    """A scalar, a parameter without elements, and buffers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x):
        return self.norm(x) * self.scale + self.none.sum()


class Twice(nn.Module):
    """One matrix under two names."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(64, 64, bias=False)
        self.outward = nn.Linear(64, 64)
        self.outward.weight = self.inward.weight

    def forward(self, x):
        return self.outward(self.inward(x).tanh()).tanh()


def conv():
    """[samples, 64] -> [samples, 128], with weights in the memory format of images."""
    layer = nn.Sequential(nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 8, 3, padding=1), nn.Flatten())
    return layer.to(memory_format=torch.channels_last)


def frozen():
    layer = nn.Linear(128, 40)
    layer.weight.requires_grad_(False)
    return layer


class Mixed(Task):
    """Some 13,000 parameters, so that their buckets have more than one block for each of 4 replicas."""

    def layers(self):
        builders = [partial(nn.Linear, 6, 64), Scaled, Twice, conv, frozen, partial(nn.Linear, 40, 70)]
        return [LayerSpec(builder, cost=1.0) for builder in builders]

    def loss(self, output, target):
        return (output - target).square().mean(dim=1)


def settings(sharded, task="mixed", optimizer=(), stages=1, **gradients):
    return Settings.model_validate(
        {
            "task": task,
            "grid": {"stages": stages},
            "train": {"threads": 1},
            "optimizer": {"sharded": sharded, "weight_decay": 0.1, **dict(optimizer)},
            "gradients": {"bucket_bytes": "20kB", **gradients},
        }
    )


class Run:
    """One rank's worker, driven by samples that depend on the step and the replica alone."""

    def __init__(self, chosen, world, task=None):
        self.world = world
        task = task or Mixed()
        layout = Layout(chosen, task, world)
        self.worker = Worker(chosen, task, world, layout)
        self.replicas = layout.grid.replicas
        self.outcomes = []
        self.done = 0

    def backward(self, factor=1.0):
        generator = torch.Generator().manual_seed(100 * self.done + self.worker.place.replica)
        samples = torch.randn(PAIR, 6, generator=generator), torch.randn(PAIR, 70, generator=generator)
        samples = samples[0], samples[1] * factor
        self.outcomes.append(self.worker.backward([samples], PAIR * self.replicas))

    def train(self, steps, factor=1.0):
        for _ in range(steps):
            self.backward(factor)
            self.worker.update(self.outcomes[-1], learning_rate=0.01)
            self.done += 1
        return self

    def parameters(self):
        return {name: p.detach().clone() for name, p in self.worker.parameters.items()}

    def save(self, directory):
        tensors = self.worker.take_state()
        Store(directory, 3).save(1, tensors, {"done": self.done}, self.world.control, bool(tensors))
        return tensors

    def load(self, directory):
        wanted = self.worker.state_shapes()
        loaded = Store(directory, 3).load("auto", wanted, self.world.control, cut=self.worker.cut_state)
        self.worker.restore_state(loaded.tensors)
        self.done = loaded.state["done"]
        return self

    def state_bytes(self):
        torchs = self.worker.optimizer.torch
        states = torchs.state.values() if torchs is not None else ()
        return sum(t.numel() * t.element_size() for state in states for t in state.values() if t.dim())


def on_ranks(num_ranks, body, chosen, task=None, hosts=None):
    """`body(run)` on every rank; the workers are closed afterwards."""

    def on_one(world):
        run = Run(chosen, world, task)
        result = body(run)
        run.worker.close()
        return result

    return run_ranks(num_ranks, on_one, timeout_s=60, hosts=hosts)


def state(num_ranks, body, chosen):
    """All that a checkpoint holds after `body(run)`, by name, whoever writes it."""

    def take(run):
        body(run)
        return {name: tensor.clone() for name, tensor in run.worker.take_state().items()}

    whole = {}
    for part in on_ranks(num_ranks, take, chosen):
        assert not whole.keys() & part.keys()
        whole.update(part)
    return whole

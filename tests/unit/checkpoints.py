"""Layers with state of every kind, trained a little on any cut of the model, for tests of checkpoints."""

import zlib
from functools import cache

import torch
from torch import nn

from hpc_train.checkpoint import snapshot
from hpc_train.checkpoint.store import Store
from hpc_train.comm.loopback import run_ranks
from hpc_train.config import OptimizerSettings
from hpc_train.pipeline.layers import LayerSpec, build_layer, layer_name
from hpc_train.pipeline.partition import split_by_hand
from hpc_train.pipeline.stage import Stage
from hpc_train.tasks.task import Task
from hpc_train.training.optimizer import make_optimizer

STATE = {"step": 4, "epoch": 1, "offset": 17, "seed": 3, "settings": "[train]\nsteps = 9\n", "rate": 0.1}


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(4, 4, bias=False)
        self.outward = nn.Linear(4, 4)
        self.outward.weight = self.inward.weight

    def forward(self, x):
        return self.outward(self.inward(x))


class Scratch(nn.Module):
    """A parameter without dimensions, one without elements, a buffer to keep and one to forget."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("seen", torch.tensor([1, 2], dtype=torch.int64))
        self.register_buffer("forgotten", torch.zeros(2), persistent=False)

    def forward(self, x):
        return x * self.scale


def frozen():
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    return layer


class EveryKind(Task):
    """Six layers; layer 3 has no state."""

    def layers(self):
        builders = [lambda: nn.Linear(4, 4), Tied, lambda: nn.BatchNorm1d(4), nn.Tanh, frozen, Scratch]
        return [LayerSpec(builder) for builder in builders]


class Held:
    """What one rank holds: some layers, and the optimizer of their parameters."""

    def __init__(self, layers, optimizer="adamw", seed=0, specs=None):
        specs = specs or EveryKind().layers()
        modules = [(layer_name(i), build_layer(specs[i], i, seed)) for i in layers]
        self.stage = Stage({0: modules}, 1)
        self.parameters = dict(self.stage.named_parameters())
        self.buffers = snapshot.buffers_of(self.stage)
        self.optimizer = make_optimizer(OptimizerSettings(name=optimizer), self.parameters.values())

    @property
    def all(self):
        return self.parameters, self.buffers, self.optimizer

    def train(self, steps, first=0):
        """Steps whose gradients depend on names and step alone: the same on every cut of the model."""
        for step in range(first, first + steps):
            for name, parameter in self.parameters.items():
                if parameter.requires_grad:
                    parameter.grad = noise(f"{name}/{step}", parameter.shape)
            for name, buffer in self.buffers.items():
                if name not in tied_names(self.stage):
                    buffer.copy_(noise(f"{name}/{step}", buffer.shape) * 100)
            if self.optimizer is not None:
                self.optimizer.step()
        return self

    def tensors(self):
        return snapshot.take(*self.all)

    def copy(self):
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def shapes(self):
        return snapshot.shapes(*self.all)


def noise(name, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


def tied_names(module):
    return set(dict(module.named_parameters(remove_duplicate=False))) - set(dict(module.named_parameters()))


def assert_same_bits(left, right):
    assert list(sorted(left)) == list(sorted(right))
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def cut(split):
    """The layers of each rank; `split[r]` of them stand on rank r."""
    return split_by_hand(split, sum(split), len(split))


def save(directory, split, step=4, keep=3, state=STATE, optimizer="adamw", steps=None):
    """Train `steps` (as many as `step` says) steps and save them, on as many ranks as `split` has parts."""

    def body(world):
        held = Held(cut(split)[world.rank], optimizer).train(step if steps is None else steps)
        return Store(directory, keep).save(step, held.tensors(), state, world.control, writer=True)

    return run_ranks(len(split), body)[0]


def load(directory, split, which="auto", optimizer="adamw"):
    """(Loaded, what each rank holds then, rank 0's notes), by rank; None when there was nothing to load."""

    def body(world):
        notes = []
        held = Held(cut(split)[world.rank], optimizer, seed=99)
        loaded = Store(directory, 3).load(which, held.shapes(), world.control, notes.append)
        if loaded is None:
            return None, held, notes
        snapshot.restore(loaded.tensors, *held.all)
        return loaded, held, notes

    return run_ranks(len(split), body)


@cache
def whole(steps, optimizer="adamw"):
    """All state of the whole model after some steps, as one rank alone has it; not to be changed."""
    return Held(range(6), optimizer).train(steps).copy()


def joined(parts):
    """All ranks' state together; no name stands on two ranks."""
    together = {}
    for _, held, _ in parts:
        tensors = held.copy()
        assert not together.keys() & tensors.keys()
        together.update(tensors)
    return together


def on_disk(directory):
    """Every file below, by path, with its content."""
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}

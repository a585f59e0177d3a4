"""What a model is to the pipeline: a list of layers, each built only where it is held."""

import hashlib
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hpc_train.errors import UserError

_one_builder = threading.Lock()  # torch's default generator is one for the process


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model, not built yet.

    Args:
        build: makes the module.  Its output is the next layer's input: a tensor; a tuple, whose parts are
            the arguments of the next layer's forward; a dict, whose values are its keyword arguments. Parts
            may be tensors of any dtype, None, numbers, texts, and tuples, lists and dicts of such.
        title: what people read in drawings; state is named by position, `layers.3.weight`.
        cost: time of one sample's forward and backward relative to the other layers; by default the
            number of parameters stands for it.
        tied: parameters that are one with other layers', wherever those stand: {"logits.weight": "embedding"}
            gives this layer's own name of each, and a name that all which are one have in common. A plain
            "embedding" is for layers that share all their parameters.
    """

    build: Callable[[], nn.Module]
    title: str = ""
    cost: float | None = None
    tied: str | Mapping[str, str] = ""


def layer_name(index: int) -> str:
    """The name under which the state of layer `index` is kept on every grid, and in plain PyTorch."""
    return f"layers.{index}"


def build_layer(spec: LayerSpec, index: int, seed: int) -> nn.Module:
    """Build a layer with random numbers of its own: the same weights on whatever rank it stands, whether
    its build draws them from torch, numpy or `random`.
    """
    digest = hashlib.sha256(f"{seed}/{layer_name(index)}".encode()).digest()
    with _one_builder, torch.random.fork_rng(devices=[]):
        before = random.getstate(), np.random.get_state()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        random.seed(digest)
        np.random.seed(int.from_bytes(digest[:4], "little"))
        try:
            return spec.build()
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


class PlainModel(nn.Module):
    """All layers in one plain PyTorch module, with the names that checkpoints and exports use."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Any) -> Any:
        """Pass `inputs` through every layer."""
        for layer in self.layers:
            inputs = apply_layer(layer, inputs)
        return inputs


def apply_layer(layer: nn.Module, inputs: Any) -> Any:
    """Call a layer; a tuple is its arguments, a dict its keyword arguments."""
    if isinstance(inputs, tuple):
        return layer(*inputs)
    return layer(**inputs) if isinstance(inputs, dict) else layer(inputs)


class Tied(NamedTuple):
    """One of the parameters that are one: a layer's number, its name within the layer, and whether the one
    that owns the values is trained (else it is frozen, and so are all).
    """

    layer: int
    name: str
    trained: bool = True

    def __str__(self) -> str:
        return f"{layer_name(self.layer)}.{self.name}"


Tie = tuple[Tied, ...]  # the first one owns the values: its state is kept, and trained


def find_ties(specs: Sequence[LayerSpec]) -> list[Tie]:
    """Which parameters are one, from what the specs say, in the order of the layers.

    Raises:
        UserError: there is no such parameter, or those which are one differ in shape.
    """
    members: dict[str, list[Tied]] = {}
    shapes: dict[Tied, torch.Size] = {}
    for index, spec in enumerate(specs):
        if not spec.tied:
            continue
        held = dict(_without_memory(spec).named_parameters())
        names = spec.tied
        if isinstance(names, str):
            names = {name: f"{spec.tied} {number}" for number, name in enumerate(held)}
        for name, common in names.items():
            if name not in held:
                raise UserError(
                    f"layer {index} ties {name!r}, but its parameters are {', '.join(held) or 'none'}: "
                    "name one of them in LayerSpec.tied"
                )
            tie = members.setdefault(common, [])
            tie.append(Tied(index, name, tie[0].trained if tie else held[name].requires_grad))
            shapes[tie[-1]] = held[name].shape
    for one, *others in members.values():
        for other in others:
            if shapes[one] != shapes[other]:
                raise UserError(
                    f"{one} {list(shapes[one])} and {other} {list(shapes[other])} are tied: "
                    "they must have the same shape"
                )
    return [tuple(tie) for tie in members.values() if len(tie) > 1]


def tie_within(layers: Mapping[int, nn.Module], ties: Sequence[Tie]) -> None:
    """Where several of a tie are among these layers, by number, make them the first one's parameter."""
    for tie in ties:
        here = [tied for tied in tie if tied.layer in layers]
        if here:
            parameter = parameter_of(layers, here[0]).requires_grad_(here[0].trained)
            for tied in here[1:]:
                module, _, name = tied.name.rpartition(".")
                setattr(layers[tied.layer].get_submodule(module), name, parameter)


def parameter_of(layers: Mapping[int, nn.Module], tied: Tied) -> nn.Parameter:
    """The parameter in these layers, by number."""
    return layers[tied.layer].get_parameter(tied.name)


def plain_model(specs: Sequence[LayerSpec], seed: int = 0) -> PlainModel:
    """The whole model, built with the same weights that the grid's stages get."""
    modules = {index: build_layer(spec, index, seed) for index, spec in enumerate(specs)}
    tie_within(modules, find_ties(specs))
    return PlainModel(list(modules.values()))


def count_parameters(spec: LayerSpec) -> int:
    """The parameters of a layer, without the memory for them.

    Raises:
        UserError: the layer reads values while it is built, which are not there without memory.
    """
    return sum(p.numel() for p in _without_memory(spec).parameters())


def shared_layers(specs: Sequence[LayerSpec]) -> list[tuple[int, int]]:
    """Pairs of layers that hold the same parameter (tied weights), found without the memory for them."""
    built = [built_without_memory(spec) for spec in specs]
    first: dict[nn.Parameter, int] = {}
    pairs = {
        (first.setdefault(p, index), index)
        for index, layer in enumerate(built)
        for p in (layer.parameters() if layer is not None else ())
    }
    return sorted(pair for pair in pairs if pair[0] != pair[1])


def _without_memory(spec: LayerSpec) -> nn.Module:
    layer = built_without_memory(spec)
    if layer is None:
        raise UserError(
            f"layer {spec.title or spec.build} reads values while it is built, and cannot be counted without "
            "the memory for it: compute them before, outside of its build"
        )
    return layer


def built_without_memory(spec: LayerSpec) -> nn.Module | None:
    """The layer on torch's meta device; None where its build reads values (and so makes new ones)."""
    with torch.device("meta"):
        try:
            return spec.build()
        except RuntimeError:
            return None

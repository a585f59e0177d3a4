"""Measures what each layer of a task costs, one layer after the other, on this rank's device.

A layer runs as it does in a pipeline: its input enters a graph of its own, and its backward is made in
two halves. Only one layer is built at a time, so that a model too large for one rank can be measured.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import default_collate

from hpc_train.config import OptimizerSettings, Settings
from hpc_train.data.loader import to_device
from hpc_train.pipeline.boundary import enter, leave
from hpc_train.pipeline.later import Later
from hpc_train.pipeline.layers import LayerSpec, Tie, apply_layer, build_layer, find_ties, tie_within
from hpc_train.pipeline.values import put_together, take_apart, tensors_of
from hpc_train.planning.profile import Curve, LayerProfile, Profile
from hpc_train.tasks.task import Task
from hpc_train.training.optimizer import make_optimizer

_REPEATS = 3  # at least, after one to warm up; the median counts
_MOST_REPEATS = 20
_ENOUGH_S = 0.1  # of repeats: a machine that others use has slow moments
_LONG_S = 1.0  # a layer that takes so long is measured once
_GROW_BELOW_S = 0.1  # of a layer: one that takes longer is not measured with larger micro-batches
_STEP = 4  # from one size to the next
_MOST_SIZES = 5
_OPTIMIZER_NUMBERS = 2**20


@dataclass
class _Measured:
    """A layer with one number of samples."""

    forward_s: float
    input_s: float
    weight_s: float
    kept_bytes: int
    output: Any
    known: dict[int, int]  # memory of the output that the layer keeps, and its bytes

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.input_s + self.weight_s


@dataclass
class _Flow:
    """A micro-batch on its way through the layers."""

    samples: int
    value: Any
    target: Any
    known: set[int] = field(default_factory=set)  # memory that the layer before keeps already


def measure(
    settings: Settings,
    task: Task,
    device: torch.device,
    source: str = "",
    progress: Callable[[str], None] = lambda line: None,
) -> Profile:
    """The profile of a task's model, for micro-batches of several sizes; see `_sizes`.

    Args:
        settings: their `batch` and `optimizer` count.
        task: its first training samples are what the layers are run with.
        device: where.
        source: for people: what is measured on.
        progress: told a line before each layer.

    A layer whose `build` is the same as an earlier one's, or a `partial` of the same, with an input of the
    same form, is not measured again.
    """
    specs = task.layers()
    ties = find_ties(specs)
    flows = [_first(task, samples, device) for samples in _sizes(settings)]
    known: dict[Any, tuple[LayerProfile, list[_Measured]]] = {}
    layers = []
    for index, spec in enumerate(specs):
        last = index == len(specs) - 1
        frozen = tuple(tied.name for tie in ties for tied in tie if tied.layer == index and not tied.trained)
        key = (_rule(spec.build), frozen, last, tuple(_form(flow) for flow in flows))
        if key not in known:
            progress(f"measuring layer {index + 1} of {len(specs)}")
            layer = build_layer(spec, index, settings.seed).to(device)
            tie_within({index: layer}, ties)
            known[key] = _measure_layer(layer, flows, task.loss if last else None, device)
        profile, measured = known[key]
        layers.append(profile.model_copy(update={"title": spec.title or f"layer {index}"}))
        del flows[len(measured) :]
        for flow, one in zip(flows, measured, strict=True):
            flow.value, flow.known = one.output, set(one.known)
    per_byte, seconds = _measure_optimizer(settings.optimizer, device)
    return Profile(
        layers=tuple(_with_ties(layers, specs, ties)),
        optimizer_bytes_a_byte=per_byte,
        optimizer_s_a_byte=seconds,
        source=source,
    )


def _sizes(settings: Settings) -> list[int]:
    """That of the settings, and about a quarter; where it is left open more, up to the whole batch."""
    batch = settings.batch
    few = max(min(batch.micro_batch, 2), batch.micro_batch // _STEP)  # BatchNorm refuses a single sample
    sizes = [few, max(batch.micro_batch, few + 1)]
    is_open = "micro_batch" not in batch.model_fields_set
    while is_open and len(sizes) < _MOST_SIZES and sizes[-1] * _STEP <= batch.size:
        sizes.append(sizes[-1] * _STEP)
    return sizes


def _first(task: Task, samples: int, device: torch.device) -> _Flow:
    """The first samples of the task, repeated where there are too few."""
    dataset = task.dataset("train")
    inputs, target = default_collate([dataset[i % len(dataset)] for i in range(samples)])
    return _Flow(samples, to_device(inputs, device), to_device(target, device))


def _rule(build: Callable[[], nn.Module]) -> Any:
    """What is equal for equal partials, which themselves are equal to nothing else."""
    if not isinstance(build, partial):
        return build
    rule = build.func, build.args, tuple(build.keywords.items())
    try:
        hash(rule)
    except TypeError:
        return build
    return rule


def _form(flow: _Flow) -> Any:
    """What a layer's cost depends on: also whether the layer before keeps its input already."""
    structure, tensors = take_apart(flow.value)
    return structure, tuple(
        (t.dtype, tuple(t.shape), t.requires_grad, t.untyped_storage().data_ptr() in flow.known)
        for t in tensors
    )


def _measure_layer(
    layer: nn.Module, flows: Sequence[_Flow], loss: Any, device: torch.device
) -> tuple[LayerProfile, list[_Measured]]:
    measured: list[_Measured] = []
    for flow in flows:
        if len(measured) >= 2 and measured[-1].total_s > _GROW_BELOW_S:
            break
        try:
            measured.append(_measure_flow(layer, flow, loss, device))
        except torch.OutOfMemoryError:
            if len(measured) < 2:
                raise
            break
    sizes = [flow.samples for flow in flows[: len(measured)]]
    most, most_samples = measured[-1], sizes[-1]

    def curve(seconds: Iterable[float]) -> Curve:
        return Curve.through(list(zip(sizes, seconds, strict=True)))

    parameters = list(layer.parameters())
    profile = LayerProfile(
        forward=curve(one.forward_s for one in measured),
        input=curve(one.input_s for one in measured),
        weight=curve(one.weight_s for one in measured),
        activation_bytes=most.kept_bytes / most_samples,
        output_bytes=0 if loss else sum(map(_num_bytes, tensors_of(most.output))) / most_samples,
        kept_output_bytes=sum(most.known.values()) / most_samples,
        parameter_bytes=sum(map(_num_bytes, parameters)),
        frozen_bytes=sum(_num_bytes(p) for p in parameters if not p.requires_grad),
    )
    return profile, measured


def _measure_flow(layer: nn.Module, flow: _Flow, loss: Any, device: torch.device) -> _Measured:
    structure, tensors = take_apart(flow.value)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    times: list[tuple[float, float, float]] = []
    while len(times) < 1 + _REPEATS or (
        len(times) < 1 + _MOST_REPEATS and sum(map(sum, times[1:])) < _ENOUGH_S
    ):
        kept: dict[int, int] = {}
        entered, doors = enter([t.detach() for t in tensors], [t.requires_grad for t in tensors])
        later = Later()
        marks = [_now(device)]
        with later, saved_tensors_hooks(partial(_note, kept), lambda tensor: tensor):
            output = apply_layer(layer, put_together(structure, entered))
            roots = _roots(output, flow.target, loss)
        marks.append(_now(device))
        if roots:
            gates = [door.gate for door in doors if door.gate is not None]
            later.backward_inputs(roots, gates, parameters)
            marks.append(_now(device))
            later.backward_weights()
            marks.append(_now(device))
        times.append(_spans(marks))
        layer.zero_grad(set_to_none=True)
        if sum(times[-1]) > _LONG_S:
            break
    repeats = times[1:] or times
    forward_s, input_s, weight_s = (statistics.median(column) for column in zip(*repeats, strict=True))
    counted = sum(size for memory, size in kept.items() if memory not in own and memory not in flow.known)
    result = output if loss is None else None
    outputs = {t.untyped_storage().data_ptr() for t in tensors_of(result)}
    known = {memory: size for memory, size in kept.items() if memory in outputs}
    return _Measured(forward_s, input_s, weight_s, counted, _detached(result), known)


def _roots(output: Any, target: Any, loss: Any) -> list[Tensor]:
    """Where backward begins, with gradients for the output as another stage would send them."""
    if loss is not None:
        figures = loss(output, target)
        losses = figures[0] if isinstance(figures, tuple) else figures
        return [losses.sum()] if losses.requires_grad else []
    roots = []
    for tensor in tensors_of(output):
        if tensor.requires_grad:
            root, door = leave(tensor)
            door.gradient = torch.ones_like(tensor, memory_format=torch.contiguous_format)
            roots.append(root)
    return roots


def _detached(value: Any) -> Any:
    """A value that belongs to no graph, whose tensors still say whether they need a gradient."""
    structure, tensors = take_apart(value)
    return put_together(structure, [t.detach().requires_grad_(t.requires_grad) for t in tensors])


def _note(kept: dict[int, int], tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    kept[storage.data_ptr()] = storage.nbytes()
    return tensor


def _spans(marks: Sequence[float]) -> tuple[float, float, float]:
    spans = [after - before for before, after in pairwise(marks)]
    forward_s, input_s, weight_s = (*spans, 0.0, 0.0)[:3]
    return forward_s, input_s, weight_s


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _measure_optimizer(settings: OptimizerSettings, device: torch.device) -> tuple[float, float]:
    """Bytes of state, and seconds of an update, for each byte of a trained parameter."""
    parameter = nn.Parameter(torch.zeros(_OPTIMIZER_NUMBERS // 1024, 1024, device=device))
    optimizer = make_optimizer(settings, [parameter])
    assert optimizer is not None
    spans = []
    for _ in range(1 + _REPEATS):
        parameter.grad = torch.ones_like(parameter)
        began = _now(device)
        optimizer.step()
        spans.append(_now(device) - began)
    state = optimizer.state[parameter].values()
    num_bytes = _num_bytes(parameter)
    held = sum(_num_bytes(value) for value in state if isinstance(value, Tensor) and value.dim())
    return held / num_bytes, statistics.median(spans[1:]) / num_bytes


def _with_ties(
    layers: Sequence[LayerProfile], specs: Sequence[LayerSpec], ties: Sequence[Tie]
) -> list[LayerProfile]:
    """Frozen ones are left out: nothing of them is sent in a step's sums."""
    names: list[dict[str, int]] = [{} for _ in layers]
    for tie in ties:
        if not tie[0].trained:
            continue
        built = build_layer(specs[tie[0].layer], tie[0].layer, 0)
        size = _num_bytes(built.get_parameter(tie[0].name))
        for tied in tie:
            names[tied.layer][str(tie[0])] = size
    return [
        layer.model_copy(update={"tied": tied}) if tied else layer
        for layer, tied in zip(layers, names, strict=True)
    ]

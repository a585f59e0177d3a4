"""How long a micro-batch takes through each chunk, alone: what a simulation of the step needs."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.pipeline.models import Model, loss
from hpc_train.bench.turns import slowest
from hpc_train.comm.interface import ControlPlane
from hpc_train.pipeline.actions import Kind, Order
from hpc_train.pipeline.batch_statistics import BatchStatistics
from hpc_train.pipeline.boundary import enter
from hpc_train.pipeline.draws import Draws
from hpc_train.pipeline.forward_backward import ForwardBackward, Live
from hpc_train.pipeline.later import Later
from hpc_train.pipeline.layers import layer_name
from hpc_train.pipeline.simulate import Simulation, simulate
from hpc_train.pipeline.stage import Stage

_REPEATS = 15
_WARM_UPS = 3


@dataclass(frozen=True)
class Times:
    """Seconds of a micro-batch, by chunk: forward, backward at once, and its halves."""

    forward: list[float]
    backward: list[float]
    input: list[float]
    weight: list[float]

    def play(self, order: Order) -> Simulation:
        """The order in simulated time; messages take none."""
        if any(action.kind is Kind.I for row in order for action in row):
            return simulate(order, self.forward, self.input, self.weight)
        return simulate(order, self.forward, self.backward, 0.0)


def known(model: Model, num_chunks: int) -> Times:
    """Of layers that wait."""
    assert model.seconds is not None
    forward, input_s, weight = ([seconds] * num_chunks for seconds in model.seconds.over(num_chunks))
    return Times(forward, [i + w for i, w in zip(input_s, weight, strict=True)], input_s, weight)


def measured(control: ControlPlane, model: Model, num_chunks: int) -> Times:
    """Of layers that compute, all ranks at the same time, as they do in a pipeline.  Collective."""
    rows = []
    for index in range(num_chunks):
        held = model.chunk(index, num_chunks)
        stage = Stage({index: [(layer_name(i), model.layers[i]) for i in held]}, num_chunks)
        control.barrier()
        whole = [_once(stage, index, model, halves=False) for _ in range(_WARM_UPS + _REPEATS)]
        halves = [_once(stage, index, model, halves=True) for _ in range(_WARM_UPS + _REPEATS)]
        (forward, backward), (_, input_s, weight) = (
            [statistics.median(times) for times in zip(*runs[_WARM_UPS:], strict=True)]
            for runs in (whole, halves)
        )
        rows.append([forward, backward, input_s, weight])
    return Times(*map(list, zip(*slowest(control, rows), strict=True)))


def _once(stage: Stage, index: int, model: Model, halves: bool) -> Sequence[float]:
    """Seconds of F and B, or of F, I and W."""
    work = ForwardBackward(False, BatchStatistics(stage), Draws(stage.device))
    chunk = stage.chunks[index]
    x, target = model.cut(model.batch(1))[0]
    gradients: list[Tensor] = [torch.ones_like(x)]
    marks = [time.perf_counter()]
    (x,), doors = enter([x], [not stage.is_first])
    live = Live(doors, later=Later() if halves else None)
    output = work.forward(chunk, x, 0, live)
    if stage.is_last:
        gradients = []
        live.roots.append(loss(output, target).sum())
    else:
        live.leave(output)
    del output
    marks.append(time.perf_counter())
    work.backward(chunk, live, gradients)
    marks.append(time.perf_counter())
    if live.later:
        live.later.backward_weights()
        marks.append(time.perf_counter())
    return [after - before for before, after in pairwise(marks)]

"""One training run: its loss on held-out samples against steps and against seconds of training."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from benchmarks.records import TOP
from hpc_train.comm.interface import World
from hpc_train.config import Settings, load
from hpc_train.data.sampler import Cursor, take
from hpc_train.tasks.task import Task
from hpc_train.training.layout import Layout
from hpc_train.training.optimizer import learning_rate, make_optimizer
from hpc_train.training.worker import Worker

Batch = tuple[Tensor, Tensor]
_EVALUATED_A_RANK = 90  # all that digits has, of 4 ranks


@dataclass
class Curve:
    """Losses on held-out samples, and when: `seconds` of training, without evaluations."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def loss_at(self, seconds: float) -> float:
        """Between evaluations a straight line."""
        return float(np.interp(seconds, self.seconds, self.losses))


@dataclass
class Run:
    """A model and how it steps.

    Attributes:
        step: of a batch, at a learning rate.
        losses: the model's losses of samples, [samples], without gradients.
        close: frees what it holds; collective.
    """

    world: World
    task: Task
    settings: Settings
    step: Callable[[Batch, float], object]
    losses: Callable[[Batch], Tensor]
    close: Callable[[], None]

    def train(self, steps: int, every: int) -> Curve:
        """Train from the start and evaluate every so many steps.  Collective."""
        world, data = self.world, self.task.dataset("train")
        held_out = self._held_out()
        curve, cursor, spent_s = Curve(), Cursor(0, 0), 0.0
        for step in range(steps + 1):
            if step % every == 0:
                curve.steps.append(step)
                curve.seconds.append(spent_s)
                mine = float(self.losses(held_out).double().sum())
                curve.losses.append(world.control.total([mine])[0] / (world.size * len(held_out[0])))
            chosen = take(len(data), self.settings.seed, cursor, self.settings.batch.size, [1] * world.size)
            cursor = chosen.next
            batch = _stack([data[int(i)] for i in chosen.indices[world.rank]])
            world.control.barrier()
            began = time.perf_counter()
            self.step(batch, learning_rate(self.settings.optimizer, step, steps))
            spent_s += time.perf_counter() - began
        self.close()
        return curve

    def _held_out(self) -> Batch:
        """What losses are measured with, this rank's share of it: the same samples in all runs."""
        data = self.task.dataset("eval")
        first = self.world.rank * _EVALUATED_A_RANK
        return _stack([data[(first + i) % len(data)] for i in range(_EVALUATED_A_RANK)])


@dataclass(frozen=True)
class Recipe:
    """What of a run is not as in examples/bytelm.toml: samples of a rank in a step, learning rate."""

    samples_a_rank: int
    lr: float


def our_run(world: World, task: Task, recipe: Recipe, wire: str, seed: int) -> Run:
    """hpc_train; lossy wires with error feedback where it is their default, so int8 and PowerSGD."""
    which = "gradients.compression=powersgd" if wire == "powersgd" else f"gradients.wire={wire}"
    settings = _settings(world, recipe, seed, which)
    worker = Worker(settings, task, world, Layout(settings, task, world))

    def step(batch: Batch, rate: float) -> None:
        worker.update(worker.backward([batch], settings.batch.size), rate)

    def losses(batch: Batch) -> Tensor:
        with torch.no_grad():
            return task.loss(worker.pipeline.forward(batch[0]), batch[1])

    return Run(world, task, settings, step, losses, worker.close)


def ddp_run(world: World, task: Task, recipe: Recipe, wire: str, seed: int) -> Run:
    """DistributedDataParallel on Gloo."""
    settings = _settings(world, recipe, seed, "gradients.wire=fp32")
    model = nn.parallel.DistributedDataParallel(task.plain_model(seed), gradient_as_bucket_view=True)
    if wire == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = make_optimizer(settings.optimizer, model.parameters())
    assert optimizer is not None

    def step(batch: Batch, rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = task.loss(model(batch[0]), batch[1]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.clip_norm)
        optimizer.step()
        float(loss.detach())

    def losses(batch: Batch) -> Tensor:
        with torch.no_grad():
            return task.loss(model.module(batch[0]), batch[1])

    return Run(world, task, settings, step, losses, lambda: None)


def _settings(world: World, recipe: Recipe, seed: int, *overrides: str) -> Settings:
    base = [
        "grid.stages=1",
        f"batch.micro_batch={recipe.samples_a_rank}",
        f"batch.size={recipe.samples_a_rank * world.size}",
        f"optimizer.learning_rate={recipe.lr}",
        f"optimizer.final_learning_rate={recipe.lr / 10}",
        f"seed={seed}",
    ]
    return load(TOP / "examples" / "bytelm.toml", [*base, *overrides])


def _stack(samples: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(targets)

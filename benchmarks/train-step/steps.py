"""Who takes part in a contest of training steps: forward, backward, sum, clipping, AdamW, loss as a number.

Each has a model of its own, all begin with the same weights, and see the same samples.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.peers.horovod import Horovod, Setting
from benchmarks.records import OURS, TOP
from hpc_train.bench.turns import Contestant
from hpc_train.comm.interface import World
from hpc_train.config import Settings, load
from hpc_train.tasks.task import Task
from hpc_train.training.layout import Layout
from hpc_train.training.optimizer import make_optimizer
from hpc_train.training.worker import Worker

Batch = tuple[Tensor, Tensor]
POWERSGD = "powersgd"
POWERSGD_RANK = 16  # the default
POWERSGD_WARM_UP_STEPS = 2  # the least that DDP's hook takes; they send whole gradients
# The hook's sums of two buckets begin in any order, another one on each rank, and Gloo mixes them up.
_ONE_BUCKET_MB = 1_000
LEARNING_RATE = 1e-4
# How far the norm of the first step's gradient may be from DDP's in fp32; PowerSGD sends it whole.
_NORM_TOLERANCE = {"fp32": 1e-4, "fp16": 2e-3, "bf16": 1e-2, "int8": 3e-2, POWERSGD: 1e-4}


class Steps:
    """Makes contestants of one task; each takes `batches`, which are this rank's, in turn."""

    def __init__(self, world: World, task: Task, batches: Sequence[Batch]) -> None:
        self._world = world
        self._task = task
        self._batches = batches
        samples = len(batches[0][0])
        self._base = ["grid.stages=1", f"batch.micro_batch={samples}", f"batch.size={samples * world.size}"]
        self._base.append(f"gradients.powersgd_rank={POWERSGD_RANK}")
        self._base.append(f"gradients.powersgd_warm_up_steps={POWERSGD_WARM_UP_STEPS}")
        self._clip_norm = self._settings().optimizer.clip_norm
        self._norm: float | None = None  # of the first step's gradient, from the first contestant
        self._workers: list[Worker] = []

    def ours(self, wire: str, world: World | None = None) -> Contestant:
        """A step as the trainer makes it: backward, agreement, clipping, update."""
        which = "gradients.compression=powersgd" if wire == POWERSGD else f"gradients.wire={wire}"
        settings = self._settings(which)
        world = world or self._world
        worker = Worker(settings, self._task, world, Layout(settings, self._task, world))
        self._workers.append(worker)

        def step(batch: Batch) -> float:
            outcome = worker.backward([batch], settings.batch.size)
            worker.update(outcome, LEARNING_RATE)
            return outcome.grad_norm

        return self._contestant(OURS, wire, step)

    def ddp(self, wire: str) -> Contestant:
        """DistributedDataParallel, its gradients as views of its buckets."""
        model = nn.parallel.DistributedDataParallel(
            self._task.plain_model(),
            gradient_as_bucket_view=True,
            bucket_cap_mb=_ONE_BUCKET_MB if wire == POWERSGD else None,
        )
        if wire == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif wire == POWERSGD:
            state = powerSGD_hook.PowerSGDState(
                None,
                matrix_approximation_rank=POWERSGD_RANK,
                start_powerSGD_iter=POWERSGD_WARM_UP_STEPS,
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return self._contestant("DDP Gloo", wire, self._plain_step(model))

    def horovod(self, horovod: Horovod, wire: str, settings: Sequence[Setting]) -> list[Contestant]:
        """Horovod's DistributedOptimizer with each of `settings`, on one model.  It runs in its turns."""
        model = self._task.plain_model()
        compression = horovod.hvd.Compression.fp16 if wire == "fp16" else horovod.hvd.Compression.none
        with horovod.running(settings[0]):
            optimizer = horovod.hvd.DistributedOptimizer(
                self._optimizer(model), named_parameters=model.named_parameters(), compression=compression
            )

        def step(batch: Batch) -> float:
            optimizer.zero_grad()
            loss = self._task.loss(model(batch[0]), batch[1]).mean()
            loss.backward()
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(model.parameters(), self._clip_norm)
            with optimizer.skip_synchronize():
                optimizer.step()
            float(loss.detach())
            return float(norm)

        return [
            self._contestant("Horovod", wire, step, functools.partial(horovod.running, setting))
            for setting in settings
        ]

    def alone(self, impl: str) -> Contestant:
        """Plain PyTorch on each rank for itself: nothing is sent."""
        model = self._task.plain_model()
        return self._contestant(impl, "none", self._plain_step(model), checked=False)

    def num_parameters(self) -> int:
        """Of the model."""
        return sum(p.numel() for p in self._task.plain_model().parameters())

    def close(self) -> None:
        """End hpc_train's threads and communicators; collective."""
        for worker in self._workers:
            worker.close()

    def _settings(self, *overrides: str) -> Settings:
        return load(TOP / "examples" / "bytelm.toml", [*self._base, *overrides])

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make_optimizer(self._settings().optimizer, model.parameters())
        assert optimizer is not None
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        return optimizer

    def _plain_step(self, model: nn.Module) -> Callable[[Batch], float]:
        optimizer = self._optimizer(model)

        def step(batch: Batch) -> float:
            optimizer.zero_grad()
            loss = self._task.loss(model(batch[0]), batch[1]).mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), self._clip_norm)
            optimizer.step()
            float(loss.detach())  # hpc_train's step knows its loss, too
            return float(norm)

        return step

    def _contestant(
        self,
        impl: str,
        wire: str,
        step: Callable[[Batch], float],
        around: Callable[[], Any] = nullcontext,
        checked: bool = True,
    ) -> Contestant:
        norms: list[float] = []

        def call() -> None:
            norms.append(step(self._batches[len(norms) % len(self._batches)]))

        def check() -> None:
            """Of the first step: later ones have weights that differ by what the wires have rounded."""
            if not checked or len(norms) > 1:
                return
            if self._norm is None:
                self._norm = norms[0]
            off = abs(norms[0] / self._norm - 1)
            if not off <= _NORM_TOLERANCE[wire]:
                raise RuntimeError(f"{impl}'s {wire} gradient has norm {norms[0]:.6g}, not {self._norm:.6g}")

        return Contestant(impl, wire, call, check=check, around=around)

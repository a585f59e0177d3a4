"""The training loop.

    with SignalFlag() as signal, Trainer(settings, task, world, layout, signal, Path("runs/demo")) as trainer:
        result = trainer.fit()

`Trainer.step` is one step in one direction: plan, batch, gradients, update, report.
"""

import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from hpc_train.checkpoint.initial import read_model
from hpc_train.checkpoint.store import Store
from hpc_train.comm.interface import World
from hpc_train.config import Settings
from hpc_train.coordinator.coordinator import Coordinator
from hpc_train.coordinator.plan import Plan
from hpc_train.coordinator.policies.equal_shares import EqualShares
from hpc_train.coordinator.policies.save_every import SaveEvery
from hpc_train.coordinator.policies.stop_at import StopAt
from hpc_train.coordinator.policies.stop_on_signal import StopOnSignal
from hpc_train.coordinator.report import Report
from hpc_train.data.loader import Loader
from hpc_train.data.sampler import Batch, Cursor, Indices, cut, take
from hpc_train.errors import EXIT_OK, EXIT_STOPPED, UserError
from hpc_train.launch.signals import SignalFlag
from hpc_train.observe.metrics import RunDirectory
from hpc_train.observe.progress import Progress
from hpc_train.pipeline.samples import Sum
from hpc_train.tasks.task import Task
from hpc_train.training.layout import Layout, about_batch_norm
from hpc_train.training.optimizer import learning_rate
from hpc_train.training.tuning import Tuning
from hpc_train.training.worker import Worker


@dataclass(frozen=True)
class Result:
    """How a run ended.  `loss` is the last step's; `evaluation` the last one's means, by name."""

    step: int
    loss: float
    evaluation: dict[str, float]
    exit_code: int


class Trainer:
    """Trains a task on a grid; every rank makes one and calls its methods together with the others.

    Args:
        settings: as `hpc_train.config.load` returns them.
        task: the model, loss and data.
        world: all ranks, from `hpc_train.comm.connect.connect`.
        layout: where this rank stands in the grid.
        signal: entered by the caller, early: a signal that comes while a model loads must not kill.
        run_dir: where metrics and checkpoints go; rank 0 writes the former, one replica the latter.
        resume: "auto" takes the newest whole checkpoint of `run_dir` if there is one, "never" moves an
            earlier run aside, anything else is the path of a checkpoint or of another run.
        init: a plain model's state dict to begin with, where nothing is resumed.
        stop_at: save and stop after this step; the learning rate still follows `train.steps`.
    """

    def __init__(
        self,
        settings: Settings,
        task: Task,
        world: World,
        layout: Layout,
        signal: SignalFlag,
        run_dir: Path,
        resume: str = "auto",
        stop_at: int | None = None,
        init: Path | None = None,
    ) -> None:
        self.settings = settings
        self.task = task
        self.control = world.control
        self.place = layout.place
        self.replicas = layout.grid.replicas
        self.leads = world.rank == 0
        self.signal = signal
        self.run = RunDirectory(run_dir, writer=self.leads)
        self.progress = Progress(total=settings.train.steps, shown=self.leads)
        if resume == "never":
            aside = self.run.set_aside()
            if aside:
                self.progress.note(f"an earlier run was moved to {aside}")
        self.control.barrier()  # nobody looks for checkpoints before rank 0 has moved them
        self.worker = Worker(settings, task, world, layout)
        self.train_data = _Split(task, "train", settings, layout, world)
        self.eval_data = _Split(task, "eval", settings, layout, world)
        self.store = Store(run_dir / "checkpoints", settings.checkpoint.keep)
        self.cursor = Cursor(0, 0)
        self.done = 0  # steps finished
        self.samples = 0  # seen over all epochs
        self._stop_at = stop_at
        self._evaluation: dict[str, float] = {}
        if resume != "never":
            self._resume("auto" if resume == "auto" else Path(resume))
        if init is not None:
            self._begin_with(init)
        self.tuning: Tuning | None = None
        if settings.gradients.tune and self.replicas > 1:
            first = self.done + 1
            self.tuning = Tuning(settings.gradients, first, self.worker.sum_by, self._tuned)
        self.coordinator = Coordinator(self.control, self._first_plan(), self._policies())
        about = self.worker.about_sums()
        self.run.start(settings, world, resumed_at=self.done, gradient_sums=about)
        for line in [*about, about_batch_norm(settings, layout.specs)]:
            if line:
                self.progress.note(line)

    def _first_plan(self) -> Plan:
        return Plan(step=self.done + 1, batch_size=self.settings.batch.size, shares=(0,) * self.replicas)

    def _tuned(self, line: str) -> None:
        about = self.worker.about_sums()
        for told in [line, *about]:
            self.progress.note(told)
        self.run.add_fact("gradients_tuned", line)
        self.run.add_fact("gradient_sums", about)

    def _policies(self) -> list[Any]:
        policies: list[Any] = [
            EqualShares(),
            SaveEvery(self.settings.checkpoint.every, self.settings.train.steps),
            StopOnSignal(),
        ]
        if self.tuning is not None:
            policies.append(self.tuning.policy)
        return policies if self._stop_at is None else [*policies, StopAt(self._stop_at)]

    def fit(self) -> Result:
        """Train to the last step, or until the plan says stop; saves at the end."""
        steps = self.settings.train.steps
        last = min(steps, self._stop_at or steps)
        report: Report | None = None
        loss, plan = math.nan, None
        with self.progress:
            if self.done >= last:
                self.progress.note(f"nothing to do up to step {last}: {self.done} steps are done already")
            while self.done < last and not (plan and plan.stop):
                plan, report, loss = self.step(report)
                every = self.settings.train.evaluate_every
                if self.done == steps or (every and self.done % every == 0):
                    self.evaluate()
                if plan.save:
                    self.save()
            if plan and plan.stop and plan.reason:
                self.progress.note(f"stopped after step {self.done} of {steps}: {plan.reason}")
        unfinished = self.done < last
        return Result(self.done, loss, self._evaluation, EXIT_STOPPED if unfinished else EXIT_OK)

    def step(self, report: Report | None) -> tuple[Plan, Report, float]:
        """One step: what the coordinator planned, this rank's report of it, and the batch's mean loss."""
        began = time.perf_counter()
        watch = self.worker.stopwatch
        watch.reset()  # evaluation and saving belong to no step
        plan = self.coordinator.exchange(report)
        if self.tuning is not None:
            self.tuning.follow(plan)
        batch = self.train_data.take(self.cursor, plan)
        mine = batch.indices[self.place.replica]
        micro_batches = self.train_data.load(mine, self.cursor.epoch)
        _seed_everything(self.settings.seed, plan.step, *self.place)
        first_sample = sum(map(len, batch.indices[: self.place.replica]))

        seed = _seed(self.settings.seed, plan.step)
        outcome = self.worker.backward(micro_batches, batch.size, len(mine), seed, first_sample)
        rate = learning_rate(self.settings.optimizer, self.done, self.settings.train.steps)
        rate *= plan.learning_rate_scale
        self.worker.update(outcome, rate)
        if plan.step % self.settings.gradients.local_steps == 0:
            self.worker.average_parameters()

        self.cursor = batch.next
        self.done = plan.step
        self.samples += batch.size
        self.train_data.prefetch(self.cursor, plan, self.place.replica)
        report = Report(
            rank=self.control.rank,
            step=plan.step,
            samples=len(mine),
            compute_s=watch.compute_s,
            wait_s=watch.wait_s,
            comm_s=watch.comm_s,
            grad_norm=outcome.grad_norm,
            finite=outcome.finite,
            signal=self.signal.seen,
        )
        time_s = time.perf_counter() - began
        line = {
            "step": plan.step,
            "epoch": self.cursor.epoch,
            "time_s": time_s,
            "loss": outcome.loss,
            "samples": batch.size,
            "samples_per_s": batch.size / time_s,
            "learning_rate": rate,
            "grad_norm": outcome.grad_norm,
            "skipped": not outcome.finite,
            "compute_s": report.compute_s,
            "wait_s": report.wait_s,
            "comm_s": report.comm_s,
            **self.worker.sum_times(),
            "wire_overflows": outcome.overflows,
            "wire_underflows": outcome.underflows,
        }
        self.run.record(line)
        self.progress.step(line)
        return plan, report, outcome.loss

    def evaluate(self) -> dict[str, float]:
        """Means over the held-out split of the loss and the task's metrics; every replica takes its part."""
        self.worker.average_parameters()
        whole = len(self.eval_data)
        shares = cut(whole, [1] * self.replicas)
        first = sum(shares[: self.place.replica])
        mine = np.arange(first, first + shares[self.place.replica])
        sums: dict[str, Sum] = {}
        for begin in range(0, len(mine), self.settings.batch.size):
            micro_batches = self.eval_data.load(mine[begin : begin + self.settings.batch.size], epoch=0)
            for name, part in self.worker.pipeline.evaluate(micro_batches, self.task.metrics).items():
                sums[name] = sums.get(name, Sum(0.0, 0.0)) + part
        totals: dict[str, Sum] = {}
        for data in self.control.all_gather(json.dumps(sums).encode()):
            for name, numbers in json.loads(data).items():
                totals[name] = totals.get(name, Sum(0.0, 0.0)) + Sum(*numbers)
        means = {
            name: total / weight if weight else math.nan for name, (total, weight) in sorted(totals.items())
        }
        self._evaluation = means
        self.run.record({"step": self.done, **{f"eval_{name}": value for name, value in means.items()}})
        self.progress.note("evaluation: " + ", ".join(f"{name} {value:.4f}" for name, value in means.items()))
        return means

    def sample(self) -> str | None:
        """Something to look at, made by the task with the first replica; known on rank 0 alone."""
        self.worker.average_parameters()
        text = None
        if self.place.replica == 0:
            text = self.task.sample(self.worker.pipeline.forward)
        self.control.barrier()
        return text if self.leads else None

    def save(self) -> None:
        """Write a checkpoint of the last finished step; all ranks together."""
        tensors = self.worker.take_state()
        state = {
            "step": self.done,
            "samples": self.samples,
            "epoch": self.cursor.epoch,
            "offset": self.cursor.offset,
            "train_samples": len(self.train_data),
            "seed": self.settings.seed,  # with step, replica and stage it gives the random state
            "powersgd_steps": self.worker.powersgd_steps,
            "ranks": self.control.size,
            "settings": self.settings.to_toml(),
        }
        path = self.store.save(self.done, tensors, state, self.control, writer=bool(tensors))
        self.progress.note(f"saved {path}")

    def _begin_with(self, init: Path) -> None:
        if self.done:
            self.progress.note(f"{init} is not used: the run goes on from its own checkpoint")
            return
        self.worker.restore_model(read_model(init, self.worker.state_shapes(), self.control))
        self.progress.note(f"began with the weights in {init}")

    def _resume(self, which: Any) -> None:
        wanted = self.worker.state_shapes()
        loaded = self.store.load(which, wanted, self.control, self.progress.note, self.worker.cut_state)
        if loaded is None:
            return
        state = loaded.state
        self.worker.restore_state(loaded.tensors, state.get("powersgd_steps", 0))
        self.done, self.samples = state["step"], state["samples"]
        self.cursor = Cursor(state["epoch"], state["offset"])
        self.progress.note(f"resumed from {loaded.path}: {self.done} steps done")
        if self.worker.reducer.owes:
            self.progress.note(
                "what earlier gradient sums left out is added to the next gradient: these keep no residuals"
            )
        now = {"seed": self.settings.seed, "train_samples": len(self.train_data)}
        for name, value in now.items():
            if state.get(name, value) != value:
                self.progress.note(
                    f"warning: {name} was {state[name]} and is {value}: this epoch goes on in another order, "
                    "in which samples come twice or not at all"
                )

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.train_data.close()
        self.eval_data.close()
        self.run.close()
        if error is None:  # the rest waits for the other ranks, which may not come after a failure
            self.coordinator.close()
            self.worker.close()


class _Split:
    """One split of the data: read where a stage needs it, its length known everywhere."""

    def __init__(self, task: Task, split: str, settings: Settings, layout: Layout, world: World) -> None:
        self._seed = settings.seed
        self._reads = layout.reads_data
        self._micro_batch = settings.batch.micro_batch
        dataset = task.dataset(split) if self._reads else None
        lengths = world.control.all_gather(str(len(dataset)).encode() if dataset is not None else b"")
        counts = {int(text) for text in lengths if text}
        if len(counts) != 1 or 0 in counts:
            raise UserError(
                f"the {split} split has {' or '.join(map(str, sorted(counts)))} samples: "
                "it must have some, and the same number on every host"
            )
        self._length = counts.pop()
        self._loader = (
            Loader(dataset, settings.data.workers, self._micro_batch, layout.device, settings.seed)
            if dataset is not None
            else None
        )

    def __len__(self) -> int:
        return self._length

    def take(self, cursor: Cursor, plan: Plan) -> Batch:
        """The batch of a plan."""
        return take(self._length, self._seed, cursor, plan.batch_size, plan.shares)

    def load(self, indices: Indices, epoch: int) -> list[tuple[Any, Any]]:
        """The micro-batches of these samples; on a stage between the ends only their number counts."""
        if self._loader is not None:
            return self._loader.load(indices, epoch)
        return [(None, None)] * -(-len(indices) // self._micro_batch)

    def prefetch(self, cursor: Cursor, plan: Plan, replica: int) -> None:
        """Let the workers begin with the next batch, as it will be if the plan stays."""
        if self._loader is not None:
            self._loader.prefetch(self.take(cursor, plan).indices[replica], cursor.epoch)

    def close(self) -> None:
        """End the loader's workers."""
        if self._loader is not None:
            self._loader.close()


def _seed(*numbers: int) -> int:
    """A seed of 32 bits, made of others."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _seed_everything(seed: int, step: int, replica: int, stage: int) -> None:
    """Random numbers of a step depend on the seed and the place alone: a resumed run draws the same.

    What layers draw from torch's generator depends on neither place nor order, see pipeline/draws.py.
    """
    state = _seed(seed, step, replica, stage)
    random.seed(state)
    np.random.seed(state)
    torch.manual_seed(state)

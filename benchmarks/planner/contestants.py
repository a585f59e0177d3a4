"""Who takes part: candidates of the planner, each as the training steps that it would be.

Every candidate has a worker of its own, begins with the same weights, and sees the same batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import default_collate

from benchmarks.planner.candidates import name_of
from benchmarks.records import OURS
from hpc_train.bench.turns import Contestant
from hpc_train.comm.interface import World
from hpc_train.config import Settings, changed
from hpc_train.data.sampler import cut
from hpc_train.planning.choice import Candidate, settings_of
from hpc_train.tasks.task import Task
from hpc_train.training.layout import Layout
from hpc_train.training.worker import Outcome, Worker

_LEARNING_RATE = 1e-4
_TOLERANCE = 1e-4  # of the first step's loss and norm: sums are made in other orders


class Runs:
    """Training steps of candidates, on all ranks."""

    def __init__(self, settings: Settings, task: Task, world: World) -> None:
        self._settings, self._task, self._world = settings, task, world
        dataset = task.dataset("train")
        self._batch = default_collate([dataset[i % len(dataset)] for i in range(settings.batch.size)])
        self._expected: Outcome | None = None  # of the first step of the first candidate
        self._workers: list[Worker] = []

    def add(self, candidate: Candidate) -> Contestant:
        """Its worker, whose whole step is timed, from the pipeline to the update.  Collective."""
        settings = changed(self._settings, {**settings_of(candidate), "grid.auto": False})
        layout = Layout(settings, self._task, self._world)
        worker = Worker(settings, self._task, self._world, layout)
        self._workers.append(worker)
        shares = cut(settings.batch.size, [1] * layout.grid.replicas)
        first = sum(shares[: layout.place.replica])
        share = shares[layout.place.replica]
        micro_batches = self._cut(first, first + share, candidate.micro_batch)
        outcomes: list[Outcome] = []

        def call() -> None:
            outcome = worker.backward(micro_batches, settings.batch.size, share, len(outcomes), first)
            worker.update(outcome, _LEARNING_RATE)
            outcomes.append(outcome)

        return Contestant(OURS, "fp32", call, check=lambda: self._check(name_of(candidate), outcomes))

    def seconds(self, of: Callable[[Worker], Any]) -> list[Any]:
        """Of each candidate's worker, as this rank sees it."""
        return [of(worker) for worker in self._workers]

    def close(self) -> None:
        """End threads and communicators.  Collective."""
        for worker in self._workers:
            worker.close()

    def _cut(self, begin: int, end: int, micro_batch: int) -> list[tuple[Any, Any]]:
        x, target = (part[begin:end] for part in self._batch)
        return list(zip(x.split(micro_batch), target.split(micro_batch), strict=True))

    def _check(self, name: str, outcomes: Sequence[Outcome]) -> None:
        """The first step: the same loss and gradient on every grid."""
        if self._expected is None:
            self._expected = outcomes[0]
        for noun in ("loss", "grad_norm"):
            found, expected = (getattr(outcome, noun) for outcome in (outcomes[0], self._expected))
            if not abs(found - expected) <= _TOLERANCE * abs(expected):
                raise RuntimeError(f"{name}'s {noun} is {found:.9g}, not {expected:.9g}")

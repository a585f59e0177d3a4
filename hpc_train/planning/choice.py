"""A way to run a model: what can be chosen, and what is foreseen of it.  PURE: neither torch nor MPI."""

from dataclasses import dataclass
from typing import Any, Literal

from hpc_train.comm.interface import Wire
from hpc_train.grid import Fastest, Grid
from hpc_train.pipeline.schedules import Schedule, find

Recompute = Literal["none", "all"]


@dataclass(frozen=True)
class Choice:
    """All that the planner chooses but the split, which follows.

    Attributes:
        replicas, stages, fastest: the grid.
        schedule, chunks: its name, and the chunks a stage.
        micro_batch: samples.
        recompute: of activations in backward: none or all.
        wire: the number format of gradients.
        pipeline_wire: that of activations between stages.
    """

    replicas: int
    stages: int
    fastest: Fastest
    schedule: str
    chunks: int
    micro_batch: int
    recompute: Recompute
    wire: Wire
    pipeline_wire: Wire

    @property
    def grid(self) -> Grid:
        """Replicas and stages."""
        return Grid(self.replicas, self.stages, self.fastest)

    @property
    def rule(self) -> Schedule:
        """The schedule of that name."""
        return find(self.schedule, self.chunks)

    @property
    def stage_of(self) -> list[int]:
        """The stage of each chunk."""
        rule = self.rule
        return [rule.stage_of(chunk, self.stages) for chunk in range(self.stages * self.chunks)]

    def micro_batches(self, batch_size: int) -> int:
        """How many the replica with the largest share has."""
        return -(-share_of(batch_size, self.replicas) // self.micro_batch)


@dataclass(frozen=True)
class Candidate(Choice):
    """A choice, and what is foreseen of it.

    Attributes:
        split: layers of each chunk.
        step_s: seconds of a step.
        pipeline_s: until the last stage has computed its gradients.
        bubble: the share of the pipeline's time in which stages idle, 0..1.
        exposed_sum_s: that the sums of gradients, and of sharded parameters, take beyond it.
        rank_bytes: memory of the fullest rank.
        host_bytes: that the busiest host sends to others in a step.
        samples_per_s: of all replicas.
    """

    split: tuple[int, ...]
    step_s: float
    pipeline_s: float
    bubble: float
    exposed_sum_s: float
    rank_bytes: float
    host_bytes: float
    samples_per_s: float


def share_of(batch_size: int, replicas: int) -> int:
    """Samples of the replica that has the most, where all are alike."""
    return -(-batch_size // replicas)


def settings_of(choice: Choice) -> dict[str, Any]:
    """The settings that make a run of it, by name; with the split where it is a candidate."""
    settings: dict[str, Any] = {
        "grid.stages": choice.stages,
        "grid.fastest": choice.fastest,
        "batch.micro_batch": choice.micro_batch,
        "pipeline.schedule": choice.schedule,
        "pipeline.chunks": choice.chunks,
        "pipeline.recompute": choice.recompute,
        "pipeline.wire": choice.pipeline_wire.value,
        "gradients.wire": choice.wire.value,
    }
    if isinstance(choice, Candidate):
        settings["pipeline.split"] = list(choice.split)
    return settings

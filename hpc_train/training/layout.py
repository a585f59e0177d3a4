"""Where each rank stands and what it will hold: decided alike on all, without a message."""

from collections.abc import Sequence

from hpc_train.comm.interface import World
from hpc_train.config import Settings
from hpc_train.errors import UserError
from hpc_train.grid import Grid, Place
from hpc_train.launch.binding import choose_device
from hpc_train.pipeline.layers import (
    LayerSpec,
    count_parameters,
    find_ties,
    layer_name,
    shared_layers,
)
from hpc_train.pipeline.partition import split_by_hand, split_evenly
from hpc_train.pipeline.schedules import Schedule, find
from hpc_train.tasks.task import Task
from hpc_train.training.lone_sample import check_lone, normalising


def layer_costs(specs: Sequence[LayerSpec]) -> list[float]:
    """The share of the work that each layer stands for; only their ratios matter.

    Costs are used where all layers have one: beside numbers of parameters they would mean nothing.
    """
    if all(spec.cost is not None for spec in specs):
        return [float(spec.cost or 0.0) for spec in specs]
    return [float(max(1, count_parameters(spec))) for spec in specs]


def find_schedule(settings: Settings) -> Schedule:
    """The schedule that the settings name.  Raises UserError where there is none."""
    return find(settings.pipeline.schedule, settings.pipeline.chunks or None)


def split_layers(settings: Settings, specs: Sequence[LayerSpec]) -> list[range]:
    """Which layers each chunk holds; a chunk is a stage's, unless the schedule gives a stage several.

    Raises:
        UserError: the split does not fit.
    """
    schedule, stages = find_schedule(settings), settings.grid.stages
    chunks = stages * schedule.chunks
    if not specs:
        raise UserError(f"task {settings.task} has 0 layers: return at least one from its layers()")
    if settings.pipeline.split == "auto":
        held_by = [schedule.stage_of(chunk, stages) for chunk in range(chunks)]
        split = split_evenly(layer_costs(specs), stages, stage_of=held_by)
    else:
        split = split_by_hand(settings.pipeline.split, len(specs), chunks)
    stage_of = stages_of_layers(split, schedule, stages)
    for one, other in shared_layers(specs) if stages > 1 else ():
        if stage_of[one] != stage_of[other]:  # each stage would train a copy of its own
            raise UserError(
                f"layers {one} and {other} share parameters, but stand on stages {stage_of[one]} and "
                f"{stage_of[other]}: tie them by LayerSpec.tied instead, or set pipeline.split so that one "
                "stage holds both"
            )
    return split


def stages_of_layers(split: Sequence[range], schedule: Schedule, stages: int) -> list[int]:
    """The stage of each layer."""
    return [schedule.stage_of(chunk, stages) for chunk, layers in enumerate(split) for _ in layers]


def make_grid(settings: Settings, num_ranks: int) -> Grid:
    """The grid of `num_ranks` ranks.

    Raises:
        UserError: the stages do not divide the ranks, or a batch has fewer samples than there are replicas.
    """
    grid = Grid.for_ranks(num_ranks, settings.grid.stages, settings.grid.fastest)
    if settings.batch.size < grid.replicas:
        raise UserError(
            f"batch.size={settings.batch.size} cannot be cut into {grid.replicas} replicas: "
            f"set batch.size to at least {grid.replicas}, or start fewer ranks"
        )
    return grid


def about_batch_norm(settings: Settings, specs: Sequence[LayerSpec]) -> str:
    """A warning where the model's results depend on the cut into micro-batches; "" where they do not."""
    found = normalising(specs)
    if not found:
        return ""
    normalise = " and others normalise" if found[1:] else " normalises"
    return (
        f"warning: {layer_name(found[0])}{normalise} over the samples of a micro-batch (BatchNorm): "
        f"training depends on batch.micro_batch={settings.batch.micro_batch}; running statistics are of the "
        "whole batch"
    )


class Layout:
    """Where this rank stands and what it will hold.

    Attributes:
        chunks: the layers of each chunk held here, by the chunk's number.
        stage_of: the stage of each layer of the model.

    Raises:
        UserError: ranks, stages, layers and batch do not fit together.
    """

    def __init__(self, settings: Settings, task: Task, world: World) -> None:
        self.grid = make_grid(settings, world.size)
        self.place: Place = self.grid.place(world.rank)
        self.specs = task.layers()
        self.schedule = find_schedule(settings)
        split = split_layers(settings, self.specs)
        stages = self.grid.stages
        self.num_chunks = len(split)
        self.chunks = {
            chunk: layers
            for chunk, layers in enumerate(split)
            if self.schedule.stage_of(chunk, stages) == self.place.stage
        }
        self.stage_of = stages_of_layers(split, self.schedule, stages)
        self.ties = find_ties(self.specs)
        self.device = choose_device(settings.train.device, world.local_rank)

    @property
    def reads_data(self) -> bool:
        """The first chunk reads inputs, the last one targets."""
        return 0 in self.chunks or self.num_chunks - 1 in self.chunks


def lay_out(settings: Settings, task: Task, world: World) -> Layout:
    """The layout, for a task that has data to train on.

    Raises:
        UserError: as for `Layout`, or a micro-batch is left with one sample, which BatchNorm refuses.
    """
    layout = Layout(settings, task, world)
    if layout.reads_data:
        check_lone(settings, task, layout.grid.replicas)
    return layout

"""What the settings leave to a measurement at the start: the grid, the schedule, recomputation.

grid = "auto"              every setting of grid, micro-batch and pipeline that is not given is chosen
pipeline.recompute=auto    activations are computed again only where they do not fit into memory
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpc_train.comm.interface import Wire, World
from hpc_train.config import Settings, changed
from hpc_train.launch.binding import choose_device, choose_threads
from hpc_train.planning.choice import settings_of
from hpc_train.planning.options import Options
from hpc_train.planning.planner import Planned, plan
from hpc_train.planning.profile import LayerProfile, Line, Profile
from hpc_train.planning.table import table
from hpc_train.tasks.task import Task
from hpc_train.training.layout import find_schedule, make_grid, split_layers
from hpc_train.training.network import measure_cluster
from hpc_train.training.profiling import measure


def is_open(settings: Settings) -> bool:
    """Whether something is left to choose."""
    return settings.grid.auto or settings.pipeline.recompute == "auto"


def options_of(settings: Settings, split: Sequence[range] = ()) -> Options:
    """What the planner may choose: all that the settings do not give.

    `split`: of a grid that is given.
    """
    grid, batch, pipeline, gradients = settings.grid, settings.batch, settings.pipeline, settings.gradients
    free = grid.auto

    def given(section: Any, name: str) -> bool:
        return not free or name in section.model_fields_set

    recompute = pipeline.recompute
    default = Options()
    chunks = pipeline.chunks if free else find_schedule(settings).chunks
    by_hand = () if pipeline.split == "auto" else pipeline.split
    return Options(
        schedules=(pipeline.schedule,) if given(pipeline, "schedule") else default.schedules,
        chunks=(chunks,) if chunks else default.chunks,
        stages=() if free else (grid.stages,),
        fastest=(grid.fastest,) if given(grid, "fastest") else default.fastest,
        micro_batches=(batch.micro_batch,) if given(batch, "micro_batch") else (),
        split=tuple(map(len, split)) or by_hand,
        recompute=(recompute,) if recompute != "auto" and given(pipeline, "recompute") else ("none", "all"),
        wires=(Wire(gradients.wire),),
        pipeline_wires=(Wire(pipeline.wire),),
        sharded=settings.optimizer.sharded,
        error_feedback=gradients.error_feedback,
        bucket_bytes=gradients.bucket_bytes,
        overlap=gradients.overlap,
    )


def resolve(settings: Settings, task: Task, world: World, note: Callable[[str], None]) -> Settings:
    """The settings with everything chosen; measured and decided by all ranks together.

    Args:
        settings: as the user has given them.
        task: its model is measured.
        world: all ranks.
        note: told on rank 0 what was measured and chosen.

    Raises:
        UserError: nothing that may be chosen fits, or a grid that is given cannot be.
    """
    if not is_open(settings):
        return settings
    split: list[range] = []
    if not settings.grid.auto:
        make_grid(settings, world.size)
        split = split_layers(settings, task.layers())
    torch.set_num_threads(choose_threads(world, settings.train.threads))
    device = choose_device(settings.train.device, world.local_rank)
    if world.rank == 0:
        note("measuring layers and network to choose what the settings leave open")
    profile, speed = common_profile(measure(settings, task, device), world)
    cluster = measure_cluster(world, device, speed)
    planned = plan(profile, cluster, settings.batch.size, options_of(settings, split))  # alike on all ranks
    if world.rank == 0:
        for line in table(planned).splitlines():
            note(line)
    return chosen(settings, planned)


def chosen(settings: Settings, planned: Planned) -> Settings:
    """The settings with those of the best candidate."""
    values = settings_of(planned.best[0])
    if not settings.grid.auto:
        values = {"pipeline.recompute": values["pipeline.recompute"]}
    return changed(settings, {**values, "grid.auto": False})


def common_profile(mine: Profile, world: World) -> tuple[Profile, float]:
    """The median of all ranks' profiles, the same on all of them, and how fast this rank is against it."""
    profiles = [
        Profile.model_validate_json(data) for data in world.control.all_gather(mine.to_json().encode())
    ]

    def median(layers: Sequence[LayerProfile], name: str) -> Line:
        lines = [getattr(layer, name) for layer in layers]
        return Line(
            fixed_s=statistics.median(line.fixed_s for line in lines),
            sample_s=statistics.median(line.sample_s for line in lines),
        )

    layers = tuple(
        same[0].model_copy(update={name: median(same, name) for name in ("forward", "input", "weight")})
        for same in zip(*(profile.layers for profile in profiles), strict=True)
    )
    update_s = statistics.median(profile.optimizer_s_a_byte for profile in profiles)
    common = profiles[0].model_copy(update={"layers": layers, "optimizer_s_a_byte": update_s})
    return common, _total_s(common) / max(_total_s(mine), 1e-12)


def _total_s(profile: Profile) -> float:
    """Of one sample through all layers and back."""
    lines = [line for layer in profile.layers for line in (layer.forward, layer.input, layer.weight)]
    return sum(line.seconds(1) for line in lines)

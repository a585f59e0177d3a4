"""What the settings leave to a measurement at the start: the grid, the schedule, recomputation.

grid = "auto"              every setting of grid, micro-batch and pipeline that is not given is chosen, and
                           wires among the given ones and those in `tune_wires`
pipeline.recompute=auto    activations are computed again only where they do not fit into memory
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpc_train.comm.interface import Wire, World
from hpc_train.config import Settings, changed
from hpc_train.grid import Grid
from hpc_train.launch.binding import choose_device, choose_threads
from hpc_train.planning.choice import settings_of
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.options import Options
from hpc_train.planning.planner import Planned, plan
from hpc_train.planning.profile import Curve, Profile
from hpc_train.planning.table import table
from hpc_train.tasks.task import Task
from hpc_train.training.kept_plan import kept_plan
from hpc_train.training.layout import find_schedule, make_grid, split_layers
from hpc_train.training.lone_sample import lone_rule
from hpc_train.training.network import measure_cluster, measure_overlap_cost
from hpc_train.training.profiling import measure

_SAME_SPEED = 0.1  # a rank within so much of the others is as fast as they: measurements differ by that


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
        stages=(grid.stages,) if given(grid, "stages") else default.stages,
        fastest=(grid.fastest,) if given(grid, "fastest") else default.fastest,
        micro_batches=(batch.micro_batch,) if given(batch, "micro_batch") else (),
        split=tuple(map(len, split)) or by_hand,
        recompute=(recompute,) if recompute != "auto" and given(pipeline, "recompute") else ("none", "all"),
        wires=_allowed(gradients.wire, gradients.tune_wires if free else ()),
        pipeline_wires=_allowed(pipeline.wire, pipeline.tune_wires if free else ()),
        sharded=settings.optimizer.sharded,
        error_feedback=gradients.error_feedback,
        bucket_bytes=gradients.bucket_bytes,
        overlap=gradients.overlap,
    )


def _allowed(given: str, others: Sequence[str]) -> tuple[Wire, ...]:
    """Wires that may be chosen, the given one first: where others are no faster it stays."""
    return tuple(Wire(name) for name in dict.fromkeys((given, *others)))


def left_out(settings: Settings) -> list[str]:
    """What the settings do that is not foreseen, a line each."""
    gradients, lines = settings.gradients, []
    if gradients.compression != "none":
        lines.append(f"gradients.compression={gradients.compression}: sends less than is")
    if gradients.local_steps > 1:
        lines.append(f"gradients.local_steps={gradients.local_steps}: sends less often than is")
    return [f"not foreseen: {line} counted, as gradients that are summed whole each step" for line in lines]


def resolve(
    settings: Settings,
    task: Task,
    world: World,
    note: Callable[[str], None],
    run_dir: Path | None = None,
    resume: str = "never",
) -> Settings:
    """The settings with everything chosen; measured and decided by all ranks together.

    Args:
        settings: as the user has given them.
        task: its model is measured.
        world: all ranks.
        note: told on rank 0 what was measured and chosen.
        run_dir: of the run.
        resume: what it goes on from, as for the trainer.

    Raises:
        UserError: nothing that may be chosen fits, or a grid that is given cannot be.
    """
    if not is_open(settings):
        return settings
    split: list[range] = []
    if settings.grid.auto and run_dir is not None:
        kept = kept_plan(settings, len(task.layers()), world, run_dir, resume)
        if kept is not None:
            if world.rank == 0:
                note(kept[1])
            return kept[0]
    if not settings.grid.auto:
        make_grid(settings, world.size)
        split = split_layers(settings, task.layers())
    torch.set_num_threads(choose_threads(world, settings.train.threads))
    device = choose_device(settings.train.device, world.local_rank)
    if world.rank == 0:
        note("measuring layers and network to choose what the settings leave open")
    profile, cluster = measure_all(settings, task, world, device)
    options = replace(options_of(settings, split), lone=lone_rule(settings, task))
    planned = plan(profile, cluster, settings.batch.size, options)  # alike on all ranks
    if world.rank == 0:
        for line in (*table(planned).splitlines(), *left_out(settings)):
            note(line)
    return chosen(settings, planned)


def measure_all(
    settings: Settings, task: Task, world: World, device: torch.device
) -> tuple[Profile, Cluster]:
    """Layers and network, as all ranks have measured them together."""
    profile, speed = common_profile(measure(settings, task, device), world)
    cluster = measure_cluster(world, device, speed)
    if not settings.gradients.overlap:
        return profile, cluster
    collective = world.collective(Grid(world.size, 1), device)
    batch = settings.batch.model_copy(update={"micro_batch": settings.batch.micro_batch})
    given = settings.model_copy(update={"batch": batch})  # one that is given has fewer sizes to measure

    def work_s() -> float:
        return sum(curve.most_s for layer in measure(given, task, device).layers for curve in layer.curves)

    trained_bytes = sum(layer.trained_bytes for layer in profile.layers)
    numel = max(1, min(settings.gradients.bucket_bytes, trained_bytes) // 4)
    cost = measure_overlap_cost(collective, Wire(settings.gradients.wire), numel, work_s)
    collective.close()
    return profile, replace(cluster, overlap_cost=cost)


def chosen(settings: Settings, planned: Planned) -> Settings:
    """The settings with those of the best candidate."""
    values = settings_of(planned.best[0])
    if not settings.grid.auto:
        values = {"pipeline.recompute": values["pipeline.recompute"]}
    if settings.gradients.tune_wires and not settings.gradients.tune:  # their choice is made
        values["gradients.tune_wires"] = ()
    if settings.pipeline.tune_wires:
        values["pipeline.tune_wires"] = ()
    return changed(settings, {**values, "grid.auto": False})


def common_profile(mine: Profile, world: World) -> tuple[Profile, float]:
    """The median of all ranks' profiles, the same on all of them, and how fast this rank is against it."""
    profiles = [
        Profile.model_validate_json(data) for data in world.control.all_gather(mine.to_json().encode())
    ]

    def median(curves: Sequence[Curve]) -> Curve:
        measured = [dict(curve.points) for curve in curves]
        sizes = set.intersection(*map(set, measured))  # a slow rank leaves out the largest
        return Curve.through([(size, statistics.median(at[size] for at in measured)) for size in sizes])

    names = ("forward", "input", "weight")
    layers = tuple(
        same[0].model_copy(update={name: median([getattr(layer, name) for layer in same]) for name in names})
        for same in zip(*(profile.layers for profile in profiles), strict=True)
    )
    update_s = statistics.median(profile.optimizer_s_a_byte for profile in profiles)
    common = profiles[0].model_copy(update={"layers": layers, "optimizer_s_a_byte": update_s})
    speed = _total_s(common, common) / max(_total_s(mine, common), 1e-12)
    return common, 1.0 if abs(speed - 1) < _SAME_SPEED else speed


def _total_s(profile: Profile, common: Profile) -> float:
    """Of the largest micro-batch that all have measured, through all layers and back."""
    return sum(
        curve.seconds(at.points[-1][0])
        for layer, same in zip(profile.layers, common.layers, strict=True)
        for curve, at in zip(layer.curves, same.curves, strict=True)
        if at.points
    )

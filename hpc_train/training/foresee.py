"""`hpc-train plan` for a cluster that need not be there: the best grids, schedules and settings, foreseen."""

import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hpc_train.comm.interface import Wire
from hpc_train.config import GridSettings, Settings
from hpc_train.errors import UserError
from hpc_train.pipeline.drawing import draw
from hpc_train.pipeline.simulate import Simulation, simulate
from hpc_train.planning.choice import Candidate
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.forecast import Forecast
from hpc_train.planning.options import Options
from hpc_train.planning.planner import plan
from hpc_train.planning.profile import Profile, read_profile
from hpc_train.planning.table import table
from hpc_train.tasks.task import Task
from hpc_train.training.autoplan import chosen, left_out, options_of
from hpc_train.training.guard import say
from hpc_train.training.lone_sample import lone_rule
from hpc_train.training.profiling import measure


def foresee(
    settings: Settings,
    task: Task,
    cluster: Cluster,
    profile: Path | None = None,
    save_profile: Path | None = None,
    write: Path | None = None,
    picture: Path | None = None,
    wires: Sequence[Wire] = (),
    pipeline_wires: Sequence[Wire] = (),
) -> str:
    """The best plans as a table, why others lose, and the best one's schedule.

    Args:
        settings: what they give is kept; the grid only beside `auto`, else it is searched anyway.
        task: its layers are measured on this machine, unless there is a profile.
        cluster: what to plan for.
        profile: a file that an earlier call has saved, from the cluster itself for instance.
        save_profile: where to keep what is measured now.
        write: where to write the settings with the best plan.
        picture: where to draw its schedule.
        wires: of gradients, that may be chosen beside those that the settings allow.
        pipeline_wires: of activations, the same.

    Raises:
        UserError: nothing fits, a file cannot be read or written, or the profile is of another model.
    """
    layers = _read(profile, settings, task) if profile else _measured(settings, task)
    if save_profile:
        _write(save_profile, layers.to_json())
    free = settings if settings.grid.auto else settings.model_copy(update={"grid": GridSettings(auto=True)})
    options = _widened(options_of(free), settings, wires, pipeline_wires)
    options = replace(options, lone=lone_rule(settings, task))
    planned = plan(layers, cluster, settings.batch.size, options)
    best = planned.best[0]
    simulation = play(best, layers, cluster, settings.batch.size, options)
    parts = [f"profile: {layers.source}", table(planned), *left_out(settings), draw(simulation.order)]
    if write:
        _write(write, chosen(free, planned).to_toml())
        parts.append(f"settings with the best plan: {write}")
    if picture:
        from hpc_train.pipeline.chart import save_chart

        grid = f"{best.replicas} replicas x {best.stages} stages"
        save_chart(picture, simulation, f"{grid}, {best.schedule}, without gradient sums")
        parts.append(f"drawn: {picture}")
    return "\n\n".join(parts)


def _widened(
    options: Options, settings: Settings, wires: Sequence[Wire], pipeline_wires: Sequence[Wire]
) -> Options:
    local_steps = settings.gradients.local_steps
    if wires and local_steps > 1:
        raise UserError(
            f"--wires {','.join(wire.value for wire in wires)}: with gradients.local_steps={local_steps} no "
            "gradients are summed: leave the option out, or set local_steps to 1"
        )
    return replace(
        options,
        wires=tuple(dict.fromkeys((*options.wires, *wires))),
        pipeline_wires=tuple(dict.fromkeys((*options.pipeline_wires, *pipeline_wires))),
    )


def play(
    candidate: Candidate, profile: Profile, cluster: Cluster, batch_size: int, options: Options
) -> Simulation:
    """A candidate's step, action by action."""
    times = Forecast(profile, cluster, batch_size, options).draft(candidate).times
    order = candidate.rule.order(candidate.stages, candidate.micro_batches(batch_size))
    return simulate(
        order, times.forward_s, times.input_s, times.weight_s, times.latency_s, line_s=times.line_s
    )


def _read(path: Path, settings: Settings, task: Task) -> Profile:
    profile = read_profile(path)
    there, here = len(profile.layers), len(task.layers())
    if there != here:
        raise UserError(
            f"{path} is of {there} layer{'s' * (there != 1)}, but task {settings.task} has {here}: "
            "measure it again with --save-profile"
        )
    return profile


def _measured(settings: Settings, task: Task) -> Profile:
    device = torch.device(
        "cpu" if settings.train.device == "cpu" or not torch.cuda.is_available() else "cuda"
    )
    threads = settings.train.threads or 1
    torch.set_num_threads(threads)
    cores = f"{threads} core{'s' * (threads > 1)}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cores
    return measure(settings, task, device, f"measured on {socket.gethostname()}, {name}", say)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None

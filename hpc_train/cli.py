"""The command line: `hpc-train COMMAND`, or `python -m hpc_train COMMAND`.

Exit codes: 0 done, 1 a rank failed or parity does not hold, 2 a mistake in command or settings,
75 saved and stopped before the end.  Packages that take long to import are imported by the commands
that need them.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer
from typer.core import TyperGroup
from typer.main import get_command

from hpc_train.config import Settings, load, parse_bytes
from hpc_train.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, UserError

if TYPE_CHECKING:
    from hpc_train.comm.interface import Wire, World
    from hpc_train.tasks.task import Task

T = TypeVar("T")

app = typer.Typer(
    name="hpc-train",
    help="Data parallel and pipelined PyTorch training under MPI and Slurm.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[Path, typer.Argument(help="Settings, a TOML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings that differ, as section.key=value.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[
        str, typer.Option(help="auto: the newest whole checkpoint; never; or a path.")
    ] = "auto",
    run_dir: Annotated[Path | None, typer.Option(help="Default: runs/NAME.", show_default=False)] = None,
    stop_at: Annotated[int | None, typer.Option(help="Save and stop after this step.", min=1)] = None,
    init: Annotated[
        Path | None, typer.Option(help="Begin with a plain model's state dict.", show_default=False)
    ] = None,
) -> None:
    """Train.  Alone it is one rank; under mpirun, mpiexec or srun all ranks."""
    from hpc_train.launch.signals import SignalFlag
    from hpc_train.training.guard import guard, say, together
    from hpc_train.training.layout import lay_out

    signal = SignalFlag()
    signal.__enter__()  # until the process ends: a signal while loading or sampling must not kill it
    world, (given, task) = _start(config, overrides)

    def run() -> int:
        from hpc_train.training.autoplan import resolve
        from hpc_train.training.trainer import Trainer

        where = run_dir or Path("runs") / given.name
        settings = resolve(given, task, world, say, where, resume)
        layout = together(world, lambda: lay_out(settings, task, world))
        with Trainer(settings, task, world, layout, signal, where, resume, stop_at, init) as trainer:
            result = trainer.fit()
            text = trainer.sample() if result.step == settings.train.steps else None
            if text:
                print(f"\nsample:\n{text}\n", flush=True)  # noqa: T201
            if world.rank == 0:
                print(f"step {result.step} of {settings.train.steps}; all of it is in {where}", flush=True)  # noqa: T201
        world.close()
        return result.exit_code

    sys.exit(guard(world, run))


@app.command()
def parity(
    config: Config,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="Steps to compare.", min=1)] = 5,
    as_json: AsJson = False,
) -> None:
    """Compare this grid's steps with plain PyTorch on the whole batch; exit code 0 or 1."""
    from hpc_train.training.guard import guard, say, together
    from hpc_train.training.layout import lay_out

    world, (given, task) = _start(config, overrides)

    def run() -> int:
        from hpc_train.training.autoplan import resolve
        from hpc_train.training.parity import compare, render

        settings = resolve(given, task, world, say)
        layout = together(world, lambda: lay_out(settings, task, world))
        differences = compare(settings, task, world, layout, steps)
        holds = all(difference.holds for difference in differences or ())
        if differences is not None:
            if as_json:
                print(json.dumps([d.as_dict() for d in differences], indent=2), flush=True)  # noqa: T201
            else:
                print(render(settings, layout.grid, steps, differences), flush=True)  # noqa: T201
        verdict = world.control.agree(holds)
        world.close()
        return EXIT_OK if verdict else EXIT_FAILED

    sys.exit(guard(world, run))


@app.command()
def plan(
    config: Config,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(help="Ranks to plan for.", min=1)] = 1,
    ranks_per_host: Annotated[
        int | None, typer.Option(help="Default: one host.", min=1, show_default=False)
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Of a rank: 80GB.", show_default=False)] = None,
    bandwidth_host: Annotated[
        str | None, typer.Option(help="Between ranks of a host: 300GB/s.", show_default=False)
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Of a host's line: 25GB/s, 200Mbit/s.", show_default=False)
    ] = None,
    latency: Annotated[str | None, typer.Option(help="Between hosts: 2us.", show_default=False)] = None,
    latency_host: Annotated[
        str | None, typer.Option(help="Between ranks of a host: 0.5us.", show_default=False)
    ] = None,
    overhead: Annotated[
        str | None,
        typer.Option(help="A rank's own time for a message it sends or takes: 50us.", show_default=False),
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option(help="Of each host, against the profile's: 1,1,0.5.", show_default=False),
    ] = None,
    wires: Annotated[
        str | None,
        typer.Option(help="Of gradients, that may be chosen, too: fp16,int8.", show_default=False),
    ] = None,
    pipeline_wires: Annotated[
        str | None,
        typer.Option(help="Of activations, that may be chosen, too: bf16.", show_default=False),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Layers' times; measured here if not given.", show_default=False)
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option(help="Keep what was measured here.", show_default=False)
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="A settings file with the best plan.", show_default=False)
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--draw", help="A chart of the schedule: plan.png.", show_default=False),
    ] = None,
) -> None:
    """Foresee a run, without MPI: draw the settings' grid and schedule; or, with grid="auto" or told of the
    cluster, find the best ones.
    """
    from hpc_train.training.preview import preview

    settings, task = _load(config, overrides)
    network = (bandwidth_host, bandwidth, latency, latency_host, overhead)
    described = (ranks_per_host, memory, speeds, wires, pipeline_wires, profile, save_profile, write)
    if not settings.grid.auto and not any((*network, *described)):
        print(preview(settings, task, ranks, picture))  # noqa: T201
        return
    from hpc_train.comm.interface import Wire
    from hpc_train.planning.cluster import Cluster
    from hpc_train.training.foresee import foresee

    cluster = Cluster.read(ranks, ranks_per_host, memory, *network, speeds)
    known = [wire for wire in Wire if wire is not Wire.INT8]
    allowed = _wires("--wires", wires, list(Wire)), _wires("--pipeline-wires", pipeline_wires, known)
    print(foresee(settings, task, cluster, profile, save_profile, write, picture, *allowed))  # noqa: T201


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run directory for its newest.")],
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
) -> None:
    """Write the whole model as one file with plain names, for plain PyTorch."""
    from hpc_train.checkpoint.export import export as write

    print(write(checkpoint, out))  # noqa: T201


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
def launch(
    context: typer.Context,
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Ranks to start.", min=1)] = 1,
    hosts: Annotated[str | None, typer.Option(help="Hosts with slots: a:4,b:4.", show_default=False)] = None,
    interface: Annotated[str | None, typer.Option(help="Network interface.", show_default=False)] = None,
) -> None:
    """Print and run the right mpirun line: hpc-train launch -n 4 train my.toml."""
    from hpc_train.launch.launcher import launch as start

    if not context.args:
        raise UserError("launch what? for instance: hpc-train launch -n 4 train examples/bytelm.toml")
    _check_before_launch(context, ranks)
    sys.exit(start(ranks, hosts, context.args, interface))


bench = typer.Typer(help="Measure this job's communication.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("allreduce")
def bench_allreduce(
    sizes: Annotated[str, typer.Option(help="Comma separated.")] = "4MiB,64MiB",
    wires: Annotated[str, typer.Option(help="Comma separated.")] = "fp32,fp16",
    as_json: AsJson = False,
) -> None:
    """Gradient sums beside the MPI library's own Allreduce, on the ranks of this job."""
    from hpc_train.comm.interface import Wire
    from hpc_train.training.guard import guard

    def options() -> tuple[list[int], list[Wire]]:
        formats = _wires("--wires", wires, list(Wire))
        try:
            return [parse_bytes(size) for size in sizes.split(",")], formats
        except ValueError as error:
            raise UserError(f"--sizes {sizes}: {error}") from None

    world, (num_bytes, formats) = _connect(options)

    def run() -> int:
        from hpc_train.bench.allreduce import render, run

        records = run(world, num_bytes, formats)
        if records is not None:
            print(json.dumps([asdict(r) for r in records]) if as_json else render(records), flush=True)  # noqa: T201
        world.close()
        return EXIT_OK

    sys.exit(guard(world, run))


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """What this machine and this launch have, and what is wrong with them."""
    from hpc_train.training.guard import guard

    world, _ = _connect(lambda: True)

    def run() -> int:
        from hpc_train.launch.doctor import examine, render

        findings = examine(world)
        if world.rank == 0:
            print(json.dumps(findings.as_dict(), indent=2) if as_json else render(findings), flush=True)  # noqa: T201
        world.close()
        return findings.exit_code

    sys.exit(guard(world, run))


def _wires(option: str, text: str | None, known: Sequence["Wire"]) -> list["Wire"]:
    """The wires in an option's list; none where it is not given."""
    by_name = {wire.value: wire for wire in known}
    names = text.split(",") if text else []
    if unknown := [name for name in names if name not in by_name]:
        raise UserError(f"{option} {text}: {unknown[0]!r} is unknown: known are {', '.join(by_name)}")
    return [by_name[name] for name in names]


def _load(config: Path, overrides: list[str] | None) -> tuple[Settings, "Task"]:
    from hpc_train.tasks.find import load_task

    settings = load(config, overrides or [])
    return settings, load_task(settings.task, settings.task_options)


def _start(config: Path, overrides: list[str] | None) -> tuple["World", tuple[Settings, "Task"]]:
    """Settings, task and world of a command that all ranks run."""
    from hpc_train.launch import horovod_settings
    from hpc_train.training.guard import guard, say, together

    world, (settings, task) = _connect(
        lambda: _load(config, overrides), lambda loaded: loaded[0].comm.backend
    )

    def honour() -> Settings:
        found = horovod_settings.variables(os.environ, world.control)
        warning = horovod_settings.without_effect(found, settings.comm.backend)
        if warning and world.rank == 0:
            say(f"warning: {warning}")
        return together(world, lambda: horovod_settings.honour(settings, found))

    return world, (guard(world, honour), task)


def _connect(prepare: Callable[[], T], backend: Callable[[T], str] = lambda _: "auto") -> tuple["World", T]:
    """Prepare without a message, then meet the other ranks: a mistake on any of them ends all, told once."""
    from hpc_train.comm.connect import connect
    from hpc_train.training.guard import attempt, guard, settle

    value, error = attempt(prepare)
    world = connect("auto" if value is None else backend(value))
    return world, guard(world, lambda: settle(world, value, error))


def _check_before_launch(context: typer.Context, ranks: int) -> None:
    """Find a mistake before mpirun starts, whose own messages would bury ours."""
    name, *args = context.args
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    if name not in group.commands:
        raise UserError(f"launch cannot run {name!r}: the commands are {', '.join(group.commands)}")
    if name not in ("train", "parity"):
        return
    from hpc_train.grid import Grid

    params = group.commands[name].make_context(name, args, parent=context.parent).params
    settings = load(params["config"], params["overrides"] or [])
    Grid.for_ranks(ranks, settings.grid.stages, settings.grid.fastest)


def _speaks() -> bool:
    """True on the rank whose words about a mistake are enough, as far as the environment tells."""
    from hpc_train.launch.identity import find

    identity = find(os.environ)
    return identity is None or identity.rank == 0


def main() -> NoReturn:
    """Entry point: a user's mistake is one line on stderr, from one rank, and exit code 2."""
    try:
        sys.exit(app(prog_name="hpc-train", standalone_mode=False))
    except UserError as error:
        line = f"error: {error}"
    except typer.TyperException as error:
        line = error.format_message()
        line = (
            line if "\n" in line else f"error: {line[0].lower()}{line[1:]}"
        )  # a whole help page stays as it is
    if _speaks():
        print(line, file=sys.stderr, flush=True)  # noqa: T201
    sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()

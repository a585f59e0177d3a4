"""`hpc-train plan`: what a run will look like, without MPI: grid, stages and schedule as text."""

from pathlib import Path

from hpc_train.config import Settings
from hpc_train.data.sampler import cut
from hpc_train.grid import Grid
from hpc_train.pipeline.drawing import draw
from hpc_train.pipeline.layers import count_parameters
from hpc_train.pipeline.simulate import simulate
from hpc_train.tasks.task import Task
from hpc_train.training.layout import find_schedule, layer_costs, make_grid, split_layers
from hpc_train.training.lone_sample import check_lone

_LEFT_OUT = "..."


def preview(settings: Settings, task: Task, num_ranks: int, picture: Path | None = None) -> str:
    """Grid, layers of each stage with their parameters and cost, and the schedule over time.

    `picture`: where to draw the schedule, too.

    Raises:
        UserError: the settings do not fit `num_ranks` ranks.
    """
    grid = make_grid(settings, num_ranks)
    specs = task.layers()
    schedule = find_schedule(settings)
    split = split_layers(settings, specs)
    check_lone(settings, task, grid.replicas)
    costs = layer_costs(specs)
    chunk_costs = [sum(costs[i] for i in layers) for layers in split]
    micro_batch = settings.batch.micro_batch
    share = cut(settings.batch.size, [1] * grid.replicas)[0]
    num_micro_batches = -(-share // micro_batch)
    order = schedule.order(grid.stages, num_micro_batches)
    forward_s = [cost / (sum(costs) or 1.0) for cost in chunk_costs]  # layers may all cost nothing
    # A backward pass computes two products, for the input and for the weights, where forward computes one.
    result = simulate(order, forward_s, forward_s, forward_s)
    title = (
        f"schedule {settings.pipeline.schedule}: {num_micro_batches} micro-batches of up to {micro_batch} "
        f"samples, of the {share} that replica 0 takes of {settings.batch.size}; bubble {result.bubble:.0%}, "
        f"live micro-batches by stage {', '.join(map(str, result.peak_live))}"
    )
    if picture:
        from hpc_train.pipeline.chart import save_chart

        save_chart(
            picture, result, f"{settings.pipeline.schedule}, 1 = a micro-batch's forward through all layers"
        )
    return "\n\n".join(
        [draw_grid(grid), _draw_stages(settings, task, split, chunk_costs), f"{title}\n{draw(order)}"]
    )


def draw_grid(grid: Grid) -> str:
    """The ranks as a table, a replica a row.

    >>> print(draw_grid(Grid(2, 2)))
    grid: 4 ranks = 2 replicas x 2 stages, neighbours differ in stage
                 stage 0  stage 1
    replica 0          0        1
    replica 1          2        3
    """
    title = (
        f"grid: {_count(grid.size, 'rank')} = {_count(grid.replicas, 'replica')} x "
        f"{_count(grid.stages, 'stage')}, neighbours differ in {grid.fastest}"
    )
    stages = _some(grid.stages)
    rows = [["", *(_LEFT_OUT if stage is None else f"stage {stage}" for stage in stages)]]
    for replica in _some(grid.replicas):
        if replica is None:
            rows.append([_LEFT_OUT])
            continue
        ranks = (_LEFT_OUT if stage is None else str(grid.rank(replica, stage)) for stage in stages)
        rows.append([f"replica {replica}", *ranks])
    label = max(len(row[0]) for row in rows) + 2
    width = max(len(cell) for cell in rows[0]) + 2
    lines = (row[0].ljust(label) + "".join(cell.rjust(width) for cell in row[1:]) for row in rows)
    return "\n".join([title, *map(str.rstrip, lines)])


def _some(number: int) -> list[int | None]:
    """0, 1, ... `number` - 1; of many the first and the last ones, and None for those between."""
    return [*range(number)] if number <= 12 else [*range(8), None, number - 2, number - 1]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _draw_stages(settings: Settings, task: Task, split: list[range], chunk_costs: list[float]) -> str:
    """A line for each stage, or for each chunk where stages hold several."""
    specs, schedule = task.layers(), find_schedule(settings)
    held_by = [schedule.stage_of(chunk, settings.grid.stages) for chunk in range(len(split))]
    several = schedule.chunks > 1
    parameters = [count_parameters(spec) for spec in specs]
    whole = sum(chunk_costs) or 1.0
    chunk_title = f"{'chunk':<7}" if several else ""
    lines = [f"{chunk_title}{'stage':<7}{'parameters':>11}{'cost':>7}  layers"]
    for chunk, layers in enumerate(split):
        titles = [specs[i].title or f"layer {i}" for i in layers]
        names = titles[0] if len(titles) == 1 else f"{titles[0]} .. {titles[-1]}"
        held = sum(parameters[i] for i in layers)
        lines.append(
            (f"{chunk:<7}" if several else "")
            + f"{held_by[chunk]:<7}{held:>11,}{chunk_costs[chunk] / whole:>7.0%}"
            f"  {layers.start}-{layers.stop - 1}: {names}"
        )
    first = "all".ljust(14 if several else 7)
    lines.append(f"{first}{sum(parameters):>11,}{1:>7.0%}  {len(specs)} layers, task {settings.task}")
    return "\n".join(lines)

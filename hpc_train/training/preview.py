"""`hpc-train plan`: what a run will look like, without MPI: grid, stages and schedule as text."""

from hpc_train.config import Settings
from hpc_train.data.sampler import cut
from hpc_train.grid import Grid
from hpc_train.pipeline.check import simulate
from hpc_train.pipeline.drawing import draw
from hpc_train.pipeline.layers import count_parameters
from hpc_train.pipeline.schedules import make
from hpc_train.tasks.task import Task
from hpc_train.training.worker import layer_costs, split_layers

# A backward pass computes two products (for inputs and for weights) where forward computes one.
BACKWARD_PER_FORWARD = 2.0


def preview(settings: Settings, task: Task, num_ranks: int) -> str:
    """Grid, layers of each stage with their parameters and cost, and the schedule over time.

    Raises:
        UserError: the settings do not fit `num_ranks` ranks.
    """
    grid = Grid.for_ranks(num_ranks, settings.grid.stages, settings.grid.fastest)
    specs = task.layers()
    split = split_layers(settings, specs)
    costs = layer_costs(specs)
    stage_costs = [sum(costs[i] for i in layers) for layers in split]
    micro_batch = settings.batch.micro_batch
    share = cut(settings.batch.size, [1] * grid.replicas)[0]
    num_micro_batches = -(-share // micro_batch)
    order = make(settings.pipeline.schedule, grid.stages, num_micro_batches)
    forward_s = [cost / sum(costs) for cost in stage_costs]
    result = simulate(order, forward_s, [s * BACKWARD_PER_FORWARD for s in forward_s])
    title = (
        f"schedule {settings.pipeline.schedule}: {num_micro_batches} micro-batches of up to {micro_batch} "
        f"samples, of the {share} that replica 0 takes of {settings.batch.size}; bubble {result.bubble:.0%}, "
        f"live micro-batches by stage {', '.join(map(str, result.peak_live))}"
    )
    return "\n\n".join(
        [draw_grid(grid), _draw_stages(settings, task, split, stage_costs), f"{title}\n{draw(order)}"]
    )


def draw_grid(grid: Grid) -> str:
    """The ranks as a table, a replica a row.

    >>> print(draw_grid(Grid(2, 2)))
    grid: 4 ranks = 2 replicas x 2 stages, neighbours differ in stage
                 stage 0  stage 1
    replica 0          0        1
    replica 1          2        3
    """
    lines = [
        f"grid: {_count(grid.size, 'rank')} = {_count(grid.replicas, 'replica')} x "
        f"{_count(grid.stages, 'stage')}, neighbours differ in {grid.fastest}",
        " " * 11 + "".join(f"{f'stage {stage}':>9}" for stage in range(grid.stages)),
    ]
    shown = list(range(grid.replicas))
    if len(shown) > 12:
        shown = [*shown[:8], -1, *shown[-2:]]
    for replica in shown:
        if replica < 0:
            lines.append("  ...")
            continue
        ranks = "".join(f"{rank:>9}" for rank in grid.stages_of(replica))
        lines.append(f"{f'replica {replica}':<11}{ranks}")
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _draw_stages(settings: Settings, task: Task, split: list[range], stage_costs: list[float]) -> str:
    specs = task.layers()
    parameters = [count_parameters(spec) for spec in specs]
    lines = [f"{'stage':<7}{'parameters':>11}{'cost':>7}  layers"]
    for stage, layers in enumerate(split):
        titles = [specs[i].title or f"layer {i}" for i in layers]
        names = titles[0] if len(titles) == 1 else f"{titles[0]} .. {titles[-1]}"
        held = sum(parameters[i] for i in layers)
        lines.append(
            f"{stage:<7}{held:>11,}{stage_costs[stage] / sum(stage_costs):>7.0%}"
            f"  {layers.start}-{layers.stop - 1}: {names}"
        )
    lines.append(f"{'all':<7}{sum(parameters):>11,}{1:>7.0%}  {len(specs)} layers, task {settings.task}")
    return "\n".join(lines)

"""Is an order sound, and how long does it take?  PURE: neither torch nor MPI.

What an action waits for, and nothing else:

    sF(i)   the stage's action before it, and (s-1)F(i), whose output is its input
    sB(i)   the stage's action before it, and (s+1)B(i), which sends its gradient

That is all because of how the runtime sends. A send is started and goes on by itself; an output's
receive is posted when its action's turn comes, a gradient's right after the output was sent. The
sender waits for the end of a send only when no action can hold it up any more: for an output when
the next stage has sent the gradient back, for a gradient before the next gradient leaves, because
its receive has been posted since the forward. So even where a send ends only once its receive is
posted (rendezvous), an order deadlocks exactly if these waits form a cycle, and `validate` looks
for one by walking the order. (Forwards alone, where no gradient comes back, keep one output under
way: it is waited for before the next leaves. All stages take them in the same order.)
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpc_train.pipeline.actions import Action, Kind, Order


class Cell(NamedTuple):
    """An action in simulated time."""

    action: Action
    start_s: float
    end_s: float


class Simulation(NamedTuple):
    """What one step would take.

    `step_s`: until the last action ends. `bubble`: the share of all stages' time that is idle.
    `peak_live`: for each stage, the most micro-batches whose forward is done and whose backward
    is not, each of which holds its activations. `cells`: for each stage, its actions over time.
    """

    step_s: float
    bubble: float
    peak_live: list[int]
    cells: list[list[Cell]]


def validate(order: Order) -> None:
    """Check that every stage does every action exactly once, in an order that cannot deadlock.

    All micro-batches from 0 to the highest take part, on all stages, with a forward each, and with
    a backward after it unless the whole order is forwards only.

    Raises:
        ValueError: it is not so; the text ends with a table in which the failing cells are marked.
    """
    micro_batches = 1 + max((action.micro_batch for row in order for action in row), default=-1)
    kinds = {action.kind for row in order for action in row} | {Kind.F}
    for stage, row in enumerate(order):
        _validate_row(order, stage, row, micro_batches, kinds)
    done = [0] * len(order)
    for stage, _ in _walk(order):
        done[stage] += 1
    stuck = {stage: position for stage, position in enumerate(done) if position < len(order[stage])}
    if stuck:
        waits = [_explain_wait(stage, order[stage][position]) for stage, position in stuck.items()]
        more = f", and {len(waits) - 4} more" if len(waits) > 4 else ""
        raise ValueError(_failure(f"deadlock: {'; '.join(waits[:4])}{more}", order, stuck))


def simulate(
    order: Order,
    forward_s: float | Sequence[float],
    backward_s: float | Sequence[float],
    comm_s: float = 0.0,
) -> Simulation:
    """Play a sound order through in simulated time.

    Args:
        order: one that `validate` accepts.
        forward_s: seconds of one micro-batch's forward, the same on all stages or one value a stage.
        backward_s: seconds of its backward, given likewise.
        comm_s: seconds from the end of an action until what it sends is there; computing goes on meanwhile.
    """
    seconds = {Kind.F: _by_stage(forward_s, order), Kind.B: _by_stage(backward_s, order)}
    free_s = [0.0] * len(order)  # when the stage's latest action ends
    cells: list[list[Cell]] = [[] for _ in order]
    arrived_s: dict[Kind, list[dict[int, float]]] = {kind: [{} for _ in order] for kind in Kind}
    for stage, action in _walk(order):
        kind, micro_batch = action
        start_s = max(free_s[stage], arrived_s[kind][stage].pop(micro_batch, 0.0))
        free_s[stage] = end_s = start_s + seconds[kind][stage]
        cells[stage].append(Cell(action, start_s, end_s))
        receiver = _receiver(stage, kind)
        if 0 <= receiver < len(order):
            arrived_s[kind][receiver][micro_batch] = end_s + comm_s
    step_s = max(free_s, default=0.0)
    busy_s = sum(cell.end_s - cell.start_s for row in cells for cell in row)
    bubble = 1 - busy_s / (step_s * len(order)) if step_s else 0.0
    return Simulation(step_s, bubble, [_peak_live(row) for row in order], cells)


def _walk(order: Order) -> Iterator[tuple[int, Action]]:
    """Every stage and action after all that it waits for, as far as the order can be walked."""
    position = [0] * len(order)
    arrived: dict[Kind, list[set[int]]] = {kind: [set() for _ in order] for kind in Kind}
    waits_for_none = {Kind.F: 0, Kind.B: len(order) - 1}  # the stage where the kind begins
    asleep: list[Action | None] = [None] * len(order)  # what a stage waits for
    awake = deque(range(len(order)))
    while awake:
        stage = awake.popleft()
        row = order[stage]
        while position[stage] < len(row):
            action = row[position[stage]]
            kind, micro_batch = action
            if stage != waits_for_none[kind] and micro_batch not in arrived[kind][stage]:
                asleep[stage] = action
                break
            position[stage] += 1
            yield stage, action
            receiver = _receiver(stage, kind)
            if 0 <= receiver < len(order):
                arrived[kind][receiver].add(micro_batch)
                if asleep[receiver] == action:
                    asleep[receiver] = None
                    awake.append(receiver)


def _receiver(stage: int, kind: Kind) -> int:
    """The stage that waits for what `stage` sends after an action; outside the grid if there is none."""
    return stage + 1 if kind is Kind.F else stage - 1


def _validate_row(order: Order, stage: int, row: list[Action], micro_batches: int, kinds: set[Kind]) -> None:
    """Every action of the kinds once, and backward after forward."""
    seen: dict[Action, int] = {}
    for position, action in enumerate(row):
        if action in seen:
            where = {stage: position}
            raise ValueError(_failure(f"{stage}{action} is there twice", order, where))
        if action.kind is Kind.B and Action(Kind.F, action.micro_batch) not in seen:
            text = f"{stage}{action} comes before {stage}F{action.micro_batch}"
            raise ValueError(_failure(text, order, {stage: position}))
        seen[action] = position
    if len(seen) < micro_batches * len(kinds):
        wanted = (Action(kind, number) for number in range(micro_batches) for kind in Kind if kind in kinds)
        missing = next(action for action in wanted if action not in seen)
        raise ValueError(_failure(f"{stage}{missing} is missing", order, {stage: len(row)}))


def _explain_wait(stage: int, action: Action) -> str:
    sender = stage - 1 if action.kind is Kind.F else stage + 1
    return f"{stage}{action} waits for {sender}{action}"


def _failure(text: str, order: Order, failing: dict[int, int]) -> str:
    """`text` and the part of the order around the failing positions, {stage: position}, which are marked."""
    first = max(0, min(failing.values()) - 6)
    last = min(max(failing.values()) + 7, first + 24)
    shown = sorted(failing)[:8]
    table = [[""] + [f"#{position}" for position in range(first, last)]]
    for stage in range(max(0, shown[0] - 1), min(len(order), shown[-1] + 2)):
        row = [str(action) for action in order[stage]]
        if stage in failing:
            at = failing[stage]
            row[at : at + 1] = [f">{row[at] if at < len(row) else '?'}<"]
        table.append([f"stage {stage}", *row[first:last]])
    num_columns = max(map(len, table[1:]))
    widths = [max(len(row[column]) for row in table if column < len(row)) for column in range(num_columns)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)  # map ends with the widths
    return "\n    ".join([text, *lines])


def _by_stage(seconds: float | Sequence[float], order: Order) -> list[float]:
    values = list(seconds) if isinstance(seconds, Sequence) else [seconds] * len(order)
    if len(values) != len(order):
        raise ValueError(f"{len(values)} times for {len(order)} stages: give one a stage")
    return values


def _peak_live(row: list[Action]) -> int:
    """The most forwards without their backward; in an order of forwards alone none is kept."""
    if all(action.kind is Kind.F for action in row):
        return 0
    live = peak = 0
    for action in row:
        live += 1 if action.kind is Kind.F else -1
        peak = max(peak, live)
    return peak

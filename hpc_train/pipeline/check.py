"""Is an order sound?  PURE: neither torch nor MPI.

What an action waits for, and nothing else; c is a chunk, i a micro-batch:

    cF(i)          the stage's action before it, and (c-1)F(i), whose output is its input
    cB(i), cI(i)   the stage's action before it, and (c+1)B(i) or (c+1)I(i), which gives its gradient
    cW(i)          the stage's action before it

Where both chunks are on one stage there is no message, and the one action comes before the other.

That is all because of how the runtime sends. A send is started and goes on by itself; an output's
receive is posted when its action's turn comes or earlier, a gradient's right after the output was sent. The
sender waits for the end of a send only when no action can hold it up any more: for an output when
the next chunk has sent the gradient back, for a gradient before the next gradient leaves, because
its receive has been posted since the forward. So even where a send ends only once its receive is
posted (rendezvous), an order deadlocks exactly if these waits form a cycle, and `validate` looks
for one by walking the order. (Forwards alone, where no gradient comes back, keep one output under
way to each stage: it is waited for before the next leaves. All stages then take them in the same order, see
Schedule.forwards.)
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpc_train.pipeline.actions import Action, Kind, Order, count_micro_batches


class _Step(NamedTuple):
    """What an action makes of its micro-batch in its chunk: from one state into another."""

    before: int
    after: int


# The states of a micro-batch in a chunk: nothing done, F done, I done, all done by B, all done by W.
_NOTHING, _FORWARD, _HALF, _WHOLE, _BOTH = range(5)
_STEPS = {
    Kind.F: _Step(_NOTHING, _FORWARD),
    Kind.B: _Step(_FORWARD, _WHOLE),
    Kind.I: _Step(_FORWARD, _HALF),
    Kind.W: _Step(_HALF, _BOTH),
}
_MISSING = {
    _NOTHING: Kind.F,
    _FORWARD: Kind.B,
    _HALF: Kind.W,
}  # what a state lacks, that a row may not end in


def validate(order: Order) -> None:
    """Check that every action is there exactly once, in an order that cannot deadlock.

    Every chunk from 0 to the highest is on one stage, every stage has a chunk, and every micro-batch
    from 0 to the highest takes part in each: a forward, and after it B, or I and after that W, unless the
    whole order is forwards only.

    Raises:
        ValueError: it is not so; the text ends with a table in which the failing cells are marked.
    """
    stage_of = _place(order)
    micro_batches = count_micro_batches(order)
    trains = any(action.kind is not Kind.F for row in order for action in row)
    for stage, row in enumerate(order):
        chunks = [chunk for chunk, at in enumerate(stage_of) if at == stage]
        _validate_row(order, stage, row, chunks, micro_batches, trains)
    done = [0] * len(order)
    for stage, _ in walk(order, stage_of):
        done[stage] += 1
    stuck = {stage: position for stage, position in enumerate(done) if position < len(order[stage])}
    if stuck:
        waits = [_explain_wait(order, stage_of, order[stage][at]) for stage, at in stuck.items()]
        more = f", and {len(waits) - 4} more" if len(waits) > 4 else ""
        raise ValueError(f"deadlock: {'; '.join(waits[:4])}{more}{marked(order, stuck)}")


def walk(order: Order, stage_of: Sequence[int]) -> Iterator[tuple[int, Action]]:
    """Every stage and action after all that it waits for, as far as the order can be walked.

    Args:
        order: rows of actions whose F, B or I, W of one chunk and micro-batch come in this order.
        stage_of: the stage of each chunk.
    """
    micro_batches, last = count_micro_batches(order), len(stage_of) - 1
    outputs = [bytearray(micro_batches) for _ in stage_of]  # by chunk: 1 if F is done
    gradients = [bytearray(micro_batches) for _ in stage_of]  # by chunk: 1 if B or I is done
    position = [0] * len(order)
    waited: list[tuple[bytearray, int] | None] = [None] * len(order)  # what a stage sleeps for
    awake = deque(range(len(order)))
    while awake:
        stage = awake.popleft()
        row, at = order[stage], position[stage]
        while at < len(row):
            action = row[at]
            chunk, kind, micro_batch = action
            if kind is Kind.F:
                if chunk and not outputs[chunk - 1][micro_batch]:
                    waited[stage] = outputs[chunk - 1], micro_batch
                    break
                outputs[chunk][micro_batch] = 1
                receiver = stage_of[chunk + 1] if chunk < last else stage
            elif kind is Kind.W:
                receiver = stage
            else:
                if chunk < last and not gradients[chunk + 1][micro_batch]:
                    waited[stage] = gradients[chunk + 1], micro_batch
                    break
                gradients[chunk][micro_batch] = 1
                receiver = stage_of[chunk - 1] if chunk else stage
            at += 1
            yield stage, action
            awaited = waited[receiver]
            if awaited and awaited[0][awaited[1]]:
                waited[receiver] = None
                awake.append(receiver)
        position[stage] = at


def marked(rows: Sequence[Sequence[object]], failing: dict[int, int]) -> str:
    """The part of the rows around the failing positions, {stage: position}, marked; a line each, indented."""
    first = max(0, min(failing.values(), default=0) - 6)
    last = min(max(failing.values(), default=0) + 7, first + 24)
    shown = sorted(failing)[:8] or [0]
    table = [[""] + [f"#{position}" for position in range(first, last)]]
    for stage in range(max(0, shown[0] - 1), min(len(rows), shown[-1] + 2)):
        cells = [str(cell) for cell in rows[stage][first:last]]
        if stage in failing and first <= failing[stage] < last:
            at = failing[stage] - first
            cells[at : at + 1] = [f">{(cells[at] if at < len(cells) else '') or '?'}<"]
        table.append([f"stage {stage}", *cells])
    num_columns = max(map(len, table[1:]))
    widths = [max(len(row[column]) for row in table if column < len(row)) for column in range(num_columns)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)  # map ends with the widths
    return "".join("\n    " + line for line in lines)


def _place(order: Order) -> list[int]:
    """The stage of each chunk, where there is one for each and a chunk for every stage."""
    stage_of: dict[int, int] = {}
    for stage, row in enumerate(order):
        for chunk in sorted({action.chunk for action in row}):
            if chunk in stage_of:
                text = f"chunk {chunk} is on stage {stage_of[chunk]} and on stage {stage}"
                at = next(at for at, action in enumerate(row) if action.chunk == chunk)
                raise ValueError(text + marked(order, {stage: at}))
            stage_of[chunk] = stage
    for chunk in range(len(stage_of)):
        if chunk not in stage_of:
            raise ValueError(f"chunk {chunk} is on no stage, chunk {max(stage_of)} is{marked(order, {})}")
    idle = {stage: 0 for stage, row in enumerate(order) if not row}
    if idle and stage_of:
        raise ValueError(f"stage {min(idle)} has nothing to do{marked(order, idle)}")
    return [stage_of[chunk] for chunk in range(len(stage_of))]


def _validate_row(
    order: Order, stage: int, row: list[Action], chunks: list[int], micro_batches: int, trains: bool
) -> None:
    """All of a stage's actions once, and each after what it needs from its own chunk."""
    if len(row) < micro_batches:  # before there is a state for each micro-batch: a number may be absurd
        there = {action.micro_batch for action in row if action.chunk == chunks[0]}
        absent = next(number for number in range(micro_batches) if number not in there)
        _refuse_missing(order, stage, Action(chunks[0], Kind.F, absent))
    states = {chunk: bytearray(micro_batches) for chunk in chunks}
    for at, (chunk, kind, micro_batch) in enumerate(row):
        before, after = _STEPS[kind]
        if states[chunk][micro_batch] != before:
            text = _explain_step(row, at, states[chunk][micro_batch])
            raise ValueError(text + marked(order, {stage: at}))
        states[chunk][micro_batch] = after
    for chunk, ends in states.items():
        for micro_batch, end in enumerate(ends):
            if end in _MISSING and (trains or end != _FORWARD):
                _refuse_missing(order, stage, Action(chunk, _MISSING[end], micro_batch))


def _refuse_missing(order: Order, stage: int, action: Action) -> None:
    raise ValueError(f"{action} is missing{marked(order, {stage: len(order[stage])})}")


def _explain_step(row: list[Action], at: int, state: int) -> str:
    """Why the action at `at` of a row may not come in this state."""
    action = row[at]
    if action in row[:at]:
        return f"{action} is there twice"
    if state in (_HALF, _WHOLE, _BOTH):
        other = action._replace(kind=Kind.B if state == _WHOLE else Kind.I)
        return f"{action} and {other} are both there: a backward is B, or I and W"
    needed = action._replace(kind=Kind.I if action.kind is Kind.W else Kind.F)
    return f"{action} has no {needed} before it"


def _explain_wait(order: Order, stage_of: Sequence[int], action: Action) -> str:
    chunk, kind, micro_batch = action
    kinds, giver = ({Kind.F}, chunk - 1) if kind is Kind.F else ({Kind.B, Kind.I}, chunk + 1)
    given = (Action(giver, other, micro_batch) for other in kinds)
    awaited = next(wanted for wanted in given if wanted in order[stage_of[giver]])
    return f"{action} waits for {awaited}"

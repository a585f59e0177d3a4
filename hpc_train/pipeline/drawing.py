"""An order over time, as text that a person reads.  PURE: neither torch nor MPI.

stage 0  F0 F1 .  .  B0=== F2 B1=== .  B2===
stage 1  .  F0 B0=== F1 B1=== F2 B2=== .  .
"""

from hpc_train.pipeline.actions import Action, Kind, Order, placement
from hpc_train.pipeline.simulate import Cell, simulate

_MOST_ROWS = 24


def draw(order: Order, columns: tuple[int, int, int] = (1, 1, 1), width: int = 110) -> str:
    """A table of micro-batches over time, a row for each stage; drawn for equal chunks and instant messages.

    Args:
        order: one that `check.validate` accepts.
        columns: how many columns of time F, I and W take; B takes I's and W's.
        width: characters of a line; what does not fit is left out of the middle.
    """
    simulation = simulate(order, *columns)
    num_columns = round(simulation.step_s)
    alone = placement(order) == list(range(len(order)))  # then a stage's number is its chunk's
    column_width = 1 + max((len(_label(action, alone)) for row in order for action in row), default=1)
    label_width = len(f"stage {len(order) - 1}  ")
    fitting = max(5, (width - label_width) // column_width)
    rows = []
    for stage, cells in enumerate(simulation.cells):
        texts = _columns(cells, alone, num_columns, column_width)
        if num_columns > fitting:
            texts[fitting // 2 : num_columns - (fitting - 1) // 2] = ["~".ljust(column_width)]
        rows.append((f"stage {stage}".ljust(label_width) + "".join(texts)).rstrip())
    if len(rows) > _MOST_ROWS:
        rows[_MOST_ROWS - 5 : -4] = ["..."]
    left_out = ", ~: left out" if num_columns > fitting else ""
    legend = _legend({action.kind for row in order for action in row}, alone, columns)
    return "\n".join([*rows, f"time runs to the right, .: idle{left_out}", legend])


def _label(action: Action, alone: bool) -> str:
    return f"{action.kind.name}{action.micro_batch}" if alone else str(action)


def _columns(cells: list[Cell], alone: bool, num_columns: int, column_width: int) -> list[str]:
    """One stage's row: a text of `column_width` characters for each column of time."""
    columns = [".".ljust(column_width)] * num_columns
    for action, start, end in cells:
        length = round(end - start)
        text = _label(action, alone).ljust(length * column_width - 1, "=" if length > 1 else " ") + " "
        for number in range(length):
            columns[round(start) + number] = text[number * column_width : (number + 1) * column_width]
    return columns


def _legend(kinds: set[Kind], alone: bool, columns: tuple[int, int, int]) -> str:
    """What stands in the table of these kinds."""
    forward, inputs, weights = columns
    chunk, through = ("", "") if alone else ("2", " through chunk 2")
    parts = [f"{chunk}F3: forward of micro-batch 3{through}"]
    if Kind.B in kinds:
        parts.append(f"{chunk}B3: its backward ({(inputs + weights) / forward:g} x as long)")
    if Kind.I in kinds:
        parts.append(f"{chunk}I3 and {chunk}W3: backward for the input and for the weights")
    return ", ".join(parts)

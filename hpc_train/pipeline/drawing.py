"""An order over time, as a person reads it.  PURE: neither torch nor MPI.

stage 0  F0 F1 .  .  B0=== F2 B1=== .  .  B2===
stage 1  .  F0 B0=== F1 B1=== .  F2 B2=== .  .
"""

from hpc_train.pipeline.actions import Order
from hpc_train.pipeline.check import Cell, simulate


def draw(order: Order, forward: int = 1, backward: int = 2, width: int = 110) -> str:
    """A table of micro-batches over time, a row for each stage; drawn for equal stages and instant messages.

    Args:
        order: one that `validate` accepts.
        forward: how many columns of time a forward takes, at least 1.
        backward: the same for a backward.
        width: characters of a line; what does not fit is left out of the middle.
    """
    simulation = simulate(order, forward, backward)
    num_columns = round(simulation.step_s)
    column_width = 1 + max((len(str(action)) for row in order for action in row), default=1)
    label_width = len(f"stage {len(order) - 1}  ")
    fitting = max(5, (width - label_width) // column_width)
    rows = []
    for stage, cells in enumerate(simulation.cells):
        columns = _columns(cells, num_columns, column_width)
        if num_columns > fitting:
            columns[fitting // 2 : num_columns - (fitting - 1) // 2] = ["~".ljust(column_width)]
        rows.append((f"stage {stage}".ljust(label_width) + "".join(columns)).rstrip())
    times = f"{backward / forward:g} x as long"
    legend = f"time runs to the right; F3: forward of micro-batch 3, B3: its backward ({times}), .: idle"
    if num_columns > fitting:
        legend += ", ~: left out"
    return "\n".join([*rows, legend])


def _columns(cells: list[Cell], num_columns: int, column_width: int) -> list[str]:
    """One stage's row: a text of `column_width` characters for each column of time."""
    columns = [".".ljust(column_width)] * num_columns
    for action, start, end in cells:
        length = round(end - start)
        text = str(action).ljust(length * column_width - 1, "=" if length > 1 else " ") + " "
        for number in range(length):
            columns[round(start) + number] = text[number * column_width : (number + 1) * column_width]
    return columns

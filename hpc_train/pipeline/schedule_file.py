"""Schedules in files, as torch.distributed.pipelining writes and reads them.  PURE: neither torch nor MPI.

CSV, a row a rank, which is a stage of ours; what PyTorch calls a stage is a chunk. Empty cells are idle:

    0F0,0F1,,0B0,,0B1
    ,1F0,1B0,1F1,1B1,

Cells of PyTorch's own communication (SEND_F, RECV_B, UNSHARD, REDUCE_GRAD and their like) are read over,
since the runtime sends by itself, and `(0F4;3B1)OVERLAP_F_B` is read as its two actions one after the other.
"""

import csv
import re
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.pipeline.actions import Action, Kind, Order, count_micro_batches, parse_action, placement
from hpc_train.pipeline.check import marked, validate

_NOT_OURS = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def read(path: str | Path) -> Order:
    """The order in a file, which is checked.

    Raises:
        UserError: it cannot be read, or a cell is no action, or the order is not sound, or it does not
            train, or its stages hold unequal numbers of chunks. What can be marked in a table is.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read the schedule {path}: {error}") from None
    order = [_parse_row(path, rows, stage) for stage in range(len(rows))]
    try:
        validate(order)
    except ValueError as error:
        raise UserError(f"schedule {path}: {error}") from None
    if not any(action.kind is not Kind.F for row in order for action in row):
        raise UserError(f"schedule {path} has no backward, and nothing would be trained: add B, or I and W")
    held = [len({action.chunk for action in row}) for row in order]
    for stage, number in enumerate(held):
        if number != held[0]:
            raise UserError(
                f"schedule {path}: stage 0 holds {held[0]} chunks and stage {stage} {number}, "
                "but all must hold as many"
            )
    return order


def write(path: str | Path, order: Order) -> None:
    """Write an order so that `read`, and PyTorch's schedules, read it; idle time is not written.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(order)


def resized(name: str, order: Order, stages: int, micro_batches: int) -> Order:
    """A file's order for any number of micro-batches: repeated for more, without some for fewer.

    Whatever is left out, and one sound order after the other, is sound again: no action waits for one of
    another micro-batch but those before it in its row.

    Args:
        name: of the file, for what is raised.
        order: that `read` gave.
        stages: of the grid.
        micro_batches: that are wanted.

    Raises:
        UserError: the file is for another number of stages.
    """
    _check_stages(name, order, stages)
    own = count_micro_batches(order)
    return [
        [
            Action(chunk, kind, begin + micro_batch)
            for begin in range(0, micro_batches, own)
            for chunk, kind, micro_batch in row
            if begin + micro_batch < micro_batches
        ]
        for row in order
    ]


def forwards_in_file(name: str, order: Order, stages: int, micro_batches: int) -> Order:
    """Forwards alone, chunk after chunk for as many micro-batches at a time as the file has.

    Rows may take forwards in other orders than each other; a stage that has one output under way at a time
    could then wait for ever. In this order all stages take them alike.  Args and errors as for `resized`.
    """
    _check_stages(name, order, stages)
    own = count_micro_batches(order)
    groups = [range(begin, min(begin + own, micro_batches)) for begin in range(0, micro_batches, own)]
    return [
        [
            Action(chunk, Kind.F, number)
            for group in groups
            for chunk in sorted({action.chunk for action in row})
            for number in group
        ]
        for row in order
    ]


def stage_in_file(name: str, order: Order, chunk: int, stages: int) -> int:
    """The stage that holds `chunk`.

    Raises:
        UserError: the file is for another number of stages.
    """
    _check_stages(name, order, stages)
    return placement(order)[chunk]


def _parse_row(path: str | Path, rows: list[list[str]], stage: int) -> list[Action]:
    actions = []
    for column, cell in enumerate(rows[stage]):
        for word in _OVERLAP.sub(r"\1", cell).split(";"):
            if word.strip() and not _NOT_OURS.fullmatch(word.strip()):
                try:
                    actions.append(parse_action(word.strip()))
                except ValueError as error:
                    table = marked(rows, {stage: column})
                    raise UserError(f"schedule {path}: {error}{table}") from None
    return actions


def _check_stages(name: str, order: Order, stages: int) -> None:
    if stages != len(order):
        raise UserError(
            f"schedule {name} is for {len(order)} stages, a row each, but the grid has {stages}: "
            f"set grid.stages={len(order)}, or take another schedule"
        )

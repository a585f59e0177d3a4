"""What a stage does, one micro-batch at a time.  PURE: neither torch nor MPI.

A chunk is a contiguous run of layers; a stage holds one chunk, or several. An order is data: a list
of actions for each stage. As text it is in PyTorch's notation, chunk, kind, micro-batch:

    stage 0:  0F0 0F1 0B0 0B1        0F1: forward of micro-batch 1 through chunk 0
    stage 1:  1F0 1B0 1F1 1I1 1W1    1B0 = 1I0 1W0: backward at once, or its two halves apart
"""

import re
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The kind of work."""

    F = "forward"
    B = "backward"  # whole: I and W at once
    I = "backward for the input"  # noqa: E741  the gradient that the chunk before waits for
    W = "backward for the weights"  # nobody waits for it within the step


class Action(NamedTuple):
    """One piece of a stage's work; micro-batches are numbered from 0 in the replica's share."""

    chunk: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind.name}{self.micro_batch}"


Order = list[list[Action]]  # by stage

_WORD = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


def parse_action(word: str) -> Action:
    """The action that `word` writes down, for instance 2F0.

    Raises:
        ValueError: it is no action.
    """
    match = _WORD.fullmatch(word)
    if not match:
        raise ValueError(f"{word!r} is not an action: write for instance 0F3, 0B3, 0I3 or 0W3")
    chunk, kind, micro_batch = match.groups()
    return Action(int(chunk), Kind[kind], int(micro_batch))


def parse(text: str) -> Order:
    """The order that `text` writes down, one line a stage: the inverse of joining the actions' texts.

    Raises:
        ValueError: a word is no action.
    """
    return [[parse_action(word) for word in line.split()] for line in text.strip().splitlines()]


def actions_of(chunk: int, kind: Kind, micro_batches: range) -> list[Action]:
    """One kind of work on one chunk, for each of the micro-batches."""
    return [Action(chunk, kind, micro_batch) for micro_batch in micro_batches]


def count_micro_batches(order: Order) -> int:
    """One more than the highest number of a micro-batch in the order."""
    return 1 + max((action.micro_batch for row in order for action in row), default=-1)


def placement(order: Order) -> list[int]:
    """The stage of each chunk, by chunk, in an order that `check.validate` accepts."""
    stage_of = {action.chunk: stage for stage, row in enumerate(order) for action in row}
    return [stage_of[chunk] for chunk in range(len(stage_of))]

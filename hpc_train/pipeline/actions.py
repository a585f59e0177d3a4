"""What a stage does, one micro-batch at a time.  PURE: neither torch nor MPI.

An order is data: a list of actions for each stage. As text, one line a stage:

    stage 0:  F0 F1 B0 B1      0F1 in messages is stage 0's forward of micro-batch 1
    stage 1:  F0 B0 F1 B1
"""

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The kind of work."""

    F = "forward"
    B = "backward"


class Action(NamedTuple):
    """One piece of a stage's work; micro-batches are numbered from 0 in the replica's share."""

    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.name}{self.micro_batch}"


Order = list[list[Action]]  # by stage


def parse(text: str) -> Order:
    """The order that `text` writes down, one line a stage: the inverse of joining the actions' texts.

    Raises:
        ValueError: a word is not a kind and a number.
    """
    return [[_parse_action(word) for word in line.split()] for line in text.strip().splitlines()]


def _parse_action(word: str) -> Action:
    if word[0] not in Kind.__members__ or not word[1:].isdecimal():
        raise ValueError(f"{word!r} is not an action: write for instance F3 or B3")
    return Action(Kind[word[0]], int(word[1:]))

"""A mailbox between threads: `put` a message, `take` it in the order sent, never wait for one who is gone."""

import threading
from collections import deque
from collections.abc import Hashable
from typing import Any

from hpc_train.errors import PeerLost


class Mail:
    """Messages between the ranks of one process: first in, first out, for each channel and pair."""

    def __init__(self) -> None:
        self._boxes: dict[Hashable, deque[Any]] = {}
        self._gone: dict[int, BaseException | None] = {}
        self._changed = threading.Condition()

    def put(self, channel: Hashable, source: int, dest: int, message: object) -> None:
        """Leave a message; never waits."""
        with self._changed:
            self._boxes.setdefault((channel, source, dest), deque()).append(message)
            self._changed.notify_all()

    def take(self, channel: Hashable, source: int, dest: int, doing: str) -> Any:
        """The oldest message that was not taken; waits for it.

        Raises:
            PeerLost: it will never come, as its sender is gone, or as some rank raised.
        """
        box = (channel, source, dest)
        with self._changed:
            while not self._boxes.get(box):
                failed = [rank for rank, error in self._gone.items() if error is not None]
                if failed or source in self._gone:
                    raise PeerLost(failed[:1] or [source], doing)
                self._changed.wait()
            messages = self._boxes[box]
            message = messages.popleft()
            if not messages:
                del self._boxes[box]
            return message

    def holds(self, channel: Hashable, source: int, dest: int) -> bool:
        """Whether there is a message to take."""
        with self._changed:
            return (channel, source, dest) in self._boxes

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        """Tell the others that `rank` sends nothing more; `error` if it raised."""
        with self._changed:
            self._gone.setdefault(rank, error)
            self._changed.notify_all()

    def first_error(self) -> BaseException | None:
        """What the first rank that raised has raised."""
        with self._changed:
            return next((error for error in self._gone.values() if error is not None), None)

"""Signals that ask a job to stop: a handler only sets a flag, and the next report carries it to rank 0."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class SignalFlag:
    """Within it, SIGTERM and SIGUSR2 set `seen` and do nothing else; a second SIGTERM ends the process.

    A handler runs between any two lines of Python, so that saving there would be wrong: `seen` is read
    once a step.  SIGUSR2 may come any number of times.  Use it in the main thread only.

        with SignalFlag() as flag:
            while training:
                report = Report(..., signal=flag.seen)
    """

    def __init__(self) -> None:
        self.seen = 0  # the last signal's number, or 0
        self._terminated = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "SignalFlag":
        self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: a handler that was not installed from Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = number
        if number == signal.SIGTERM:
            if self._terminated:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            self._terminated = True

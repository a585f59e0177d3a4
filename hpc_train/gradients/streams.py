"""CUDA's order of work between the thread that makes gradients and the one that sums them.

Kernels run later than the calls that start them, so "ready" and "summed" are events on streams.
On a CPU every call is done when it returns, and nothing here does anything.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream for sums alone: what waits for the network must not hold up backward's kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """The moment when all that this thread has started so far is done."""
        moment: torch.cuda.Event | None = None
        if self._stream is not None:
            moment = torch.cuda.current_stream(self._device).record_event()
        return moment

    @contextmanager
    def after(self, moment: torch.cuda.Event | None) -> Iterator[None]:
        """Work started inside runs on the side stream, after `moment`."""
        if self._stream is None or moment is None:
            yield
            return
        self._stream.wait_event(moment)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What this thread starts from now on runs after all that is on the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

"""Where the time of a step goes: computing, waiting for another rank, or communicating."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields


@dataclass
class Stopwatch:
    """Seconds by kind; times of one kind add up until `reset`.

    `compute_s`: forward, backward, optimizer.  `wait_s`: for activations or their gradients from
    another stage.  `comm_s`: gradient sums and agreement that backward did not hide.
    """

    compute_s: float = 0.0
    wait_s: float = 0.0
    comm_s: float = 0.0

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Add the time spent inside to `kind`, one of "compute", "wait", "comm"."""
        began = time.perf_counter()
        try:
            yield
        finally:
            name = f"{kind}_s"
            setattr(self, name, getattr(self, name) + time.perf_counter() - began)

    def reset(self) -> None:
        """Start from zero."""
        for field in fields(self):
            setattr(self, field.name, 0.0)

"""Which way to sum is the fastest here: asked once at the start, for each wire and size.

A way is a function; what it costs depends on the network, the library and the number of hosts, so it
is measured and not assumed.  All ranks measure together and choose by the same numbers.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping

from torch import Tensor

from hpc_train.comm.interface import Wire

Sum = Callable[[Tensor, Wire, Tensor | None], None]

_REPETITIONS = 3
_LEVEL = 1.02
_HOPELESS = 3.0  # times the best warm-up: not worth a repetition


def measure(
    ways: Mapping[str, Sum],
    buffer: Tensor,
    wire: Wire,
    slowest: Callable[[float], float],
) -> dict[str, float]:
    """Seconds that each way takes to sum `buffer`, whose values do not matter; the same on all ranks.

    `slowest` gives all ranks the largest of their values.
    """

    def timed(way: Sum) -> float:
        slowest(0.0)  # begin together
        began = time.perf_counter()
        way(buffer, wire, None)
        return slowest(time.perf_counter() - began)

    first = {name: timed(way) for name, way in ways.items()}
    first = {name: min(seconds, timed(ways[name])) for name, seconds in first.items()}
    hopeful = [name for name, seconds in first.items() if seconds <= _HOPELESS * min(first.values())]
    times: dict[str, list[float]] = {name: [] for name in hopeful}
    for _ in range(_REPETITIONS):
        for name in hopeful:
            times[name].append(timed(ways[name]))
    return {**first, **{name: statistics.median(seconds) for name, seconds in times.items()}}


def choose(seconds: Mapping[str, float]) -> str:
    """The first way that is as fast as the fastest, within what repetitions differ by."""
    best = min(seconds.values())
    return next(name for name, took in seconds.items() if took <= _LEVEL * best)


def describe(seconds: Mapping[str, float], num_bytes: int, wire: Wire) -> str:
    """One line: what was chosen, and what was measured, the fastest first."""
    order = sorted(seconds, key=lambda name: seconds[name])
    told = ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms" for name in order)
    return (
        f"gradient sums, {wire.value}: {choose(seconds)} (measured with {num_bytes / 2**20:.3g} MiB: {told})"
    )


class Choices:
    """The ways chosen so far, by wire and size."""

    def __init__(self) -> None:
        self._names: dict[tuple[Wire, int], str] = {}

    def put(self, wire: Wire, numel: int, name: str) -> None:
        """Remember a choice."""
        self._names[wire, numel] = name

    def get(self, wire: Wire, numel: int) -> str | None:
        """What was chosen for this wire and the size nearest to `numel`; None if nothing was."""
        sizes = [size for known, size in self._names if known is wire]
        if not sizes:
            return None
        return self._names[wire, min(sizes, key=lambda size: abs(math.log(size / numel)))]

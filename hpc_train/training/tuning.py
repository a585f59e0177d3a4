"""Which ways to sum gradients `gradients.tune` tries, and how it tells what they took."""

from collections.abc import Sequence

from hpc_train.config import GradientSettings
from hpc_train.coordinator.plan import TRIALS

_BUCKET_BYTES = (2**20, 4 * 2**20, 16 * 2**20, 64 * 2**20)


def ways_to_try(settings: GradientSettings) -> list[GradientSettings]:
    """The settings as they are, then other bucket sizes, on the wire and on those in `tune_wires`.

    Each is one trial; how messages go, direct or halving, short or long, is measured whenever a trial
    begins (`Collective.prepare`).
    """
    wires = list(dict.fromkeys((settings.wire, *settings.tune_wires)))
    sizes = list(dict.fromkeys((settings.bucket_bytes, *_BUCKET_BYTES)))
    ways = [
        settings.model_copy(update={"wire": wire, "bucket_bytes": size}) for wire in wires for size in sizes
    ]
    assert len(ways) <= TRIALS
    return ways


def describe(ways: Sequence[GradientSettings], trial_s: Sequence[float], chosen: int) -> str:
    """One line: every way that was tried, the fastest first."""

    def name(index: int) -> str:
        way = ways[index]
        return f"{way.bucket_bytes / 2**20:g} MiB {way.wire}"

    order = sorted(range(len(ways)), key=lambda index: trial_s[index])
    told = ", ".join(f"{name(index)} {1e3 * trial_s[index]:.3g} ms" for index in order)
    return f"gradients tuned: {name(chosen)} from now on; a step took with {told}"

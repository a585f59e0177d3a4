"""`gradients.tune`: which ways to sum gradients are tried, going from one to the next, telling the result.

The policy tune_gradients decides, on rank 0; the plan says which way a step takes.
"""

from collections.abc import Callable, Sequence

from hpc_train.config import GradientSettings
from hpc_train.coordinator.plan import TRIALS, Plan
from hpc_train.coordinator.policies.tune_gradients import TuneGradients

_BUCKET_BYTES = (2**20, 4 * 2**20, 16 * 2**20, 64 * 2**20)


class Tuning:
    """One rank's part.

    Args:
        settings: of the run; their way is tried first.
        first_step: where the trials begin.
        take: sums gradients another way from the next step on; all ranks together.
        note: a line for people.
    """

    def __init__(
        self,
        settings: GradientSettings,
        first_step: int,
        take: Callable[[GradientSettings], None],
        note: Callable[[str], None],
    ) -> None:
        self._ways = ways_to_try(settings)
        self.policy = TuneGradients(len(self._ways), first_step)
        self._take = take
        self._note = note
        self._trial = 0
        self._told = False

    def follow(self, plan: Plan) -> None:
        """Take the plan's way, before its step; tell what was tried when all of it was."""
        if plan.trial != self._trial:
            self._trial = plan.trial
            self._take(self._ways[plan.trial])
        if self.policy.done(plan) and not self._told:
            self._told = True
            self._note(describe(self._ways, plan.trial_s, plan.trial))


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

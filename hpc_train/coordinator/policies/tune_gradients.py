"""Try ways to sum gradients over the first steps, and keep the fastest.  PURE: neither torch nor MPI.

    step    1 2 3 4 5   6 7 8 9 10   11 12 13 14 15   16 17   18 ...
    trial   0 0 0 0 0   1 1 1 1 1     2  2  2  2  2    2  2   the fastest

The steps of a trial that come first are not counted: the ways change in them. The last one goes on until
all its reports are known, so that the choice is made once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_train.coordinator.plan import TRIALS, Plan
from hpc_train.coordinator.report import Report

STEPS_EACH = 5
_NOT_COUNTED = 2
_REPORT_TAKES = 3  # steps, to the plan that knows it


@dataclass(frozen=True)
class TuneGradients:
    """Try the ways 0 to `ways` - 1, beginning at step `first_step`."""

    ways: int
    first_step: int

    def __post_init__(self) -> None:
        assert 1 <= self.ways <= TRIALS, f"{self.ways} ways where a plan has room for {TRIALS}"

    def decide(self, reports: Sequence[Report], plan: Plan) -> Plan:
        """Set `trial`; take the slowest rank's time of a step for that of its trial."""
        times = list(plan.trial_s)
        if reports:
            way, number = self._trial_of(reports[0].step)
            if way < self.ways and number >= _NOT_COUNTED:
                slowest = max(r.compute_s + r.wait_s + r.comm_s for r in reports)
                times[way] = min(times[way] or slowest, slowest)  # what disturbs a step makes it longer
        way = min(self._trial_of(plan.step)[0], self.ways - 1)
        if self._all_reported(plan):
            known = [i for i in range(self.ways) if times[i]]
            way = min(known, key=lambda i: times[i]) if known else 0
        return replace(plan, trial=way, trial_s=tuple(times))

    def done(self, plan: Plan) -> bool:
        """Whether every way was tried and the plan keeps to the fastest."""
        return self._all_reported(plan) and all(plan.trial_s[: self.ways])

    def _all_reported(self, plan: Plan) -> bool:
        last = self.first_step + self.ways * STEPS_EACH - 1
        return plan.step >= last + _REPORT_TAKES

    def _trial_of(self, step: int) -> tuple[int, int]:
        """Which way a step tries, and the number of the step within its trial."""
        return divmod(step - self.first_step, STEPS_EACH)

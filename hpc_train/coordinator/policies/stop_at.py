"""Save and stop after a given step.  PURE: neither torch nor MPI."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_train.coordinator.plan import Plan
from hpc_train.coordinator.report import Report


@dataclass(frozen=True)
class StopAt:
    """`step` is the last one; the reason that another policy gave before stands."""

    step: int

    def decide(self, reports: Sequence[Report], plan: Plan) -> Plan:
        """Set `save` and `stop` when the step is reached."""
        if plan.step < self.step:
            return plan
        return replace(plan, save=True, stop=True, reason=plan.reason or f"step {self.step} is reached")

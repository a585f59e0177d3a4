"""A checkpoint every so many steps, and after the last one.  PURE: neither torch nor MPI."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_train.coordinator.plan import Plan
from hpc_train.coordinator.report import Report


@dataclass(frozen=True)
class SaveEvery:
    """Save after steps `every`, 2 `every`, ... and after `last_step`; 0 saves after the last only."""

    every: int
    last_step: int

    def decide(self, reports: Sequence[Report], plan: Plan) -> Plan:
        """Set `save` where it is time."""
        due = self.every > 0 and plan.step % self.every == 0
        return replace(plan, save=plan.save or due or plan.step == self.last_step)

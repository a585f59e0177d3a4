"""Save and stop when a signal asked any rank to end.  PURE: neither torch nor MPI."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_train.coordinator.plan import Plan
from hpc_train.coordinator.report import Report


@dataclass(frozen=True)
class StopOnSignal:
    """A signal on one rank is enough: schedulers and people reach some ranks, or all of them."""

    def decide(self, reports: Sequence[Report], plan: Plan) -> Plan:
        """Set `save` and `stop` when a report tells of a signal."""
        told = [report for report in reports if report.signal]
        if not told:
            return plan
        first, *others = told
        words = f"{name_of(first.signal)} on rank {first.rank}"
        if others:
            words += f" and {len(others)} more"
        return replace(plan, save=True, stop=True, reason=plan.reason or words)


def name_of(number: int) -> str:
    """`SIGTERM`; a real-time signal has only its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""One exchange a step: reports go to rank 0, its plan comes back, and nobody waits for either.

A report needs one step to reach rank 0, and the plan made from it one more to reach all ranks; both
travel while the steps compute.  Exchanges stand at the starts of steps; 1 is the first step:

    exchange of step   hands in    decides, from    begins to broadcast   returns
    1                  nothing     plan 2, nothing  -  (all decide it)    plan 1
    2                  report 1    plan 3, nothing  -  (all decide it)    plan 2
    3                  report 2    plan 4, report 1 plan 4                plan 3
    4                  report 3    plan 5, report 2 plan 5                plan 4
    t                  report t-1  plan t+1, report t-2                   plan t

So a report handed in at one exchange takes effect two exchanges later.  Rank 0 waits only for reports
that are one step old, and the others for a plan that is one step old: the ranks stay within about
one step of each other without a barrier.
"""

from collections.abc import Sequence

from hpc_train.comm.interface import ControlPlane, Pending
from hpc_train.coordinator.plan import Plan
from hpc_train.coordinator.policy import Policy, decide
from hpc_train.coordinator.report import Report


class Coordinator:
    """One rank's end of the exchange; rank 0's also decides.

    Args:
        control: the channel; between two exchanges its other methods may be used.
        first_plan: the draft for the first step; policies fill it in.
        policies: the same rules on all ranks, in the order in which they are asked.
    """

    def __init__(self, control: ControlPlane, first_plan: Plan, policies: Sequence[Policy]) -> None:
        self._control = control
        self._policies = tuple(policies)
        self._plan: Pending[bytes] = _Known(self._decide([], first_plan))
        self._reports: Pending[list[bytes] | None] | None = None

    def exchange(self, report: Report | None) -> Plan:
        """Hand in what this rank measured and take the plan of the step that begins.

        All ranks call it once a step; either all or none of them have a report.  All get equal plans.
        Raises PeerLost when a rank is gone.
        """
        plan = Plan.unpack(self._plan.result())
        if self._reports is None:
            self._plan = _Known(self._decide([], plan.following()))
        else:
            records = self._reports.result()
            decided = None if records is None else self._decide(records, plan.following())
            self._plan = self._control.broadcast(decided, Plan.num_bytes(len(plan.shares)))
        self._reports = None if report is None else self._control.gather(report.pack())
        return plan

    def close(self) -> None:
        """Complete what is under way.  All ranks call it after the same exchange, or none does."""
        self._plan.result()
        if self._reports is not None:
            self._reports.result()

    def _decide(self, records: Sequence[bytes], draft: Plan) -> bytes:
        reports = [Report.unpack(record) for record in records]
        return decide(self._policies, reports, draft).pack()


class _Known:
    """A plan that needs no message: without reports the policies say the same on every rank."""

    def __init__(self, record: bytes) -> None:
        self._record = record

    def result(self) -> bytes:
        return self._record

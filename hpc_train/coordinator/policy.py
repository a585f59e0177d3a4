"""What a policy is, and how several make one plan.  PURE: neither torch nor MPI."""

from collections.abc import Sequence
from functools import reduce
from typing import Protocol

from hpc_train.coordinator.plan import Plan
from hpc_train.coordinator.report import Report


class Policy(Protocol):
    """One rule that turns reports into a plan.

    A pure function of its arguments and of what it was made with, which is the same on all ranks:
    any rank could decide in the place of rank 0.
    """

    def decide(self, reports: Sequence[Report], plan: Plan) -> Plan:
        """The plan `plan.step` should have.

        `plan` is the draft: the plan of the step before, moved on by one step, with what earlier
        policies have changed.  `reports` are by rank and those of three steps before; they are empty
        at the beginning, when nothing was measured yet.
        """


def decide(policies: Sequence[Policy], reports: Sequence[Report], draft: Plan) -> Plan:
    """Pass the draft through all policies, in their order."""
    plan = reduce(lambda plan, policy: policy.decide(reports, plan), policies, draft)
    assert sum(plan.shares) == plan.batch_size, f"shares {plan.shares} are not {plan.batch_size} samples"
    return plan

"""Every replica takes as many samples as the others.  PURE: neither torch nor MPI."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_train.coordinator.plan import Plan
from hpc_train.coordinator.report import Report


@dataclass(frozen=True)
class EqualShares:
    """Shares differ by one sample at most; the first replicas take what is left over.

    32 samples on 3 replicas: 11 11 10.
    """

    def decide(self, reports: Sequence[Report], plan: Plan) -> Plan:
        """Set the shares."""
        return replace(plan, shares=equal_shares(plan.batch_size, len(plan.shares)))


def equal_shares(batch_size: int, num_replicas: int) -> tuple[int, ...]:
    """`batch_size` samples cut among `num_replicas`."""
    each, left = divmod(batch_size, num_replicas)
    return (each + 1,) * left + (each,) * (num_replicas - left)

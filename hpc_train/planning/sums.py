"""How long the sum of a stage's gradients takes, and what it sends.  PURE: neither torch nor MPI.

A sum is two halves: each replica gets the total of a piece (reduce-scatter), then all pieces (all-gather).
In each half a host's ranks exchange what they hold of its part, and of h hosts each sends (h - 1) / h of the
bytes on the wire. Both go on at once, segment by segment, so that the slower one counts.
"""

import math

from hpc_train.comm.interface import Wire
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.placement import Summing
from hpc_train.planning.units import WIRE_SHARE


def half_seconds(num_bytes: float, wire: Wire, buckets: int, at: Summing, cluster: Cluster) -> float:
    """Seconds of a reduce-scatter, or of an all-gather.

    Args:
        num_bytes: of gradients in fp32.
        wire: between hosts.
        buckets: that are summed one after the other, each with the latency of log2(hosts) rounds.
        at: where the replicas stand.
        cluster: what they stand on.
    """
    if at.replicas == 1 or not num_bytes:
        return 0.0
    inside_bytes = num_bytes * (at.together - 1) / at.together
    if wire.lossy and at.hosts > 1:
        inside_bytes += num_bytes / at.together  # read once more, to be rounded
    between_bytes = num_bytes * WIRE_SHARE[wire] * (at.hosts - 1) / at.hosts * at.sharing
    latency_s = math.ceil(math.log2(at.hosts)) * cluster.latency_s
    if at.together > 1:
        latency_s += cluster.latency_host_s
    return buckets * latency_s + max(inside_bytes / cluster.bandwidth_host, between_bytes / cluster.bandwidth)


def sum_seconds(num_bytes: float, wire: Wire, buckets: int, at: Summing, cluster: Cluster) -> float:
    """Seconds of a whole sum; see `half_seconds`."""
    return 2 * half_seconds(num_bytes, wire, buckets, at, cluster)


def sent_bytes(num_bytes: float, wire: Wire, at: Summing, sharded: bool) -> float:
    """What each host of these replicas sends; with a sharded optimizer the second half is in fp32."""
    halves = WIRE_SHARE[wire] + WIRE_SHARE[Wire.FP32 if sharded else wire]
    return num_bytes * halves * (at.hosts - 1) / at.hosts

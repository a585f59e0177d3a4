"""Which ranks of a grid share a host, and so a line to the others.  PURE: neither torch nor MPI.

4 hosts of 2 ranks, 2 replicas of 4 stages: where the ranks stand

    fastest="stage"             a a b b      activations cross in the middle, all gradients cross
                                c c d d
    fastest="replica"           a b c d      activations cross at each stage, gradients never
                                a b c d
"""

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hpc_train.grid import Grid
from hpc_train.planning.cluster import Cluster


class Way(NamedTuple):
    """From one stage to another.

    `bytes_per_s`: of a line, which `senders` ranks use at the same time.
    """

    latency_s: float
    bytes_per_s: float
    senders: float = 1.0
    burst_bytes: float = 0.0

    def line_s(self, num_bytes: float) -> float:
        """How long the line is busy with a message of each sender."""
        return num_bytes * self.senders / self.bytes_per_s

    def lag_s(self, num_bytes: float) -> float:
        """From when the line is free again until the message is there.

        Less than 0 where others' messages come after it, of which on average half do, or where the first
        bytes leave in a burst.
        """
        later = num_bytes * (self.senders - 1) / 2
        return self.latency_s - (later + min(num_bytes, self.burst_bytes)) / self.bytes_per_s


class Summing(NamedTuple):
    """Where the replicas of a stage stand.

    `replicas`: all of them.  `hosts`: that they are on.  `together`: the most on one host.
    `sharing`: how many stages sum over the line of a host at the same time, this one among them.
    """

    replicas: int
    hosts: int
    together: int
    sharing: int


class Placement:
    """A grid on a cluster.

    Args:
        grid: of the cluster's ranks.
        cluster: the hosts.
        pairs: stages between which activations go.
    """

    def __init__(self, grid: Grid, cluster: Cluster, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self.cluster = cluster
        self.grid = grid
        ranks = np.array([grid.stages_of(replica) for replica in range(grid.replicas)])
        # [replicas, stages]
        self.hosts = np.array(cluster.host_of)[ranks] if cluster.host_of else ranks // cluster.ranks_per_host
        self._ways: dict[tuple[int, int], Way] = {}
        self._leaving = np.zeros(cluster.hosts, dtype=np.int64)  # stages of replicas, by host
        for one, other in set(pairs):
            self._leaving += self._crossing(one, other)
        self._stages_on = np.zeros(cluster.hosts, dtype=np.int64)  # that sum with other hosts
        self._hosts_of = [np.unique(self.hosts[:, stage]) for stage in range(grid.stages)]
        for hosts in self._hosts_of:
            if len(hosts) > 1:
                self._stages_on[hosts] += 1

    @cached_property
    def speeds(self) -> list[float]:
        """Of each stage: its slowest replica's, as all have the same layers and samples."""
        speed_of = np.array([self.cluster.speed_of(host) for host in range(self.cluster.hosts)])
        return [float(speed) for speed in speed_of[self.hosts].min(axis=0)]

    def way(self, one: int, other: int) -> Way:
        """From stage to stage, in the replica that has the slowest way."""
        if (one, other) not in self._ways:
            self._ways[one, other] = self._way(one, other)
        return self._ways[one, other]

    def _way(self, one: int, other: int) -> Way:
        crossing = self._crossing(one, other)
        if not crossing.any():
            return Way(self.cluster.latency_host_s, self.cluster.bandwidth_host)
        leaving = np.maximum(self._leaving, crossing)[crossing > 0].max()
        return Way(self.cluster.latency_s, self.cluster.bandwidth, float(leaving), self.cluster.burst_bytes)

    def summing(self, stage: int) -> Summing:
        """The replicas of a stage."""
        hosts = self._hosts_of[stage]
        together = int(np.bincount(self.hosts[:, stage]).max())
        return Summing(self.grid.replicas, len(hosts), together, int(self._stages_on[hosts].max()) or 1)

    def host_bytes(self, summed_bytes: list[float], passed_bytes: list[tuple[int, int, float]]) -> float:
        """What the busiest host sends to others.

        Args:
            summed_bytes: that the sums of each stage send from each of its hosts.
            passed_bytes: (stage, other stage, bytes) that a replica sends from one to the other, and back.
        """
        sent = np.zeros(self.cluster.hosts)
        for hosts, size in zip(self._hosts_of, summed_bytes, strict=True):
            if len(hosts) > 1:
                sent[hosts] += size
        for one, other, size in passed_bytes:
            sent += size * (self._crossing(one, other) + self._crossing(other, one))
        return float(sent.max())

    def _crossing(self, one: int, other: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """By host: replicas that have stage `one` on it and `other` elsewhere."""
        here, there = self.hosts[:, one], self.hosts[:, other]
        return np.bincount(here[here != there], minlength=self.cluster.hosts)

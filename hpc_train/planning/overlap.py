"""The sums of gradients beside the backward that is left, and what follows.  PURE: neither torch nor MPI.

stage 0   ... F3  B2---  B3--|----      the last backward through a chunk completes its buckets
                          [ 0 ][ 1 ]    one after the other; the last one not before its end
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpc_train.comm.interface import Wire
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.memory import Tie
from hpc_train.planning.options import Options
from hpc_train.planning.placement import Placement
from hpc_train.planning.profile import Profile
from hpc_train.planning.sums import half_seconds, sent_bytes, sum_seconds
from hpc_train.planning.timeline import Timeline


class ChunkSum(NamedTuple):
    """The sum of the buckets that a chunk's gradients complete.

    Attributes:
        chunk: whose last backward completes them.
        seconds: of them all.
        buckets: how many.
        first_share: the share of that backward after which the first one is complete.
        last_share: the same of the last one.
    """

    chunk: int
    seconds: float
    buckets: int
    first_share: float
    last_share: float


class Loan(NamedTuple):
    """A parameter that stages have in common: the others pass their gradients on, then it is summed."""

    owner: int
    others: tuple[int, ...]
    pass_s: float
    sum_s: float


class Sums(NamedTuple):
    """All sums of a step.

    Attributes:
        by_stage: in the order in which they are made: the last layers' first.
        loans: parameters that are on several stages.
        overlap: whether sums go on beside backward.
        overlap_cost: seconds of backward that each second of sums beside it costs.
        finish_s: after all gradients are summed, until the next step can begin.
        spread_s: of these, what sharded and tied parameters take to get to where they are used.
        sent_bytes: that each stage's sums send from each of its hosts.
    """

    by_stage: list[list[ChunkSum]]
    loans: list[Loan]
    overlap: bool
    overlap_cost: float
    finish_s: float
    spread_s: float
    sent_bytes: list[float]

    def ready_s(self, timeline: Timeline) -> float:
        """When the gradients of all stages are summed, at least the end of the pipeline."""
        ready_s = [self._stage_ready_s(stage, end_s, timeline) for stage, end_s in enumerate(timeline.ends_s)]
        for loan in self.loans:
            passed_s = max(timeline.ends_s[stage] for stage in (loan.owner, *loan.others)) + loan.pass_s
            ready_s[loan.owner] = max(ready_s[loan.owner], passed_s) + loan.sum_s
        return max(timeline.step_s, *ready_s)

    def least_s(self, earliest_s: Sequence[float]) -> float:
        """When they are summed at the earliest, if each chunk's last backward starts no earlier than that."""
        ready_s = [0.0]
        for chunks in self.by_stage:
            if chunks:
                ready_s.append(min(earliest_s[c.chunk] for c in chunks) + sum(c.seconds for c in chunks))
        return max(ready_s)

    def _stage_ready_s(self, stage: int, end_s: float, timeline: Timeline) -> float:
        now_s = 0.0 if self.overlap else end_s
        for chunk, seconds, buckets, first_share, last_share in self.by_stage[stage]:
            begun_s, ended_s = timeline.last_backward_s[chunk]
            now_s = max(now_s, begun_s + (ended_s - begun_s) * first_share) + seconds
            now_s = max(now_s, begun_s + (ended_s - begun_s) * last_share + seconds / buckets)
        hidden_s = sum(one.seconds for one in self.by_stage[stage]) - max(0.0, now_s - end_s)
        return now_s + self.overlap_cost * max(0.0, hidden_s)


def sums_of(
    profile: Profile,
    ties: Sequence[Tie],
    split: Sequence[range],
    stage_of: Sequence[int],
    placement: Placement,
    wire: Wire,
    options: Options,
) -> Sums:
    """The sums of a split model, on a grid that stands where `placement` says."""
    cluster, stages = placement.cluster, placement.grid.stages
    stage_of_layer = [stage_of[chunk] for chunk, layers in enumerate(split) for _ in layers]
    summed = [float(layer.trained_bytes) for layer in profile.layers]
    loans = [_lend(tie, stage_of_layer, summed, placement, wire, options) for tie in ties]
    by_stage: list[list[ChunkSum]] = []
    sent, finish_s, update_s = [0.0] * stages, [0.0] * stages, [0.0] * stages
    for stage in range(stages):
        at = placement.summing(stage)
        chunks = [
            (chunk, sum(summed[layer] for layer in split[chunk]))
            for chunk in reversed(range(len(split)))
            if stage_of[chunk] == stage
        ]
        num_bytes = sum(size for _, size in chunks)
        update_s[stage] = num_bytes * profile.optimizer_s_a_byte / placement.speeds[stage]
        update_s[stage] /= at.replicas if options.sharded else 1
        finish_s[stage] = update_s[stage]
        sent[stage] = sent_bytes(num_bytes, wire, at, options.sharded)
        by_stage.append([])
        for chunk, bytes_, buckets, *shares in buckets_of(chunks, options.bucket_bytes):
            one_s = half_seconds(bytes_, wire, buckets, at, cluster)
            by_stage[stage].append(ChunkSum(chunk, one_s if options.sharded else 2 * one_s, buckets, *shares))
            if options.sharded:
                finish_s[stage] += half_seconds(bytes_, Wire.FP32, buckets, at, cluster)
    for tie, loan in zip(ties, loans, strict=True):
        if loan:
            at = placement.summing(loan.owner)
            sent[loan.owner] += sent_bytes(tie.num_bytes, wire, at, options.sharded)
            finish_s[loan.owner] += loan.pass_s
    end_s = max(finish_s) + _agree_s(cluster)
    lent = [loan for loan in loans if loan]
    spread_s = max(finish_s) - max(update_s)
    return Sums(by_stage, lent, options.overlap, cluster.overlap_cost, end_s, spread_s, sent)


def buckets_of(
    chunks: Sequence[tuple[int, float]], bucket_bytes: int
) -> Iterator[tuple[int, float, int, float, float]]:
    """What chunks complete, one after the other, where a bucket that one leaves open goes on with the next.

    Yields:
        chunk, bytes of the buckets that it completes, how many, and the shares of its backward until the
        first and the last of them; the last chunk completes what is there.
    """
    chunks = [(chunk, size) for chunk, size in chunks if size]
    held = 0.0  # in the open bucket
    for chunk, size in chunks:
        full = int((held + size) // bucket_bytes)
        rest = held + size - full * bucket_bytes
        if chunk == chunks[-1][0]:
            first = min(1.0, (bucket_bytes - held) / size)
            yield chunk, held + size, full + (rest > 0), first, 1.0
        elif full:
            first, last = bucket_bytes - held, full * bucket_bytes - held
            yield chunk, full * bucket_bytes, full, first / size, last / size
        held = rest


def _lend(
    tie: Tie,
    stage_of_layer: Sequence[int],
    summed: list[float],
    placement: Placement,
    wire: Wire,
    options: Options,
) -> Loan | None:
    """The loan that a tie is where its layers are on several stages; takes it out of what layers sum."""
    first, *others = tie.layers
    owner = stage_of_layer[first]
    for layer in others:
        summed[layer] -= tie.num_bytes
    borrowers = sorted({stage_of_layer[layer] for layer in others} - {owner})
    if not borrowers:
        return None
    summed[first] -= tie.num_bytes
    pass_s = 0.0
    for stage in borrowers:
        way = placement.way(stage, owner)
        pass_s = max(pass_s, way.latency_s + way.line_s(tie.num_bytes))
    buckets = max(1, math.ceil(tie.num_bytes / options.bucket_bytes))
    sum_s = sum_seconds(tie.num_bytes, wire, buckets, placement.summing(owner), placement.cluster)
    return Loan(owner, tuple(borrowers), pass_s, sum_s)


def _agree_s(cluster: Cluster) -> float:
    """The small exchange among all ranks: loss, norm, and whether both are finite."""
    within = math.ceil(math.log2(min(cluster.ranks, cluster.ranks_per_host))) * cluster.latency_host_s
    return 2 * (math.ceil(math.log2(cluster.hosts)) * cluster.latency_s + within)

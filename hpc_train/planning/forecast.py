"""What a choice would be like: its split, its memory and its time.  PURE: neither torch nor MPI."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpc_train.comm.interface import Wire
from hpc_train.grid import Grid
from hpc_train.pipeline.partition import DoesNotFit, MemoryBound, split_by_hand, split_evenly
from hpc_train.planning.choice import Candidate, Choice, Recompute, share_of
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.memory import Memory, passes, ties_of
from hpc_train.planning.options import Options
from hpc_train.planning.overlap import Sums, sums_of
from hpc_train.planning.placement import Placement
from hpc_train.planning.profile import Profile
from hpc_train.planning.timeline import ChunkTimes, Pipe, live, order_of, play
from hpc_train.planning.units import WIRE_SHARE

Split = tuple[range, ...]
StageOf = tuple[int, ...]
Speeds = tuple[float, ...]
_WHOLE_BACKWARDS = ("gpipe", "1f1b", "interleaved")  # no schedule whose W may come after all else


@dataclass(frozen=True)
class Draft:
    """A choice that fits, before it is simulated.

    Attributes:
        choice: all but the split.
        split: layers of each chunk.
        times: by chunk and boundary.
        sums: of its gradients.
        rank_bytes: memory of the fullest rank.
        bound_s: the step takes at least so long.
    """

    choice: Choice
    split: Split
    times: ChunkTimes
    sums: Sums
    rank_bytes: float
    bound_s: float


class TooLarge(Exception):
    """A choice that no split makes fit; `rank_bytes`: what the fullest rank of an even one would need."""

    def __init__(self, rank_bytes: float) -> None:
        super().__init__(rank_bytes)
        self.rank_bytes = rank_bytes


class _LayerTimes(NamedTuple):
    """Seconds of a micro-batch, summed up over the layers before each, [layers + 1]."""

    forward: NDArray[np.float64]
    input: NDArray[np.float64]
    weight: NDArray[np.float64]


class _Passing(NamedTuple):
    """The activations of a step.

    `passed`: stage, other stage, and the bytes that a replica sends from the one to the other, and back.
    `least_s`: what the busiest host takes to send them.
    """

    passed: list[tuple[int, int, float]]
    least_s: float


class _Least(NamedTuple):
    """How long a pipeline takes at least.

    `times`: by chunk and boundary.  `pipeline_s`: as its busiest stage or line.  `earliest_s`: by chunk,
    before which its last backward does not start.
    """

    times: ChunkTimes
    pipeline_s: float
    earliest_s: list[float]


class _Case(NamedTuple):
    """All that a split depends on."""

    pipe: Pipe
    micro_batches: int
    stage_of: StageOf
    speeds: Speeds
    micro_batch: int
    recompute: Recompute
    optimizer_share: float
    residual: bool
    wire: Wire


class Forecast:
    """Foresees choices for one model on one cluster.

    `simulated`: how many were played through, with `actions` in all.
    """

    def __init__(self, profile: Profile, cluster: Cluster, batch_size: int, options: Options) -> None:
        self.profile = profile
        self.cluster = cluster
        self.batch_size = batch_size
        self.options = options
        self.simulated = 0
        self.actions = 0
        self._ties = ties_of(profile)
        for cached in (order_of, live):
            cached.cache_clear()  # a schedule's file may have changed since the last one
        # Choices have much in common, and each of these is asked for often.
        self._layer_times = cache(self._sum_up_layers)
        self._memory = cache(self._make_memory)
        self._placement = cache(self._place)
        self._even_split = cache(self._split_evenly)
        self._sums = cache(self._make_sums)
        self._passing = cache(self._pass)
        self._fitting_split = cache(self._split_to_fit)
        self._least = cache(self._bound)

    def draft(self, choice: Choice) -> Draft:
        """Split the layers, and tell how fast it could be at best.  Raises TooLarge."""
        stage_of = tuple(choice.stage_of)
        placement = self._placement(choice.grid, stage_of)
        split, rank_bytes = self._split(choice, stage_of, placement)
        least = self._least(replace(choice, wire=Wire.FP32), split)  # the same with every wire of gradients
        sums = self._sums(choice.grid, stage_of, split, choice.wire)
        bound_s = max(least.pipeline_s, sums.least_s(least.earliest_s)) + sums.finish_s
        return Draft(choice, split, least.times, sums, rank_bytes, bound_s)

    def candidate(self, draft: Draft) -> Candidate:
        """Play a draft through."""
        choice, sums = draft.choice, draft.sums
        stage_of = tuple(choice.stage_of)
        passing = self._passing(choice.grid, stage_of, draft.split, choice.pipeline_wire)
        timeline = play(_pipe(choice), choice.micro_batches(self.batch_size), draft.times)
        timeline = timeline.lasting(passing.least_s)
        self.simulated += 1
        self.actions += timeline.actions
        ready_s = sums.ready_s(timeline)
        step_s = ready_s + sums.finish_s
        return Candidate(
            **{name: getattr(choice, name) for name in Choice.__dataclass_fields__},
            split=tuple(map(len, draft.split)),
            step_s=step_s,
            pipeline_s=timeline.step_s,
            bubble=timeline.bubble,
            exposed_sum_s=ready_s - timeline.step_s + sums.spread_s,
            rank_bytes=draft.rank_bytes,
            host_bytes=self._placement(choice.grid, stage_of).host_bytes(sums.sent_bytes, passing.passed),
            samples_per_s=self.batch_size / step_s,
        )

    def _split(self, choice: Choice, stage_of: StageOf, placement: Placement) -> tuple[Split, float]:
        """The layers of each chunk, and the bytes of the fullest rank."""
        optimizer_share = 1 / choice.replicas if self.options.sharded else 1.0
        residual = choice.replicas > 1 and self.options.keeps_residual(choice.wire)
        wire = choice.pipeline_wire if choice.stages > 1 else Wire.FP32
        sizes = choice.micro_batch, choice.recompute, optimizer_share, residual, wire
        micro_batches = choice.micro_batches(self.batch_size)
        case = _Case(_pipe(choice), micro_batches, stage_of, tuple(placement.speeds), *sizes)
        split, rank_bytes = self._fitting_split(case)
        if split is None:
            raise TooLarge(rank_bytes)
        return split, rank_bytes

    def _split_to_fit(self, case: _Case) -> tuple[Split | None, float]:
        """The most even split that fits, and its fullest rank; or none, and that of one without a bound."""
        split = self._even_split(case.micro_batch, case.recompute, case.stage_of, case.speeds)
        memory = self._memory(*case[-5:])
        moments = live(case.pipe, case.micro_batches)
        even_bytes = max(memory.rank_bytes(split, case.stage_of, moments))
        limit = self.cluster.memory_bytes
        if even_bytes <= limit:
            return split, even_bytes
        if self.options.split or memory.least_bytes(case.pipe.stages) > limit:
            return None, even_bytes
        most = [int(moments[stage][:, chunk].max()) for chunk, stage in enumerate(case.stage_of)]

        def bytes_of(start: Any, end: Any, chunk: int) -> Any:
            return memory.fixed_bytes(start, end) + most[chunk] * memory.kept_bytes(
                start, end, *passes(chunk, case.stage_of)
            )

        bound = MemoryBound(bytes_of, [limit] * case.pipe.stages)
        try:
            split = self._split_evenly(case.micro_batch, case.recompute, case.stage_of, case.speeds, bound)
        except DoesNotFit:
            return None, even_bytes
        return split, max(memory.rank_bytes(split, case.stage_of, moments))

    def _split_evenly(
        self,
        micro_batch: int,
        recompute: Recompute,
        stage_of: StageOf,
        speeds: Speeds,
        memory: MemoryBound | None = None,
    ) -> Split:
        if self.options.split:
            return tuple(split_by_hand(self.options.split, len(self.profile.layers), len(stage_of)))
        until = self._layer_times(micro_batch, recompute)
        costs = np.diff(until.forward + until.input + until.weight)
        return tuple(
            split_evenly(costs.tolist(), len(speeds), stage_of=stage_of, speeds=speeds, memory=memory)
        )

    def _chunk_times(
        self, choice: Choice, split: Split, stage_of: StageOf, placement: Placement
    ) -> ChunkTimes:
        until = self._layer_times(choice.micro_batch, choice.recompute)
        starts = [layers.start for layers in split]
        ends = [layers.stop for layers in split]
        speeds = np.array(placement.speeds)[list(stage_of)]
        forward, inputs, weights = (((sums[ends] - sums[starts]) / speeds).tolist() for sums in until)
        latency_s, line_s = [], []
        for chunk in range(len(split) - 1):
            way = placement.way(stage_of[chunk], stage_of[chunk + 1])
            sample_bytes = (
                self.profile.layers[ends[chunk] - 1].output_bytes * WIRE_SHARE[choice.pipeline_wire]
            )
            latency_s.append(way.lag_s(sample_bytes * choice.micro_batch))
            line_s.append(way.line_s(sample_bytes * choice.micro_batch))
            if stage_of[chunk] != stage_of[chunk + 1]:
                for times_s in (forward, inputs):  # which send a message and take one
                    times_s[chunk] += self.cluster.overhead_s
                    times_s[chunk + 1] += self.cluster.overhead_s
        return ChunkTimes(forward, inputs, weights, latency_s, line_s)

    def _bound(self, choice: Choice, split: Split) -> _Least:
        """Without gradients' sums."""
        stage_of = tuple(choice.stage_of)
        times = self._chunk_times(choice, split, stage_of, self._placement(choice.grid, stage_of))
        micro_batches = choice.micro_batches(self.batch_size)
        forward, inputs, weights = (np.array(seconds) for seconds in times[:3])
        whole = choice.schedule in _WHOLE_BACKWARDS
        moves = np.array([one != other for one, other in pairwise(stage_of)])
        line_s = np.array(times.line_s) * moves
        least_lag_s = min([0.0, *times.latency_s])  # a message may be there before its line is free
        way_s = np.concatenate([[0.0], np.cumsum(line_s + np.array(times.latency_s) * moves)])
        down = inputs + weights if whole else inputs
        there_s = np.cumsum(forward) - forward + way_s  # before a chunk can begin
        back_s = np.cumsum(down) - down + way_s  # after it gave its last gradient away
        work = forward + inputs + weights
        pipeline_s = float(forward.sum() + down.sum() + 2 * way_s[-1])
        pipeline_s += (micro_batches - 1) * float(line_s.max(initial=0.0))
        pipeline_s = max(
            pipeline_s, self._passing(choice.grid, stage_of, split, choice.pipeline_wire).least_s
        )
        work_s = np.bincount(stage_of, weights=work)
        sending_s = np.bincount(stage_of[:-1], line_s, choice.stages)  # outputs
        sending_s += np.bincount(stage_of[1:], line_s, choice.stages)  # gradients
        for stage in range(choice.stages):
            first = stage_of.index(stage)  # its lowest chunk
            end_s = there_s[first] + micro_batches * work_s[stage] + (back_s[first] if whole else 0.0)
            sent_s = there_s[first] + forward[first] + micro_batches * sending_s[stage] + least_lag_s
            pipeline_s = max(pipeline_s, float(end_s), float(sent_s))
        earliest_s = there_s + micro_batches * work - (inputs + weights)
        return _Least(times, pipeline_s, earliest_s.tolist())

    def _pass(self, grid: Grid, stage_of: StageOf, split: Split, wire: Wire) -> _Passing:
        samples = share_of(self.batch_size, grid.replicas)
        passed = []
        for chunk, layers in enumerate(split[:-1]):
            size = self.profile.layers[layers.stop - 1].output_bytes * WIRE_SHARE[wire]
            passed.append((stage_of[chunk], stage_of[chunk + 1], size * samples))
        host_bytes = self._placement(grid, stage_of).host_bytes([0.0] * grid.stages, passed)
        return _Passing(passed, host_bytes / self.cluster.bandwidth)

    def _make_sums(self, grid: Grid, stage_of: StageOf, split: Split, wire: Wire) -> Sums:
        placement = self._placement(grid, stage_of)
        return sums_of(self.profile, self._ties, split, stage_of, placement, wire, self.options)

    def _make_memory(
        self, micro_batch: int, recompute: Recompute, optimizer_share: float, residual: bool, wire: Wire
    ) -> Memory:
        return Memory(self.profile, micro_batch, recompute, optimizer_share, residual, wire)

    def _place(self, grid: Grid, stage_of: StageOf) -> Placement:
        pairs = {(one, other) for one, other in pairwise(stage_of) if one != other}
        return Placement(grid, self.cluster, pairs)

    def _sum_up_layers(self, micro_batch: int, recompute: Recompute) -> _LayerTimes:
        layers = self.profile.layers
        forward = [layer.forward.seconds(micro_batch) for layer in layers]
        inputs = [layer.input.seconds(micro_batch) for layer in layers]
        weights = [layer.weight.seconds(micro_batch) for layer in layers]
        if recompute == "all":  # right before the gradient that the chunk before waits for
            inputs = [again + own for again, own in zip(forward, inputs, strict=True)]
        return _LayerTimes(*(np.cumsum([0.0, *seconds]) for seconds in (forward, inputs, weights)))


def _pipe(choice: Choice) -> Pipe:
    return Pipe(choice.schedule, choice.chunks, choice.stages)

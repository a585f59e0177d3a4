"""What the planner may choose from, and all choices that there are.  PURE: neither torch nor MPI."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from hpc_train.comm.interface import Wire
from hpc_train.errors import UserError
from hpc_train.grid import Fastest
from hpc_train.pipeline.schedules import find
from hpc_train.planning.choice import Choice, Recompute, share_of
from hpc_train.planning.cluster import Cluster


@dataclass(frozen=True)
class Options:
    """What the planner may choose from, and the settings that it takes as they are.

    Attributes:
        schedules: names, or .csv files.
        chunks: of each stage, for interleaved.
        stages: numbers of stages; none given: all that divide the ranks.
        fastest: which of a grid's two coordinates neighbouring ranks may differ in.
        micro_batches: samples; none given: powers of two, and divisors of a replica's share.
        split: layers of each chunk; none given: as even as can be.
        recompute: of activations.
        wires: number formats of gradients.
        pipeline_wires: number formats of activations.
        best: how many of the best candidates are asked for.
        sharded: whether the optimizer's state is (optimizer.sharded).
        error_feedback: as the setting gradients.error_feedback.
        bucket_bytes: as the setting gradients.bucket_bytes.
        overlap: whether gradients are summed during backward.
        lone: of (replicas, samples of a micro-batch), whether a sample is left alone in one that the model
            needs more of; none: it never does. One sample is allowed where the user asks for just that.
    """

    schedules: tuple[str, ...] = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
    chunks: tuple[int, ...] = (2, 3, 4)
    stages: tuple[int, ...] = ()
    fastest: tuple[Fastest, ...] = ("stage", "replica")
    micro_batches: tuple[int, ...] = ()
    split: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = ("none", "all")
    wires: tuple[Wire, ...] = (Wire.FP32,)
    pipeline_wires: tuple[Wire, ...] = (Wire.FP32,)
    best: int = 5
    sharded: bool = False
    error_feedback: bool | Literal["auto"] = "auto"
    bucket_bytes: int = 4 * 2**20
    overlap: bool = True
    lone: Callable[[int, int], bool] | None = None

    def keeps_residual(self, wire: Wire) -> bool:
        """Whether what this wire rounds off is kept for the next sum."""
        return wire is Wire.INT8 if self.error_feedback == "auto" else self.error_feedback and wire.lossy


def possible_stages(ranks: int, num_layers: int, batch_size: int, options: Options) -> list[int]:
    """Numbers of stages for which every replica has samples, every stage a layer.

    Raises:
        UserError: there are none.
    """
    stages = [
        stages
        for stages in range(1, ranks + 1)
        if ranks % stages == 0 and (not options.stages or stages in options.stages)
    ]
    possible = [s for s in stages if s <= num_layers and ranks // s <= batch_size]
    if not possible:
        asked = f", {' or '.join(map(str, options.stages))} stages" if options.stages else ""
        raise UserError(
            f"no grid of {ranks} ranks for {num_layers} layers, {batch_size} samples a step{asked}: stages "
            f"have to divide the ranks, with a layer each (at most {num_layers}) and a sample for each "
            f"replica (at least {-(-ranks // batch_size)})"
        )
    return possible


def choices(cluster: Cluster, num_layers: int, batch_size: int, options: Options) -> Iterator[Choice]:
    """Every choice once: of those that make no difference the first.

    Raises:
        UserError: there is none.
    """
    for stages in possible_stages(cluster.ranks, num_layers, batch_size, options):
        replicas = cluster.ranks // stages
        matters = stages > 1 and replicas > 1 and cluster.hosts > 1
        sizes = _micro_batches(replicas, share_of(batch_size, replicas), options)
        for schedule, chunks in _schedules(stages, num_layers, options):
            for fastest in options.fastest if matters else options.fastest[:1]:
                for micro_batch in sizes:
                    for recompute in options.recompute:
                        for wire in options.wires if replicas > 1 else options.wires[:1]:
                            for pipeline_wire in (
                                options.pipeline_wires if stages > 1 else options.pipeline_wires[:1]
                            ):
                                yield Choice(
                                    replicas,
                                    stages,
                                    fastest,
                                    schedule,
                                    chunks,
                                    micro_batch,
                                    recompute,
                                    wire,
                                    pipeline_wire,
                                )


def _schedules(stages: int, num_layers: int, options: Options) -> Iterator[tuple[str, int]]:
    """Names, with chunks a stage, so that each has a layer; one for a single stage: all are the same."""
    for name in options.schedules:
        for chunks in options.chunks if name == "interleaved" else (find(name).chunks,):
            fits = len(options.split or range(stages * chunks)) == stages * chunks <= num_layers
            if stages > 1 and fits and _has(name, chunks, stages):
                yield name, chunks
    if stages == 1 and len(options.split) <= 1:
        alone = [name for name in options.schedules if find(name).chunks == 1 and _has(name, 1, 1)]
        yield (alone or ["1f1b"])[0], 1


def _has(name: str, chunks: int, stages: int) -> bool:
    """Whether the schedule has orders for so many stages: a file is for one number."""
    try:
        find(name, chunks).stage_of(0, stages)
    except UserError:
        return False
    return True


def _micro_batches(replicas: int, share: int, options: Options) -> list[int]:
    """Powers of two, and between two of them the largest divisor of the share."""
    if options.micro_batches:
        sizes = {min(size, share) for size in options.micro_batches}
    else:
        divisors = [size for size in range(1, share + 1) if share % size == 0]
        sizes = {1 << power for power in range(share.bit_length())}
        sizes |= {max(d for d in divisors if d.bit_length() == n.bit_length()) for n in divisors}
    asked = set(options.micro_batches) & {1}
    return sorted(
        size for size in sizes if size in asked or not (options.lone and options.lone(replicas, size))
    )

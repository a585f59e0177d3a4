"""Which ways to run a model are measured: the planner's choice, every grid at its best, and others near them.

    every grid        its fastest schedule and micro-batch, as foreseen
    the chosen grid   other schedules, other micro-batches, ranks in the other order
    other grids       the second schedule

PURE: neither torch nor MPI.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hpc_train.planning.choice import Candidate, share_of
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.options import Options, possible_stages
from hpc_train.planning.planner import plan
from hpc_train.planning.profile import Profile

_SCHEDULES_OF_CHOSEN, _SCHEDULES_OF_OTHERS = 4, 2
_ALL = 16  # kinds of schedule that a grid has at most


def name_of(candidate: Candidate) -> str:
    """`2x2 interleaved/2 16`: replicas × stages, schedule / chunks a stage, samples of a micro-batch.

    `2x2r`: neighbours are replicas.  No two candidates of a model have the same.
    """
    one_stage = candidate.stages == 1
    grid = f"{candidate.replicas}x{candidate.stages}" + "r" * (candidate.fastest == "replica")
    chunks = f"/{candidate.chunks}" * (candidate.schedule == "interleaved")
    schedule = "" if one_stage else f" {candidate.schedule}{chunks}"
    again = " again" * (candidate.recompute == "all")
    return f"{grid}{schedule} {candidate.micro_batch}{again}"


def candidates(profile: Profile, cluster: Cluster, batch_size: int, options: Options) -> list[Candidate]:
    """Those to measure, the planner's choice first; each once, with what is foreseen of it."""
    found: dict[str, Candidate] = {}
    for candidate in _all(profile, cluster, batch_size, options):
        found.setdefault(name_of(candidate), candidate)
    return list(found.values())


def _all(profile: Profile, cluster: Cluster, batch_size: int, options: Options) -> Iterator[Candidate]:
    def best(number: int, **fixed: Any) -> list[Candidate]:
        return plan(profile, cluster, batch_size, replace(options, best=number, **fixed)).best

    (chosen,) = best(1)
    yield chosen
    for stages in possible_stages(cluster.ranks, len(profile.layers), batch_size, options):
        kept = _SCHEDULES_OF_CHOSEN if stages == chosen.stages else _SCHEDULES_OF_OTHERS
        yield from best(_ALL, stages=(stages,))[:kept]
    as_chosen: dict[str, Any] = {
        "stages": (chosen.stages,),
        "schedules": (chosen.schedule,),
        "chunks": (chosen.chunks,),
    }
    share = share_of(batch_size, chosen.replicas)
    for times in (1 / 4, 1 / 2, 2):
        micro_batch = min(max(1, int(chosen.micro_batch * times)), share)
        yield from best(1, **as_chosen, micro_batches=(micro_batch,))
    if chosen.stages > 1 and chosen.replicas > 1 and cluster.ranks_per_host > 1:
        for fastest in options.fastest:
            yield from best(1, **as_chosen, fastest=(fastest,))

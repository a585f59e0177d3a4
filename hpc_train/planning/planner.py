"""Chooses grid, schedule and the rest: the fastest that fits.  PURE: neither torch nor MPI.

planned = plan(profile, Cluster(ranks=64, ranks_per_host=8, bandwidth=25e9), batch_size=512)
settings_of(planned.best[0])      # {"grid.stages": 4, ...}

Every choice is split, measured for memory, and bounded from below: a step lasts at least as long as its
busiest stage works, which is nearly exact. Simulated are those alone whose bound is below the best so far.
"""

from dataclasses import dataclass

from hpc_train.errors import UserError
from hpc_train.planning.choice import Candidate, Choice
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.forecast import Draft, Forecast, TooLarge
from hpc_train.planning.options import Options, choices
from hpc_train.planning.profile import Profile, check_profile
from hpc_train.planning.units import write_bytes
from hpc_train.planning.why import explain_losers


@dataclass(frozen=True)
class Planned:
    """What came out.

    Attributes:
        best: the fastest candidates, the best first: one for each number of stages and schedule.
        losers: why the others lose, a line for each kind.
        considered: how many choices there were.
        simulated: how many of them were played through.
        actions: that it took.
    """

    best: list[Candidate]
    losers: list[str]
    considered: int
    simulated: int
    actions: int


class Search:
    """All choices for one model on one cluster, and those played through so far.

    `drafts`: those that fit, the most promising first.  `too_large`: the others, and what their fullest rank
    needs.
    """

    def __init__(self, profile: Profile, cluster: Cluster, batch_size: int, options: Options) -> None:
        self.forecast = Forecast(profile, cluster, batch_size, options)
        self.drafts: list[Draft] = []
        self.too_large: dict[Choice, float] = {}
        for choice in choices(cluster, len(profile.layers), batch_size, options):
            try:
                self.drafts.append(self.forecast.draft(choice))
            except TooLarge as error:
                self.too_large[choice] = error.rank_bytes
        self.drafts.sort(key=lambda draft: draft.bound_s)  # stable: of equal ones the simplest comes first
        self._candidates: dict[Choice, Candidate] = {}

    def candidate(self, draft: Draft) -> Candidate:
        """Play a draft through, once."""
        if draft.choice not in self._candidates:
            self._candidates[draft.choice] = self.forecast.candidate(draft)
        return self._candidates[draft.choice]

    def best(self, number: int) -> list[Candidate]:
        """The fastest candidate of each number of stages and schedule; the `number` fastest of these."""
        fastest: dict[tuple[int, str, int], Candidate] = {}
        for draft in self.drafts:
            steps_s = sorted(candidate.step_s for candidate in fastest.values())
            if len(steps_s) >= number and draft.bound_s >= steps_s[number - 1]:
                break
            kind = (draft.choice.stages, draft.choice.schedule, draft.choice.chunks)
            if kind in fastest and draft.bound_s >= fastest[kind].step_s:
                continue
            candidate = self.candidate(draft)
            if kind not in fastest or candidate.step_s < fastest[kind].step_s * (1 - 1e-9):
                fastest[kind] = candidate
        # Of equally fast ones the simplest: fewer stages, and the schedules in the order of the options.
        return sorted(fastest.values(), key=lambda candidate: float(f"{candidate.step_s:.9g}"))[:number]


def plan(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    options: Options = Options(),  # noqa: B008  (frozen)
) -> Planned:
    """The best ways to train the model on the cluster with so many samples a step.

    Raises:
        UserError: nothing fits, or there is no grid at all.
    """
    check_profile(profile)
    if batch_size < 1:
        raise UserError(f"batch.size={batch_size}: set it to at least 1")
    search = Search(profile, cluster, batch_size, options)
    best = search.best(max(1, options.best))
    if not best and not search.too_large:
        split = f" cut as {list(options.split)}" if options.split else ""
        raise UserError(
            f"{len(profile.layers)} layers{split} on {cluster.ranks} ranks go with no schedule that may be "
            f"chosen ({', '.join(options.schedules)}): a chunk needs a layer, a file its number of stages"
            f"{', and a micro-batch 2 samples (BatchNorm)' * bool(options.lone)}"
        )
    if not best:
        choice, needed = min(search.too_large.items(), key=lambda item: item[1])
        raise UserError(
            f"none of {len(search.too_large)} ways fits into {write_bytes(cluster.memory_bytes)} a rank: the "
            f"least, {choice.stages} stages with micro-batches of {choice.micro_batch}, needs "
            f"{write_bytes(needed)}: take more ranks, or optimizer.sharded=true"
        )
    losers = explain_losers(search.drafts, search.too_large, best, search.candidate, cluster)
    return Planned(
        best,
        losers,
        len(search.drafts) + len(search.too_large),
        search.forecast.simulated,
        search.forecast.actions,
    )

"""Why the others lose, in a line for each kind of them.  PURE: neither torch nor MPI."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from hpc_train.planning.choice import Candidate, Choice
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.forecast import Draft
from hpc_train.planning.units import write_bytes, write_seconds

_TITLES: dict[str, Callable[[Any], str]] = {
    "fastest": lambda fastest: f"neighbours differ in {fastest}",
    "micro_batch": lambda samples: f"micro-batches of {samples}",
    "recompute": lambda what: f"recompute {what}",
    "wire": lambda wire: f"gradients in {wire.value}",
    "pipeline_wire": lambda wire: f"activations in {wire.value}",
}


def explain_losers(
    drafts: Sequence[Draft],
    too_large: Mapping[Choice, float],
    best: Sequence[Candidate],
    play: Callable[[Draft], Candidate],
    cluster: Cluster,
) -> list[str]:
    """A line for each number of stages and schedule that is not among the best, and what else could differ.

    Of each kind the most promising candidate is played through.

    Args:
        drafts: that fit, the most promising first.
        too_large: those that do not, with what their fullest rank needs.
        best: the winner first.
        play: makes a candidate of a draft.
        cluster: that it is for.
    """
    everything = [*(draft.choice for draft in drafts), *too_large]
    lines = []
    for title, wanted in _kinds(everything, best):
        fitting = next((draft for draft in drafts if _is(draft.choice, wanted)), None)
        needed = [size for choice, size in too_large.items() if _is(choice, wanted)]
        if fitting:
            lines.append(f"{title}: {compare(play(fitting), best[0])}")
        elif needed:
            lines.append(f"{title}: needs {write_bytes(min(needed))} of {write_bytes(cluster.memory_bytes)}")
    return lines


def compare(loser: Candidate, winner: Candidate) -> str:
    """How much slower it is, and what most of that comes from."""
    slower = loser.step_s / winner.step_s - 1
    if slower < 0.0005:
        return "just as fast"
    computing_s = loser.pipeline_s * (1 - loser.bubble)
    more_computing_s = computing_s - winner.pipeline_s * (1 - winner.bubble)
    causes = {
        f"bubble {loser.bubble:.0%}": loser.bubble * loser.pipeline_s - winner.bubble * winner.pipeline_s,
        f"{write_seconds(computing_s)} of computing": more_computing_s,
        f"sums stick out {write_seconds(loser.exposed_sum_s)}": loser.exposed_sum_s - winner.exposed_sum_s,
        f"{write_seconds(_update_s(loser))} of updating": _update_s(loser) - _update_s(winner),
    }
    cause = max(causes, key=lambda text: causes[text])
    return f"{write_seconds(loser.step_s)} a step, {slower:.1%} more: {cause}"


def _update_s(candidate: Candidate) -> float:
    return candidate.step_s - candidate.pipeline_s - candidate.exposed_sum_s


def _kinds(everything: Sequence[Choice], best: Sequence[Candidate]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Titles, and what choices of the kind have."""
    winner = best[0]
    for stages in sorted({choice.stages for choice in everything} - {each.stages for each in best}):
        yield f"{stages} stage{'s' * (stages > 1)}", {"stages": stages}
    alike = [choice for choice in everything if choice.stages == winner.stages]
    for schedule, chunks in dict.fromkeys((choice.schedule, choice.chunks) for choice in alike):
        wanted = {"stages": winner.stages, "schedule": schedule, "chunks": chunks}
        if not any(_is(each, wanted) for each in best):
            yield name_of(schedule, chunks), wanted
    for name, title in _TITLES.items():
        own = getattr(winner, name)
        others = list(dict.fromkeys(getattr(choice, name) for choice in alike))
        if name == "micro_batch":  # the next smaller and the next larger one
            smaller = sorted(size for size in others if size < own)
            larger = sorted(size for size in others if size > own)
            others = smaller[-1:] + larger[:1]
        for other in others:
            if other != own:
                same = {field.name: getattr(winner, field.name) for field in fields(Choice)}
                yield title(other), same | {name: other}


def name_of(schedule: str, chunks: int) -> str:
    """A schedule's name with its chunks, where they are a choice."""
    return f"{schedule} x{chunks}" if schedule == "interleaved" else schedule


def _is(choice: Choice, wanted: Mapping[str, Any]) -> bool:
    return all(getattr(choice, name) == value for name, value in wanted.items())

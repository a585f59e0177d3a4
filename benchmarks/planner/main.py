"""Every grid of a model beside the one that the planner chooses, over links of several rates.

    python benchmarks/planner/main.py [--short] [--case "transformer, 2 hosts x 1 rank, 100 Mbit/s"]

See README.md for what is measured.
"""

import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks import conductor
from benchmarks.conductor import Place, Session
from benchmarks.planner import large
from benchmarks.planner.candidates import candidates, name_of
from benchmarks.planner.contestants import Runs
from benchmarks.planner.models import COMPUTING, WAITING, Model
from benchmarks.records import Record, record
from hpc_train.bench.turns import Contestant, rounds_within, take_turns, try_once
from hpc_train.config import Settings
from hpc_train.planning.choice import Candidate
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.profile import Profile
from hpc_train.tasks.task import Task
from hpc_train.training import autoplan

PLACES = [  # two ranks compute, four wait: there are two cores
    (COMPUTING, 2, 1, (100, 1000)),
    (WAITING, 4, 1, (100, 400)),
    (WAITING, 2, 2, (100, 400)),
]
_SECONDS = {False: 30.0, True: 8.0}  # --short or not
_ROUNDS = {False: (5, 40), True: (3, 10)}
_TURN_S = 0.15  # a turn is of several steps where one is much shorter,
_MOST_CALLS = 4
_LEAD_IN_BELOW_S = 0.1  # and is led in by one more, which finds the caches as the others have left them


@dataclass(frozen=True)
class Setting:
    """A model at a place."""

    name: str
    model: Model
    place: Place

    @property
    def case(self) -> str:
        """`transformer, 2 hosts x 1 rank, 100 Mbit/s`."""
        return f"{self.name}, {self.place.name}, {self.place.rate_mbit} Mbit/s"


SETTINGS = {
    setting.case: setting
    for models, hosts, ranks, rates in PLACES
    for rate in rates
    for name, model in models.items()
    for setting in [Setting(name, model, Place(hosts, ranks, rate))]
}
CASES = {case: setting.place for case, setting in SETTINGS.items()} | {large.CASE: Place(1, 1)}
SHORT_CASES = [
    "transformer, 2 hosts x 1 rank, 1000 Mbit/s",
    "perceptron, 4 hosts x 1 rank, 100 Mbit/s",
    "convolutions, 2 hosts x 2 ranks, 100 Mbit/s",
    large.CASE,
]


def measure(session: Session) -> list[Record]:
    """One setting, on each of its ranks; or planning alone, on one."""
    if session.case == large.CASE:
        return [large.measure(session.short)]
    world, setting = session.world, SETTINGS[session.case]
    batch_size = setting.model.batch_size
    settings = Settings(
        task=setting.name,
        grid="auto",  # type: ignore[arg-type]  # as in a file
        batch={"size": batch_size},  # type: ignore[arg-type]
        train={"threads": 1, "device": "cpu"},  # type: ignore[arg-type]
        optimizer={"name": "adamw", "clip_norm": 1.0},  # type: ignore[arg-type]
    )
    task = setting.model.make()
    profile, cluster = _measured(session, settings, task)
    picks = candidates(profile, cluster, batch_size, autoplan.options_of(settings))
    session.note(f"chosen: {name_of(picks[0])}, foreseen {picks[0].step_s * 1e3:.1f} ms")
    runs = Runs(settings, task, world)
    raw_s, rank_s = _timed(session, runs, [runs.add(pick) for pick in picks])
    runs.close()
    medians = [statistics.median(raw) for raw in raw_s]
    planned = {"profile": json.loads(profile.to_json()), "cluster": _finite(cluster)}
    records = []
    for pick, raw, median_s, spent in zip(picks, raw_s, medians, rank_s, strict=True):
        chosen = pick is picks[0]
        records.append(
            record(
                session.case,
                name_of(pick),
                pick.wire.value,
                sum(layer.trained_bytes for layer in profile.layers),
                raw,
                "ours",
                limit_s=pick.step_s,
                model=setting.name,
                batch_size=batch_size,
                place=setting.place.name,
                rate_mbit=setting.place.rate_mbit,
                chosen=chosen,
                to_best=median_s / min(medians),
                **_foreseen(pick),
                rank_s=spent,
                **(planned if chosen else {}),
            )
        )
    return records


def _measured(session: Session, settings: Settings, task: Task) -> tuple[Profile, Cluster]:
    """Layers and network as `autoplan.resolve` measures them, alike on all ranks."""
    world, device = session.world, torch.device("cpu")
    torch.set_num_threads(settings.train.threads)
    return autoplan.measure_all(settings, task, world, device)


def _timed(
    session: Session, runs: Runs, contestants: list[Contestant]
) -> tuple[list[list[float]], list[list[list[float]]]]:
    """All in turns; and of each contestant, by rank, seconds of computing, waiting and summing in a step."""
    control = session.world.control
    once_s = try_once(control, contestants)  # with what first steps take
    once_s = min(once_s, try_once(control, contestants))
    one_s = once_s / len(contestants)
    calls = min(_MOST_CALLS, max(1, round(_TURN_S / one_s)))
    lead_in = int(one_s < _LEAD_IN_BELOW_S)
    contestants = [replace(one, lead_in=lead_in) for one in contestants]
    rounds = rounds_within(_SECONDS[session.short], once_s * (lead_in + calls), *_ROUNDS[session.short])
    session.note(
        f"{len(contestants)} candidates, {rounds} rounds of {calls}, "
        f"about {rounds * once_s * (lead_in + calls):.0f} s"
    )
    runs.seconds(lambda worker: worker.stopwatch.reset())
    raw_s = take_turns(control, contestants, rounds, calls)
    watches = runs.seconds(lambda worker: vars(worker.stopwatch).values())
    steps = rounds * (lead_in + calls)
    mine = [[seconds / steps for seconds in watch] for watch in watches]
    everybody = [json.loads(text) for text in control.all_gather(json.dumps(mine).encode())]
    return raw_s, [list(ranks) for ranks in zip(*everybody, strict=True)]


def _foreseen(pick: Candidate) -> dict[str, Any]:
    """The choice, and what is foreseen of it."""
    names = ("replicas", "stages", "fastest", "schedule", "chunks", "micro_batch", "recompute", "split")
    return {
        **{name: getattr(pick, name) for name in names},
        "foreseen_s": pick.step_s,
        "foreseen_pipeline_s": pick.pipeline_s,
        "foreseen_bubble": pick.bubble,
        "foreseen_exposed_sum_s": pick.exposed_sum_s,
    }


def _finite(cluster: Cluster) -> dict[str, Any]:
    """What was measured of the network: JSON knows no infinity."""
    return {name: value for name, value in asdict(cluster).items() if value != math.inf}


if __name__ == "__main__":
    conductor.main(__doc__ or "", "planner", CASES, measure, SHORT_CASES)

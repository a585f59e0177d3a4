"""Pipelined steps: hpc_train beside torch.distributed.pipelining, one rank, and a simulation.

    python benchmarks/pipeline/main.py [--short] [--case "4 ranks waiting"]

See README.md for what is measured.
"""

import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from benchmarks import conductor
from benchmarks.conductor import Place, Session
from benchmarks.peers.gloo import start_default_group
from benchmarks.peers.torch_pipelining import OWN, RUNTIME
from benchmarks.pipeline.alone import Times, known, measured
from benchmarks.pipeline.contestants import ONE_RANK, Contest, link_of
from benchmarks.pipeline.models import Model, computing, waiting
from benchmarks.pipeline.waits import Seconds
from benchmarks.records import OURS, Record, Role, record
from hpc_train.bench.turns import Contestant, rounds_within, take_turns, try_once
from hpc_train.comm.interface import PeerLink
from hpc_train.launch.binding import cores
from hpc_train.pipeline.schedules import Schedule, find

PINNED, WAITING = "2 ranks pinned", "4 ranks waiting"
CASES = {PINNED: Place(1, 2), WAITING: Place(1, 4)}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
MICRO_BATCHES = {
    False: {PINNED: [1, 2, 4, 8, 16, 32], WAITING: [8, 16, 32]},  # --short or not
    True: {PINNED: [2, 32], WAITING: [8]},
}
SECONDS_A_STAGE = Seconds(forward=0.040, input=0.040, weight=0.040)  # of a micro-batch, where layers wait
_SECONDS = {False: {PINNED: 40.0, WAITING: 60.0}, True: {PINNED: 8.0, WAITING: 25.0}}  # of each contest
_ROUNDS = {False: (5, 60), True: (3, 20)}
_TURN_S = 0.03  # a turn is of several steps where one is much shorter,
_MOST_CALLS = 5
_LEAD_IN_BELOW_S = 0.05  # and is led in by one more, which finds the caches as the others have left them


def models(session: Session) -> list[Model]:
    """What is stepped in a case."""
    if session.case == PINNED:
        return [
            computing("512 wide", num_layers=16, width=512, samples=128),
            computing("small micro-batches", num_layers=16, width=128, samples=16),
        ]
    num_ranks = session.world.size
    whole = Seconds(*(seconds * num_ranks for seconds in SECONDS_A_STAGE))
    return [waiting("", num_layers=2 * num_ranks, seconds=whole)]


def measure(session: Session) -> list[Record]:
    """All contests of a case, on each of its ranks."""
    torch.set_num_threads(1)
    if session.case == PINNED:
        own = sorted(cores())
        if len(own) < session.world.size:
            session.skip("all", f"needs {session.world.size} cores, and there are {len(own)}")
            return []
        os.sched_setaffinity(0, {own[session.world.rank]})  # also of the threads that Gloo is about to start
    start_default_group(session.world)
    link = link_of(session.world)
    records = []
    for model in models(session):
        times = _times(session, model)
        for micro_batches in MICRO_BATCHES[session.short][session.case]:
            records += _contest(session, link, model, times, micro_batches)
    dist.destroy_process_group()
    return records


def _times(session: Session, model: Model) -> dict[int, Times]:
    """Of each chunk, by the number of chunks."""
    world = session.world
    times = {}
    for num_chunks in (world.size, 2 * world.size):
        times[num_chunks] = (
            known(model, num_chunks) if model.seconds else measured(world.control, model, num_chunks)
        )
    text = ", ".join(f"{name} {1e3 * seconds[0]:.2f}" for name, seconds in vars(times[world.size]).items())
    session.note(f"{model.name or 'waits'}: ms of a micro-batch in the first stage: {text}")
    return times


def _contest(
    session: Session, link: PeerLink, model: Model, times: dict[int, Times], micro_batches: int
) -> list[Record]:
    control = session.world.control
    contest = Contest(session.world, link, model, micro_batches)
    rough_s = (micro_batches + session.world.size) * sum(
        times[session.world.size].forward[:1] + times[session.world.size].backward[:1]
    )
    lead_in = int(rough_s < _LEAD_IN_BELOW_S)
    calls = min(_MOST_CALLS, max(1, int(_TURN_S / rough_s)))
    entries: list[tuple[Contestant, Schedule | None]] = []
    walks_the_same: dict[str, bool] = {}
    if model.seconds is None:
        entries.append((contest.one_rank(lead_in), None))
    for schedule in map(find, SCHEDULES):
        entries.append((contest.ours(schedule, lead_in), schedule))
        for way in (OWN, RUNTIME):
            try:
                peer, same = contest.peer(way, schedule, lead_in)
            except ValueError as reason:
                session.skip(
                    ", ".join(_words(way, model, schedule.name, micro_batches)), str(reason).rstrip(".")
                )
                continue
            entries.append((peer, schedule))
            if way == OWN:
                walks_the_same[schedule.name] = same
    contestants = [one for one, _ in entries]
    once_s = try_once(control, contestants)
    round_s = once_s * (lead_in + calls) / (lead_in + 1)
    rounds = rounds_within(_SECONDS[session.short][session.case], round_s, *_ROUNDS[session.short])
    session.note(
        f"{model.name} {micro_batches} micro-batches: {rounds} rounds, about {rounds * round_s:.0f} s"
    )
    raw_s = take_turns(control, contestants, rounds, calls)
    alone_s = model.seconds.total * micro_batches if model.seconds else statistics.median(raw_s[0])
    records = []
    for (one, schedule), raw in zip(entries, raw_s, strict=True):
        if schedule is None:
            records.append(_one_rank(session, model, micro_batches, raw))
            continue
        detail = {"walks_the_same": walks_the_same[schedule.name]} if one.impl == OWN else {}
        simulation = times[session.world.size * schedule.chunks].play(contest.order(schedule))
        median_s = statistics.median(raw)
        busy_s = simulation.step_s * (1 - simulation.bubble)  # of each rank
        role: Role = "ours" if one.impl == OURS else "peer"
        ideal = micro_batches * session.world.size / (micro_batches + session.world.size - 1)
        records.append(
            record(
                _case(session, model, schedule.name, micro_batches),
                one.impl,
                "fp32",
                model.num_bytes,
                raw,
                role,
                limit_s=simulation.step_s,
                place=session.case,
                model=model.name,
                schedule=schedule.name,
                micro_batches=micro_batches,
                ideal=ideal,
                speed_up=alone_s / median_s,
                simulated_s=simulation.step_s,
                bubble=1 - busy_s / median_s,
                bubble_simulated=simulation.bubble,
                **detail,
            )
        )
    return records


def _one_rank(session: Session, model: Model, micro_batches: int, raw: list[float]) -> Record:
    return record(
        _case(session, model, "one rank", micro_batches),
        ONE_RANK,
        "fp32",
        model.num_bytes,
        raw,
        "reference",
        place=session.case,
        model=model.name,
        micro_batches=micro_batches,
    )


def _case(session: Session, model: Model, schedule: str, micro_batches: int) -> str:
    return ", ".join(_words(session.case, model, schedule, micro_batches))


def _words(first: str, model: Model, schedule: str, micro_batches: int) -> list[str]:
    number = f"{micro_batches} micro-batch" + "es" * (micro_batches > 1)
    return [word for word in (first, model.name, schedule, number) if word]


if __name__ == "__main__":
    conductor.main(__doc__ or "", "pipeline", CASES, measure)

"""One training step over slow links: hpc_train beside DistributedDataParallel and Horovod.

    python benchmarks/train-step/main.py [--short] [--case transformer]

See README.md for what is measured.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from models import MODELS, batch  # noqa: E402
from steps import POWERSGD, POWERSGD_WARM_UP_STEPS, Steps  # noqa: E402

from benchmarks import conductor  # noqa: E402
from benchmarks.conductor import Place, Session  # noqa: E402
from benchmarks.peers.gloo import start_default_group  # noqa: E402
from benchmarks.peers.horovod import Horovod, Setting, why_not  # noqa: E402
from benchmarks.peers.openmpi import DEFAULT, RING, OpenMpi  # noqa: E402
from benchmarks.records import OURS, Record, Role, record, size  # noqa: E402
from hpc_train.bench.turns import Contestant, rounds_within, take_turns, try_once  # noqa: E402

RATE_MBIT = 200
OVER_LINKS = Place(4, 1, RATE_MBIT)
ONE_HOST = Place(1, 2)
CASES = {
    "transformer": OVER_LINKS,
    "embedding": OVER_LINKS,
    "transformer, one host": ONE_HOST,
}
SHORT_CASES = ["transformer"]
SAMPLES_A_RANK = 2
ALONE = "no communication"
_WIRES = ("fp32", "fp16", "bf16", "int8", POWERSGD)
_SHORT_WIRES = ("fp32", "fp16", "int8", POWERSGD)
_CYCLES_MS = (1.0, 5.0)  # of Horovod; 1 is its default
_NUM_BATCHES = 4
_SECONDS = {False: 360.0, True: 50.0}  # --short or not
_ROUNDS = {False: (5, 40), True: (3, 10)}
_COPIES_OF_A_MODEL = 4.5  # weights, gradients, two of AdamW, and something for residuals and buffers


def measure(session: Session) -> list[Record]:
    """One model's steps, on each of the ranks of a case."""
    torch.set_num_threads(1)
    world = session.world
    task = MODELS[session.case.split(",")[0]]()
    batches = [batch(task, n, world.rank, world.size, SAMPLES_A_RANK) for n in range(_NUM_BATCHES)]
    steps = Steps(world, task, batches)
    num_bytes = 4 * steps.num_parameters()
    if reason := _too_little_memory(session, num_bytes):
        session.skip("all", reason)
        return []
    start_default_group(world)
    mpi = OpenMpi()
    entries: list[tuple[Contestant, dict[str, Any]]] = [
        (steps.ddp("fp32"), {}),  # first: the others' gradients are compared with its own
        (steps.ddp("fp16"), {}),
        (steps.ddp(POWERSGD), {}),
        *((steps.ours(wire), {}) for wire in (_SHORT_WIRES if session.short else _WIRES)),
        (steps.alone(ALONE), {}),
    ]
    round_s = try_once(world.control, [one for one, _ in entries])
    if reason := why_not():
        session.skip("Horovod", reason)
    else:
        entries += _horovod(session, steps, Horovod(world.control, mpi))
    warm = [one for one, _ in entries if one.wire == POWERSGD]
    take_turns(world.control, warm, POWERSGD_WARM_UP_STEPS)
    rounds = rounds_within(_SECONDS[session.short], round_s * 1.3, *_ROUNDS[session.short])
    session.note(f"{size(num_bytes)} of gradients: {rounds} rounds, about {rounds * round_s * 1.3:.0f} s")
    raw_s: list[list[float]] = [[] for _ in entries]
    for number in range(rounds):
        for times, more in zip(raw_s, take_turns(world.control, [one for one, _ in entries], 1), strict=True):
            times += more
        session.note(f"round {number + 1} of {rounds}")
    steps.close()
    mpi.close()
    dist.destroy_process_group()
    return _records(session, entries, raw_s, num_bytes)


def _horovod(session: Session, steps: Steps, horovod: Horovod) -> list[tuple[Contestant, dict[str, Any]]]:
    """Horovod's two wires, at the setting that is fastest for fp32; --short takes the first one."""
    control = session.world.control
    settings = [*(Setting(cycle_ms, RING) for cycle_ms in _CYCLES_MS), Setting(_CYCLES_MS[0], DEFAULT)]
    tried = steps.horovod(horovod, "fp32", settings[:1] if session.short else settings)
    try_once(control, tried[:1])
    best = _fastest(session, tried, settings) if len(tried) > 1 else 0
    chosen = {"cycle_ms": settings[best].cycle_ms, "algorithm": settings[best].algorithm.name}
    (fp16,) = steps.horovod(horovod, "fp16", [settings[best]])
    try_once(control, [fp16])
    return [(tried[best], dict(chosen)), (fp16, dict(chosen))]


def _fastest(session: Session, tried: Sequence[Contestant], settings: Sequence[Setting]) -> int:
    times = [own[0] for own in take_turns(session.world.control, tried, rounds=1)]
    text = ", ".join(
        f"{setting.cycle_ms} {setting.algorithm.name} {took:.2f}"
        for setting, took in zip(settings, times, strict=True)
    )
    session.note(f"Horovod's cycles in ms and algorithms, seconds of a step: {text}")
    return times.index(min(times))


def _records(
    session: Session,
    entries: Sequence[tuple[Contestant, dict[str, Any]]],
    raw_s: Sequence[Sequence[float]],
    num_bytes: int,
) -> list[Record]:
    """`exposed_s`: what a step takes longer than one that sends nothing, which is also its limit."""
    medians = [statistics.median(raw) for raw in raw_s]
    alone_s = next(m for (one, _), m in zip(entries, medians, strict=True) if one.impl == ALONE)
    records = []
    for (one, detail), raw, median_s in zip(entries, raw_s, medians, strict=True):
        role: Role = "ours" if one.impl == OURS else "reference" if one.impl == ALONE else "peer"
        detail["exposed_s"] = median_s - alone_s
        detail["samples_per_s"] = SAMPLES_A_RANK * session.world.size / median_s
        records.append(record(session.case, one.impl, one.wire, num_bytes, raw, role, alone_s, **detail))
    return records


def _too_little_memory(session: Session, num_bytes: int) -> str | None:
    """All contestants' models stand in memory at once, on all ranks of this machine."""
    wanted = int((len(_WIRES) + 6) * _COPIES_OF_A_MODEL * num_bytes * session.world.size)
    free = psutil.virtual_memory().available
    if all(flag == b"1" for flag in session.world.control.all_gather(b"1" if wanted < free else b"0")):
        return None
    return f"needs about {size(wanted)} of memory, and {size(free)} are free"


if __name__ == "__main__":
    conductor.main(__doc__ or "", "train-step", CASES, measure, SHORT_CASES)

"""What a run pays that has nothing to send: one replica beside plain PyTorch, in one process.

    python benchmarks/one-replica/main.py [--short]

See README.md for what is measured.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from benchmarks import conductor
from benchmarks.conductor import Place, Session
from benchmarks.records import OURS, TOP, Record, record
from hpc_train.bench.turns import Contestant, rounds_within, take_turns
from hpc_train.config import Settings, load
from hpc_train.tasks.find import load_task
from hpc_train.tasks.task import Task
from hpc_train.training.layout import Layout
from hpc_train.training.optimizer import make_optimizer
from hpc_train.training.worker import Worker

CASES = {"1 host x 1 rank": Place(1, 1)}
SAMPLES = 8
_WIRES = ("fp32", "int8")  # int8 brings error feedback
_LEARNING_RATE = 1e-4
_WARM_UPS = 5
_SECONDS = {False: 120.0, True: 25.0}  # --short or not
_ROUNDS = (20, 400)

Step = Callable[[], None]


def measure(session: Session) -> list[Record]:
    """The demo's model; every contestant has its own and sees the same samples."""
    torch.set_num_threads(1)
    base = ["grid.stages=1", f"batch.micro_batch={SAMPLES}", f"batch.size={SAMPLES}"]
    path = TOP / "examples" / "bytelm.toml"
    settings = {wire: load(path, [*base, f"gradients.wire={wire}"]) for wire in _WIRES}
    task = load_task(settings["fp32"].task, settings["fp32"].task_options)
    dataset = task.dataset("train")
    batch = torch.utils.data.default_collate([dataset[i] for i in range(SAMPLES)])
    contestants = [Contestant("PyTorch", "fp32", _plain(settings["fp32"], task, batch))]
    contestants += [Contestant(OURS, wire, _ours(settings[wire], task, session, batch)) for wire in _WIRES]
    control = session.world.control
    warm_up = take_turns(control, contestants, _WARM_UPS)
    rounds = rounds_within(_SECONDS[session.short], sum(times[-1] for times in warm_up), *_ROUNDS)
    session.note(f"{rounds} rounds")
    measured = take_turns(control, contestants, rounds)
    num_bytes = 4 * sum(p.numel() for p in task.plain_model().parameters())
    return [
        record(session.case, one.impl, one.wire, num_bytes, raw, "ours" if one.impl == OURS else "peer")
        for one, raw in zip(contestants, measured, strict=True)
    ]


def _ours(settings: Settings, task: Task, session: Session, batch: tuple[torch.Tensor, torch.Tensor]) -> Step:
    worker = Worker(settings, task, session.world, Layout(settings, task, session.world))
    return lambda: worker.update(worker.backward([batch], SAMPLES), _LEARNING_RATE)


def _plain(settings: Settings, task: Task, batch: tuple[torch.Tensor, torch.Tensor]) -> Step:
    model = task.plain_model(settings.seed)
    optimizer = make_optimizer(settings.optimizer, model.parameters())
    assert optimizer is not None
    for group in optimizer.param_groups:
        group["lr"] = _LEARNING_RATE

    def step() -> None:
        optimizer.zero_grad()
        loss = task.loss(model(batch[0]), batch[1]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.clip_norm)
        float(loss.detach())  # hpc_train's step knows its loss, too
        optimizer.step()

    return step


if __name__ == "__main__":
    conductor.main(__doc__ or "", "one-replica", CASES, measure)

"""What rounding on the way costs in loss, and what it saves in time: each wire trains the same model.

    python benchmarks/convergence/main.py [--short] [--case bytelm]

See README.md for what is measured.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from curves import Curve, Recipe, Run, ddp_run, our_run  # noqa: E402

from benchmarks import conductor  # noqa: E402
from benchmarks.conductor import Place, Session  # noqa: E402
from benchmarks.peers.gloo import start_default_group  # noqa: E402
from benchmarks.records import OURS, Record, record  # noqa: E402
from hpc_train.tasks.bytelm import ByteLM  # noqa: E402
from hpc_train.tasks.digits import Digits  # noqa: E402
from hpc_train.tasks.task import Task  # noqa: E402


@dataclass(frozen=True)
class Size:
    """How long to train, and how often."""

    steps: int
    seeds: int


CASES = {"bytelm": Place(4, 1, rate_mbit=100), "digits": Place(4, 1, rate_mbit=100)}
SHORT_CASES = ["bytelm"]
_SIZES = {"bytelm": Size(400, 5), "digits": Size(200, 5)}
_SHORT_SIZES = {"bytelm": Size(120, 2), "digits": Size(60, 2)}
_RECIPES = {"bytelm": Recipe(4, 3e-3), "digits": Recipe(16, 5e-4)}
_EVALUATIONS = 10
_OURS = ("fp32", "fp16", "bf16", "int8", "powersgd")
_BASELINE = (OURS, "fp32")


def _task(case: str) -> Task:
    return ByteLM(context=64, hidden=64, blocks=2, heads=4) if case == "bytelm" else Digits()


def measure(session: Session) -> list[Record]:
    """Every wire with every seed; within a seed they take turns, each with a whole run from the start."""
    torch.set_num_threads(1)
    start_default_group(session.world)
    task = _task(session.case)
    size = (_SHORT_SIZES if session.short else _SIZES)[session.case]
    curves: dict[tuple[str, str], list[Curve]] = {}
    for seed in range(size.seeds):
        keys = [*((OURS, wire) for wire in _OURS), ("DDP Gloo", "fp32"), ("DDP Gloo", "fp16")]
        for impl, wire in keys[seed % len(keys) :] + keys[: seed % len(keys)]:
            make = our_run if impl == OURS else ddp_run
            run: Run = make(session.world, task, _RECIPES[session.case], wire, seed)
            curve = run.train(size.steps, size.steps // _EVALUATIONS)
            curves.setdefault((impl, wire), []).append(curve)
            session.note(
                f"seed {seed}, {impl} {wire}: loss {curve.losses[-1]:.4f} after {curve.seconds[-1]:.1f} s"
            )
    num_bytes = 4 * sum(p.numel() for p in task.plain_model().parameters())
    dist.destroy_process_group()
    return _records(session.case, num_bytes, curves)


def _records(case: str, num_bytes: int, curves: dict[tuple[str, str], list[Curve]]) -> list[Record]:
    """`loss_ratio`: to our own fp32 with the same seed, after all samples; `loss_ratio_in_time`: when the
    fastest of that seed was done.
    """
    baseline = curves[_BASELINE]
    ends = [min(own[seed].seconds[-1] for own in curves.values()) for seed in range(len(baseline))]
    records = []
    for (impl, wire), own in curves.items():
        detail: dict[str, Any] = {
            "final_loss": [curve.losses[-1] for curve in own],
            "loss_ratio": [c.losses[-1] / b.losses[-1] for c, b in zip(own, baseline, strict=True)],
            "loss_ratio_in_time": [
                c.loss_at(end) / b.loss_at(end) for c, b, end in zip(own, baseline, ends, strict=True)
            ],
            "steps": own[0].steps,
            "mean_losses": _means([curve.losses for curve in own]),
            "mean_seconds": _means([curve.seconds for curve in own]),
        }
        role = "ours" if impl == OURS else "peer"
        raw_s = [curve.seconds[-1] for curve in own]
        records.append(record(case, impl, wire, num_bytes, raw_s, role, **detail))
    return records


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.mean(column) for column in zip(*rows, strict=True)]


if __name__ == "__main__":
    conductor.main(__doc__ or "", "convergence", CASES, measure, SHORT_CASES)

"""One training step of the demo's model: hpc_train beside DistributedDataParallel on Gloo.

    python benchmarks/train-step/main.py [--ranks 2] [--steps 40] [--short]

Starts its ranks itself.  See README.md for what is measured.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

TOP = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP))

from benchmarks.records import Record, record, table, with_ratios, write  # noqa: E402
from hpc_train.comm.connect import connect  # noqa: E402
from hpc_train.comm.interface import World  # noqa: E402
from hpc_train.comm.rendezvous import open_store  # noqa: E402
from hpc_train.config import Settings, load  # noqa: E402
from hpc_train.data.sampler import Cursor, take  # noqa: E402
from hpc_train.launch.identity import find  # noqa: E402
from hpc_train.launch.launcher import command  # noqa: E402
from hpc_train.tasks.find import load_task  # noqa: E402
from hpc_train.tasks.task import Task  # noqa: E402
from hpc_train.training.optimizer import make_optimizer  # noqa: E402
from hpc_train.training.worker import Layout, Worker  # noqa: E402

Batch = tuple[Any, Any]
LEARNING_RATE = 1e-4


def ours(settings: Settings, task: Task, world: World) -> Callable[[Batch], None]:
    """A step as the trainer makes it: backward, agreement, clipping, update."""
    worker = Worker(settings, task, world, Layout(settings, task, world))

    def step(batch: Batch) -> None:
        worker.update(worker.backward([batch], settings.batch.size), LEARNING_RATE)

    return step


def ddp(settings: Settings, task: Task, world: World, fp16: bool) -> Callable[[Batch], None]:
    """The same step with DistributedDataParallel, its gradients as views of its buckets."""
    model = torch.nn.parallel.DistributedDataParallel(
        task.plain_model(settings.seed), gradient_as_bucket_view=True, broadcast_buffers=False
    )
    if fp16:
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = make_optimizer(settings.optimizer, model.parameters())
    assert optimizer is not None

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        loss = task.loss(model(batch[0]), batch[1]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.clip_norm)
        float(loss)  # hpc_train's step knows its loss, too
        optimizer.step()

    return step


def measure(world: World, steps: int, threads: int) -> list[Record]:
    """Strictly alternating: every implementation makes one step, then the next round begins."""
    torch.set_num_threads(threads)
    base = ["grid.stages=1", f"batch.micro_batch={-(-32 // world.size)}", "batch.size=32"]
    settings = {
        wire: load(TOP / "examples" / "bytelm.toml", [*base, f"gradients.wire={wire}"])
        for wire in ("fp32", "fp16")
    }
    task = load_task(settings["fp32"].task, settings["fp32"].task_options)
    dist.init_process_group(
        "gloo", store=open_store(world.control, world.host), rank=world.rank, world_size=world.size
    )
    impls = {
        ("hpc_train", "fp32"): ours(settings["fp32"], task, world),
        ("ddp gloo", "fp32"): ddp(settings["fp32"], task, world, fp16=False),
        ("hpc_train", "fp16"): ours(settings["fp16"], task, world),
        ("ddp gloo", "fp16"): ddp(settings["fp32"], task, world, fp16=True),
    }
    num_bytes = 4 * sum(p.numel() for p in task.plain_model().parameters())
    dataset = task.dataset("train")
    times: dict[tuple[str, str], list[float]] = {key: [] for key in impls}
    cursor = Cursor(0, 0)
    warm_up = 3
    for number in range(warm_up + steps):
        chosen = take(len(dataset), 0, cursor, 32, [1] * world.size)
        cursor = chosen.next
        batch = torch.utils.data.default_collate([dataset[int(i)] for i in chosen.indices[world.rank]])
        for key, step in impls.items():
            world.control.barrier()
            began = time.perf_counter()
            step(batch)
            took = time.perf_counter() - began
            slowest = max(float(text) for text in world.control.all_gather(repr(took).encode()))
            if number >= warm_up:
                times[key].append(slowest)
        if world.rank == 0 and number % 10 == 0:
            print(f"round {number} of {warm_up + steps}", file=sys.stderr, flush=True)
    case = f"bytelm, {world.size} ranks"
    return with_ratios(
        [record(case, impl, wire, num_bytes, raw, impl != "hpc_train") for (impl, wire), raw in times.items()]
    )


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a rank")
    parser.add_argument("--short", action="store_true", help="10 steps")
    parser.add_argument("--out", type=Path, default=TOP / "benchmarks" / "results" / "train-step.json")
    args = parser.parse_args()
    if find(os.environ) is None:
        line = command(args.ranks, None, sys.argv[1:], program=[__file__])
        sys.exit(subprocess.run(line.argv, env={**os.environ, **line.environment}).returncode)
    world = connect("mpi")
    records = measure(world, 10 if args.short else args.steps, args.threads)
    if world.rank == 0:
        print(table(records))
        write(args.out, records, world=world.describe())
        print(f"raw numbers: {args.out}")
    dist.destroy_process_group()
    world.close()


if __name__ == "__main__":
    main()

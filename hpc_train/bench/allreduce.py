"""`hpc-train bench allreduce`: this job's gradient sums beside the MPI library's own Allreduce.

Each repetition makes every kind of sum once, one after the other, so that whatever else the machine
does meets all of them alike.  A repetition takes as long as its slowest rank.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_train.comm.interface import Wire, World
from hpc_train.errors import UserError
from hpc_train.grid import Grid
from hpc_train.launch.binding import choose_device

_WARM_UPS = 3
_SECONDS_A_SIZE = 3.0
_REPETITIONS = (5, 200)  # at least, at most
_LARGEST_BYTES = 2**33  # MPI counts floats in 31 bits
# How far from the library's sum, relative to the largest value: rounding of the order of additions, and
# of 16-bit words (10 bits of mantissa) of each rank and of the sum.
_TOLERANCE = {Wire.FP32: 1e-5, Wire.FP16: 2**-8}


@dataclass(frozen=True)
class Record:
    """One row: `impl` is "hpc_train" or the MPI library's name; `bytes` of the fp32 buffer."""

    impl: str
    wire: str
    bytes: int
    median_s: float
    min_s: float


@dataclass(frozen=True)
class _Sum:
    """A kind of sum, and the memory that it works on."""

    impl: str
    wire: Wire
    buffer: Tensor
    call: Callable[[Tensor], None]


def run(world: World, sizes: Sequence[int], wires: Sequence[Wire]) -> list[Record] | None:
    """Measure sums of fp32 buffers of `sizes` bytes; the records on rank 0, None elsewhere.  Collective.

    Raises:
        UserError: one rank has nothing to sum, or a size is not a number of floats that MPI can count.
        RuntimeError: a sum is wrong.
    """
    if world.size == 1:
        raise UserError(
            "1 rank has nothing to sum: start several, for instance hpc-train launch -n 2 bench allreduce"
        )
    for num_bytes in sizes:
        if num_bytes % 4 or not 0 < num_bytes < _LARGEST_BYTES:
            raise UserError(f"{num_bytes} bytes is not a buffer of fp32 numbers between 4 bytes and 8 GiB")
    from hpc_train.comm.library_sum import LibrarySum

    device = choose_device("auto", world.local_rank)
    collective = world.collective(Grid(world.size, 1), device)
    library = LibrarySum()
    records = []
    for num_bytes in sizes:
        numel = num_bytes // 4
        kinds = [
            _Sum("hpc_train", wire, collective.allocate(numel), _caller(collective.sum_, wire))
            for wire in wires
        ]
        kinds.append(_Sum(library.name, Wire.FP32, torch.zeros(numel), library.sum_))
        records += _measure(world, kinds, num_bytes)
    library.close()
    collective.close()
    return records if world.rank == 0 else None


def _caller(sum_: Callable[[Tensor, Wire], None], wire: Wire) -> Callable[[Tensor], None]:
    return lambda buffer: sum_(buffer, wire)


def _measure(world: World, kinds: Sequence[_Sum], num_bytes: int) -> list[Record]:
    source = torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(world.rank))
    warm_up = _repeat(world, kinds, source, _WARM_UPS)
    _compare(kinds)
    a_round_s = sum(times[-1] for times in warm_up)
    repetitions = min(max(_REPETITIONS[0], int(_SECONDS_A_SIZE / a_round_s)), _REPETITIONS[1])
    if world.rank == 0:
        text = f"{num_bytes:,} bytes: {repetitions} repetitions, about {repetitions * a_round_s:.0f} s"
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    slowest = _repeat(world, kinds, source, repetitions)
    return [
        Record(kind.impl, kind.wire.value, num_bytes, statistics.median(times), min(times))
        for kind, times in zip(kinds, slowest, strict=True)
    ]


def _repeat(world: World, kinds: Sequence[_Sum], source: Tensor, repetitions: int) -> list[list[float]]:
    """Seconds of each kind's repetitions, of the slowest rank; the same on all ranks."""
    mine: list[list[float]] = [[] for _ in kinds]
    for _ in range(repetitions):
        for kind, times in zip(kinds, mine, strict=True):
            kind.buffer.copy_(source)  # in place, values would grow until they overflow
            if kind.buffer.is_cuda:
                torch.cuda.synchronize(kind.buffer.device)
            world.control.barrier()
            began = time.perf_counter()
            kind.call(kind.buffer)
            if kind.buffer.is_cuda:
                torch.cuda.synchronize(kind.buffer.device)
            times.append(time.perf_counter() - began)
    everybody = [json.loads(part) for part in world.control.all_gather(json.dumps(mine).encode())]
    return [[max(times) for times in zip(*ranks, strict=True)] for ranks in zip(*everybody, strict=True)]


def _compare(kinds: Sequence[_Sum]) -> None:
    """A fast sum that is wrong is worth nothing: compare with the library's."""
    expected = kinds[-1].buffer
    largest = float(expected.abs().max())
    for kind in kinds[:-1]:
        difference = float((kind.buffer.cpu() - expected).abs().max())
        if not difference <= _TOLERANCE[kind.wire] * largest:
            what = f"the {kind.wire.value} sum of {4 * expected.numel()} bytes"
            raise RuntimeError(f"{what} is off by {difference:.3g} of {largest:.3g}")


def render(records: Sequence[Record]) -> str:
    """A table as OSU's benchmarks print it; GB/s is bytes of the fp32 buffer by the median."""
    lines = [
        f"{'# bytes':>12}  {'impl':<10}{'wire':<6}{'median ms':>11}{'min ms':>11}{'GB/s':>8}{'of MPI':>9}"
    ]
    library = {record.bytes: record.median_s for record in records if record.impl != "hpc_train"}
    for r in records:
        lines.append(
            f"{r.bytes:>12}  {r.impl:<10}{r.wire:<6}{r.median_s * 1e3:>11.3f}{r.min_s * 1e3:>11.3f}"
            f"{r.bytes / r.median_s / 1e9:>8.2f}{r.median_s / library[r.bytes]:>8.2f}x"
        )
    return "\n".join(lines)

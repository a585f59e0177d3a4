"""`hpc-train bench allreduce`: this job's gradient sums beside the MPI library's own Allreduce.

Sums go the way that a training run would choose for them, and that is told.  Each repetition makes every
kind of sum once, one after the other; it takes as long as its slowest rank.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_train.bench.turns import Contestant, rounds_within, take_turns, try_once
from hpc_train.comm.interface import Wire, World
from hpc_train.errors import UserError
from hpc_train.grid import Grid
from hpc_train.launch.binding import choose_device

_WARM_UPS = 3
_SECONDS_A_SIZE = 3.0
_REPETITIONS = (5, 200)  # at least, at most
_LARGEST_BYTES = 2**33  # MPI counts floats in 31 bits
# What a value of each wire is rounded by at most, relative to the largest one beside it; in fp32 the order
# of additions makes the difference.
_ROUNDING = {Wire.FP32: 2.0**-22, Wire.FP16: 2.0**-11, Wire.BF16: 2.0**-8, Wire.INT8: 2.0**-7}


@dataclass(frozen=True)
class Record:
    """One row: `impl` is "hpc_train" or the MPI library's name; `bytes` of the fp32 buffer."""

    impl: str
    wire: str
    bytes: int
    median_s: float
    min_s: float


def tolerance(wire: Wire, num_ranks: int, largest: float) -> float:
    """How far a sum may be from the exact one, where no value of it or of a contribution exceeds `largest`.

    Each rank's contribution is rounded once, and the sum once more.
    """
    return (num_ranks + 1) * _ROUNDING[wire] * largest


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
        source = torch.randn(numel, generator=torch.Generator().manual_seed(world.rank))
        for wire in wires:
            _note(world, collective.prepare(numel, wire))  # as for buckets of this size
        plain, ours = torch.zeros(numel), collective.allocate(numel)
        kinds = [_contestant(library.name, Wire.FP32, plain, library.sum_, source, plain)]
        kinds += [
            _contestant("hpc_train", wire, ours, _on_wire(collective.sum_, wire), source, plain, world.size)
            for wire in wires
        ]
        records += _measure(world, kinds, num_bytes)
    library.close()
    collective.close()
    return records if world.rank == 0 else None


def _on_wire(sum_: Callable[[Tensor, Wire], None], wire: Wire) -> Callable[[Tensor], None]:
    return lambda buffer: sum_(buffer, wire)


def _contestant(
    impl: str,
    wire: Wire,
    buffer: Tensor,
    sum_: Callable[[Tensor], None],
    source: Tensor,
    expected: Tensor,
    num_ranks: int = 0,
) -> Contestant:
    """A kind of sum.  With `num_ranks`, its result is compared with `expected`, which another one made."""

    def ready() -> None:
        buffer.copy_(source)  # in place, values would grow until they overflow
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)

    def call() -> None:
        sum_(buffer)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)

    def check() -> None:
        if num_ranks:
            off = float((buffer.cpu() - expected).abs().max())
            largest = max(float(source.abs().max()), float(expected.abs().max()))
            allowed = tolerance(wire, num_ranks, largest)
            if not off <= allowed:
                what = f"the {wire.value} sum of {4 * buffer.numel()} bytes"
                raise RuntimeError(f"{what} is off by {off:.3g}, more than {allowed:.3g}")

    return Contestant(impl, wire.value, call, ready, check)


def _measure(world: World, kinds: Sequence[Contestant], num_bytes: int) -> list[Record]:
    """The library's sum comes first, as the others are compared with it, and last in the records."""
    try_once(world.control, kinds)
    kinds = [*kinds[1:], kinds[0]]
    warm_up = take_turns(world.control, kinds, _WARM_UPS)
    a_round_s = sum(times[-1] for times in warm_up)
    repetitions = rounds_within(_SECONDS_A_SIZE, a_round_s, *_REPETITIONS)
    _note(world, f"{num_bytes:,} bytes: {repetitions} repetitions, about {repetitions * a_round_s:.0f} s")
    measured = take_turns(world.control, kinds, repetitions)
    return [
        Record(kind.impl, kind.wire, num_bytes, statistics.median(times), min(times))
        for kind, times in zip(kinds, measured, strict=True)
    ]


def _note(world: World, text: str) -> None:
    """A line on rank 0, beside the records; none for no text."""
    if text and world.rank == 0:
        print(text, file=sys.stderr, flush=True)  # noqa: T201


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

"""The measurement of gradient sums, with threads for ranks and a sum in place of the MPI library's."""

import sys
import threading
import types

import pytest
import torch

from hpc_train.bench import allreduce, turns
from hpc_train.bench.allreduce import Record, render, run
from hpc_train.comm.interface import Wire
from hpc_train.comm.loopback import LoopbackCollective, LoopbackWorld, run_ranks
from hpc_train.errors import UserError

RANKS = 3


class ThreadSum:
    """What comm.library_sum has, for ranks that are threads: all of them use this one."""

    name = "Threads"

    def __init__(self):
        self.closed = []
        self._barrier = threading.Barrier(RANKS, timeout=30)
        self._buffers = []

    def sum_(self, buffer):
        self._barrier.wait()
        self._buffers.append(buffer.clone())
        self._barrier.wait()
        buffer.copy_(torch.stack(self._buffers).sum(dim=0))
        if self._barrier.wait() == 0:
            self._buffers.clear()
        self._barrier.wait()

    def close(self):
        self.closed.append(threading.current_thread().name)


@pytest.fixture(autouse=True)
def library(monkeypatch):
    library = ThreadSum()
    stand_in = types.ModuleType("hpc_train.comm.library_sum")
    stand_in.LibrarySum = lambda: library
    monkeypatch.setitem(sys.modules, "hpc_train.comm.library_sum", stand_in)
    monkeypatch.setattr(allreduce, "_SECONDS_A_SIZE", 0.01)
    return library


def test_a_record_for_each_size_and_kind_of_sum_on_rank_0(capsys, library):
    sizes, wires = [4096, 400], [Wire.FP32, Wire.FP16]
    first, *others = run_ranks(RANKS, lambda world: run(world, sizes, wires))
    assert others == [None] * (RANKS - 1)
    assert [(r.impl, r.wire, r.bytes) for r in first] == [
        (impl, wire, num_bytes)
        for num_bytes in sizes
        for impl, wire in [("hpc_train", "fp32"), ("hpc_train", "fp16"), ("Threads", "fp32")]
    ]
    assert all(0 < record.min_s <= record.median_s < 10 for record in first)
    assert sorted(library.closed) == [f"rank {rank}" for rank in range(RANKS)]
    out, err = capsys.readouterr()
    assert out == ""  # the caller prints the records
    assert [line.split(":")[0] for line in err.splitlines()] == ["4,096 bytes", "400 bytes"]


def test_a_sum_is_made_at_least_five_times(monkeypatch):
    monkeypatch.setattr(allreduce, "_SECONDS_A_SIZE", 0.0)
    calls = []
    plain = LoopbackCollective.sum_
    monkeypatch.setattr(LoopbackCollective, "sum_", lambda *args: calls.append(1) or plain(*args))
    run_ranks(RANKS, lambda world: run(world, [64], [Wire.FP32]))
    assert len(calls) == RANKS * (1 + 3 + 5)  # compared, warm-ups and repetitions


def test_each_kind_of_sum_goes_the_way_that_training_would_choose(monkeypatch, capsys):
    """Without `prepare` the default way was timed, which between hosts a training run need not take."""
    done = []
    plain = LoopbackCollective.sum_

    def prepare(self, numel, wire):
        if self.rank == 0:
            done.append(("prepare", numel, wire))
        return f"{wire.value}: direct"

    def sum_(self, buffer, wire, residual=None):
        if self.rank == 0:
            done.append(("sum", buffer.numel(), wire))
        plain(self, buffer, wire, residual)

    monkeypatch.setattr(LoopbackCollective, "prepare", prepare)
    monkeypatch.setattr(LoopbackCollective, "sum_", sum_)
    wires = [Wire.FP32, Wire.INT8]
    run_ranks(RANKS, lambda world: run(world, [4096, 400], wires))
    for numel in (1024, 100):
        mine = [(what, wire) for what, n, wire in done if n == numel]
        assert mine[: len(wires)] == [("prepare", wire) for wire in wires]
        assert {what for what, _ in mine[len(wires) :]} == {"sum"}
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if "direct" in line] == 2 * ["fp32: direct", "int8: direct"]


@pytest.mark.parametrize("wire", list(Wire))
def test_a_sum_that_is_wrong_is_told(monkeypatch, wire):
    plain = LoopbackCollective.sum_

    def wrong(self, buffer, wire, residual=None):
        plain(self, buffer, wire, residual)
        buffer[-1] += 0.1 * buffer.abs().max()

    monkeypatch.setattr(LoopbackCollective, "sum_", wrong)
    with pytest.raises(RuntimeError, match=f"the {wire.value} sum of 4096 bytes is off by "):
        run_ranks(RANKS, lambda world: run(world, [4096], [wire]))


def test_one_rank_has_nothing_to_sum():
    with pytest.raises(
        UserError, match="1 rank has nothing to sum: start several, for instance hpc-train launch"
    ):
        run(LoopbackWorld(), [4096], [Wire.FP32])


@pytest.mark.parametrize("num_bytes", [0, -4, 2, 4097, 2**33])
def test_a_size_that_cannot_be_summed_is_a_users_mistake_on_every_rank(num_bytes):
    def body(world):
        with pytest.raises(UserError, match=f"{num_bytes} bytes is not a buffer of fp32 numbers"):
            run(world, [4096, num_bytes], [Wire.FP32])

    run_ranks(RANKS, body)


def test_the_table():
    records = [
        Record("hpc_train", "fp32", 4_000_000, 0.004, 0.003),
        Record("hpc_train", "fp16", 4_000_000, 0.002, 0.001),
        Record("Open MPI", "fp32", 4_000_000, 0.008, 0.007),
    ]
    heading, *rows = render(records).splitlines()
    assert heading.split() == ["#", "bytes", "impl", "wire", "median", "ms", "min", "ms", "GB/s", "of", "MPI"]
    assert [row.split() for row in rows] == [
        ["4000000", "hpc_train", "fp32", "4.000", "3.000", "1.00", "0.50x"],
        ["4000000", "hpc_train", "fp16", "2.000", "1.000", "2.00", "0.25x"],
        ["4000000", "Open", "MPI", "fp32", "8.000", "7.000", "0.50", "1.00x"],
    ]
    assert len({len(row) for row in [heading, *rows]}) == 1


def test_a_repetition_takes_as_long_as_its_slowest_rank(monkeypatch):
    class Clock:
        """Each rank's own: between two looks at it, rank 0's goes on by 1 ms, rank 1's by 2 ms, ..."""

        def __init__(self):
            self.own = threading.local()

        def perf_counter(self):
            step_s = 1e-3 * (1 + int(threading.current_thread().name.removeprefix("rank ")))
            self.own.now_s = getattr(self.own, "now_s", 0.0) + step_s
            return self.own.now_s

    monkeypatch.setattr(turns, "time", Clock())
    records = run_ranks(RANKS, lambda world: run(world, [4096], [Wire.FP32]))[0]
    assert {round(record.min_s, 6) for record in records} == {0.003}
    assert {round(record.median_s, 6) for record in records} == {0.003}

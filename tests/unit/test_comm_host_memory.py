"""Memory that the ranks of a host share, with threads for ranks: each maps it for itself."""

import os

import pytest

from hpc_train.comm import host_memory
from hpc_train.comm.host_memory import SharedMemory
from hpc_train.comm.loopback import run_ranks


def share(world):
    """The memory of this rank, among all of `world`."""

    def broadcast(numbers):
        text = " ".join(map(str, numbers)).encode()
        return [int(number) for number in world.control.all_gather(text)[0].split()]

    return SharedMemory(world.rank, world.size, broadcast, world.control.barrier, world.control.agree)


def of_size(num_bytes):
    made = os.memfd_create("another container's")
    os.ftruncate(made, num_bytes)
    return made


def test_each_rank_sees_the_others_rows_which_are_zero_at_first():
    def body(world):
        memory = share(world)
        buffer = memory.allocate(5000)
        world.control.barrier()
        assert not any(row.any() for row in memory.rows(buffer))
        world.control.barrier()
        buffer.fill_(world.rank + 1.0)
        world.control.barrier()
        return [row.unique().tolist() for row in memory.rows(buffer)]

    assert run_ranks(3, body) == [[[1.0], [2.0], [3.0]], [[2.0], [3.0], [1.0]], [[3.0], [1.0], [2.0]]]


@pytest.mark.parametrize(
    "finds",
    [lambda: -1, lambda: of_size(0), lambda: os.open("/dev/null", os.O_RDWR), lambda: of_size(2**20)],
    ids=["nothing", "too short", "no memory", "other memory"],
)
def test_what_one_rank_cannot_map_is_an_error_on_all(monkeypatch, finds):
    """In a container /proc is another: its rank raised alone or took foreign memory, and the others hung."""
    usual, opened = host_memory._open, []

    def first_finds_another(path):
        opened.append(path)
        return finds() if len(opened) == 1 else usual(path)

    monkeypatch.setattr(host_memory, "_open", first_finds_another)

    def body(world):
        with pytest.raises(
            OSError, match=r"bytes of shared memory of process \d+ on this host cannot be had"
        ):
            share(world).allocate(5000)

    run_ranks(3, body, timeout_s=20)
    assert len(opened) == 2


@pytest.mark.parametrize("failing", ["memfd_create", "ftruncate"])
def test_memory_that_cannot_be_made_is_an_error_on_all(monkeypatch, failing):
    def fail(*args):
        raise OSError("no memory")

    monkeypatch.setattr(os, failing, fail)

    def body(world):
        with pytest.raises(OSError, match="cannot be had"):
            share(world).allocate(5000)

    run_ranks(2, body, timeout_s=20)

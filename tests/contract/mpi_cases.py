"""What only the MPI backend has to show."""

import gc
import os
from pathlib import Path

import pytest
import torch

from hpc_train.comm.interface import Wire, World
from hpc_train.errors import UserError
from hpc_train.gradients.reducer import Reducer
from hpc_train.grid import Grid


def checks():
    """All of them, by name."""
    return {name: value for name, value in globals().items() if name.startswith("check_")}


def check_long_messages_go_in_pieces(world: World) -> None:
    """MPI counts with 32 bits.  A limit of 1,000 bytes stands for that of 1 GiB."""
    from hpc_train.comm import mpi_memory

    usual, mpi_memory.CHUNK_BYTES = mpi_memory.CHUNK_BYTES, 1000
    try:
        link = world.peer_link(Grid(1, world.size))
        arrived = torch.empty(777, dtype=torch.float64)
        mine = torch.arange(777, dtype=torch.float64) + world.rank
        works = [
            link.irecv(arrived, (world.rank - 1) % world.size, tag=0),
            link.isend(mine, (world.rank + 1) % world.size, tag=0),
        ]
        for work in works:
            work.wait()
        assert torch.equal(arrived, torch.arange(777, dtype=torch.float64) + (world.rank - 1) % world.size)

        collective = world.collective(Grid(world.size, 1), torch.device("cpu"))
        buffer = torch.arange(777.0)
        collective.sum_(buffer, Wire.FP32)
        assert torch.equal(buffer, torch.arange(777.0) * world.size)
        buffer = torch.arange(777.0) * (world.rank + 1)
        collective.broadcast_(buffer, world.size - 1)
        assert torch.equal(buffer, torch.arange(777.0) * world.size)
        collective.close()
    finally:
        mpi_memory.CHUNK_BYTES = usual


def check_a_message_longer_than_an_int(world: World) -> None:
    """3 GiB would take too long for every run; see `check_long_messages_go_in_pieces` for how it goes."""
    from hpc_train.comm.mpi_memory import CHUNK_BYTES, chunks

    parts = chunks(torch.empty(3 * 2**30 + 5, dtype=torch.uint8))  # memory that nobody touches
    assert [part.nbytes for part in parts] == [CHUNK_BYTES] * 3 + [5]
    assert CHUNK_BYTES < 2**31


def check_shared_memory_has_no_name_and_goes_with_its_tensors(world: World) -> None:
    """What has no name in /dev/shm cannot stay there, however a process ends."""

    def mapped() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum("memfd:hpc_train" in line for line in lines)

    gc.collect()  # what earlier checks have left
    collective = world.collective(Grid(world.size, 1), torch.device("cpu"))
    before = mapped()
    buffer = collective.allocate(100_000)
    part = buffer[50:60]
    several = len({data for data in world.control.all_gather(world.host.encode())}) < world.size
    assert mapped() <= before + 1
    assert mapped() > before or not several or collective._host.memory is None
    assert not list(Path("/dev/shm").glob("*hpc_train*"))
    del buffer
    assert mapped() >= before  # a view keeps the memory
    part.fill_(1.0)
    collective.sum_(part, Wire.FP32)
    assert part.tolist() == [float(world.size)] * 10
    del part
    assert mapped() == before
    collective.close()


def check_ranks_that_cannot_share_memory_send_it(world: World) -> None:
    """As where each rank runs in a container of its own: every rank then counts as a host."""
    from hpc_train.comm import host_memory

    def another_file(num_bytes: int) -> int:
        made = os.memfd_create("another container's")
        os.ftruncate(made, num_bytes)
        return made

    usual = host_memory._open
    # Nothing can be opened; or what is found there is too short, of another kind, or of other ranks.
    for finds in (
        lambda path: -1,
        lambda path: another_file(0),
        lambda path: os.open("/dev/null", os.O_RDWR),
        lambda path: another_file(2**20),
    ):
        if world.rank == 1:  # the others find the right one
            host_memory._open = finds
        try:
            collective = world.collective(Grid(world.size, 1), torch.device("cpu"))
        finally:
            host_memory._open = usual
        assert collective._host.memory is None or world.size == 1
        buffer = collective.allocate(5000)
        buffer.fill_(world.rank + 1.0)
        collective.sum_(buffer, Wire.FP16)
        assert buffer.tolist() == [world.size * (world.size + 1) / 2] * 5000
        collective.close()


def check_replicas_that_differ_are_refused_before_they_share_memory(world: World) -> None:
    """More buckets or larger ones on one rank: the others of its host would wait for it, or map too much."""
    for builds in ([4, 4], [4, 9]), ([4], [4, 4]), ([4, 4, 4], [4]):
        widths = builds[world.rank == world.size - 1]
        model = torch.nn.Sequential(*(torch.nn.Linear(16, width) for width in widths))
        collective = world.collective(Grid(world.size, 1), torch.device("cpu"))
        with pytest.raises(UserError, match="replicas train different parameters"):
            Reducer(list(model.named_parameters()), collective, bucket_bytes=64)
        collective.close()

"""What every backend must do: functions `check_...(world)`, called on all ranks together.

They know the contracts of hpc_train.comm.interface and nothing of a backend.  test_loopback.py runs
them on threads, launch.py under mpirun.
"""

import time

import sum_cases
import torch
from sum_cases import CPU, DTYPES

from hpc_train.comm.interface import Wire, World
from hpc_train.grid import Grid


def checks():
    """All of them, by name."""
    found = {**vars(sum_cases), **globals()}
    return {name: value for name, value in found.items() if name.startswith("check_")}


# ---- peer links ----------------------------------------------------------------------------------


def neighbours(world: World):
    """A ring of stages: the link, the stage before and the stage after."""
    link = world.peer_link(Grid(1, world.size))
    return link, (world.rank - 1) % world.size, (world.rank + 1) % world.size


def check_peer_link_of_any_dtype_and_shape(world: World) -> None:
    link, before, after = neighbours(world)
    for dtype in DTYPES:
        for shape in ((), (0,), (1,), (3, 5), (2, 0, 4)):
            arrived = torch.empty(shape, dtype=dtype)
            receive = link.irecv(arrived, before, tag=5)
            send = link.isend(torch.full(shape, world.rank + 2).to(dtype), after, tag=5)
            receive.wait()
            send.wait()
            assert torch.equal(arrived, torch.full(shape, before + 2).to(dtype))


def check_peer_link_sends_what_requires_gradients(world: World) -> None:
    link, before, after = neighbours(world)
    activation = torch.full((4,), float(world.rank), requires_grad=True) * 2
    arrived = torch.empty(4)
    receive = link.irecv(arrived, before, tag=0)
    send = link.isend(activation, after, tag=0)
    receive.wait()
    send.wait()
    assert arrived.tolist() == [2.0 * before] * 4
    assert not arrived.requires_grad


def check_peer_link_keeps_order_and_tags_apart(world: World) -> None:
    link, before, after = neighbours(world)
    same_tag = [torch.full((3,), 10.0 * world.rank + i) for i in range(4)]
    sends = [link.isend(tensor, after, tag=1) for tensor in same_tag]
    sends += [link.isend(torch.full((2,), tag), after, tag=tag) for tag in (30, 32_766, 31)]
    tagged = {tag: torch.empty(2, dtype=torch.int64) for tag in (31, 30, 32_766)}
    arrived = [torch.empty(3) for _ in same_tag]
    receives = [link.irecv(out, before, tag=tag) for tag, out in tagged.items()]
    receives += [link.irecv(out, before, tag=1) for out in arrived]
    for work in (*receives, *sends):
        work.wait()
    assert [int(out[0]) for out in arrived] == [10 * before + i for i in range(4)]
    assert all(out.tolist() == [tag, tag] for tag, out in tagged.items())


def check_peer_link_ring_of_large_messages(world: World) -> None:
    """Everybody sends 4 MB before anybody waits to receive: no deadlock, and pieces come in order."""
    link, before, after = neighbours(world)
    for sends_first in (True, False):
        arrived = torch.empty(2**20)
        mine = torch.arange(2.0**20) + world.rank
        if sends_first:
            works = [link.isend(mine, after, tag=2), link.irecv(arrived, before, tag=2)]
        else:
            works = [link.irecv(arrived, before, tag=2), link.isend(mine, after, tag=2)]
        for work in works:
            work.wait()
        assert torch.equal(arrived, torch.arange(2.0**20) + before)


def check_peer_link_tells_what_is_complete(world: World) -> None:
    link, before, after = neighbours(world)
    for numel in (8, 2**18):  # sent at once, and announced first
        arrived = torch.zeros(numel)
        receive = link.irecv(arrived, before, tag=4)
        assert not receive.is_complete()
        world.control.barrier()
        send = link.isend(torch.full((numel,), world.rank + 1.0), after, tag=4)
        until = time.monotonic() + 20
        while not receive.is_complete():
            assert time.monotonic() < until
        receive.wait()
        send.wait()
        assert receive.is_complete()
        assert arrived.unique().tolist() == [before + 1.0]


def check_two_links_do_not_mix(world: World) -> None:
    first, before, after = neighbours(world)
    second = world.peer_link(Grid(1, world.size))
    sends = [first.isend(torch.tensor(1), after, tag=0), second.isend(torch.tensor(2), after, tag=0)]
    outs = torch.empty(2, dtype=torch.int64)
    receives = [second.irecv(outs[1], before, tag=0), first.irecv(outs[0], before, tag=0)]
    for work in (*receives, *sends):
        work.wait()
    assert outs.tolist() == [1, 2]


# ---- control plane -------------------------------------------------------------------------------


def check_gather_and_broadcast_overlap(world: World) -> None:
    """Two of each under way at once, other operations between, results fetched late."""
    control = world.control
    assert (control.rank, control.size) == (world.rank, world.size)
    gathers = [control.gather(bytes([world.rank, i]) * 10) for i in range(2)]
    broadcasts = [control.broadcast(bytes([i]) * 9 if world.rank == 0 else None, 9) for i in range(2)]
    assert control.agree(True)
    third = control.gather(bytes([world.rank]))
    assert [pending.result() for pending in broadcasts] == [bytes([i]) * 9 for i in range(2)]
    for i, pending in enumerate(gathers):
        records = pending.result()
        if world.rank == 0:
            assert records == [bytes([rank, i]) * 10 for rank in range(world.size)]
        else:
            assert records is None
    assert (third.result() is None) == (world.rank > 0)


def check_all_gather_of_any_length(world: World) -> None:
    mine = bytes([world.rank + 1]) * (1000 * world.rank)
    assert world.control.all_gather(mine) == [bytes([rank + 1]) * (1000 * rank) for rank in range(world.size)]
    assert world.control.all_gather(b"") == [b""] * world.size
    long = world.control.all_gather(bytes(300_000) if world.rank == 0 else b"short")
    assert [len(data) for data in long] == [300_000] + [5] * (world.size - 1)


def check_total_has_the_same_bits(world: World) -> None:
    values = [1e16 * (-1) ** world.rank, 0.1 * (world.rank + 1), float(world.rank)]
    totals = world.control.total(values)
    everywhere = world.control.all_gather(repr(totals).encode())
    assert len(set(everywhere)) == 1
    assert totals[2] == sum(range(world.size))
    assert abs(totals[1] - 0.1 * sum(range(1, world.size + 1))) < 1e-12
    assert world.control.total([]) == []


def check_agree(world: World) -> None:
    assert world.control.agree(True)
    for odd_one in range(world.size):
        assert not world.control.agree(world.rank != odd_one)
    assert not world.control.agree(False)
    world.control.barrier()


# ---- worlds and grids ----------------------------------------------------------------------------


def check_world_knows_its_host(world: World) -> None:
    hosts = [data.decode() for data in world.control.all_gather(world.host.encode())]
    local_ranks = [int(data) for data in world.control.all_gather(str(world.local_rank).encode())]
    assert hosts[world.rank] == world.host
    here = [local_rank for local_rank, host in zip(local_ranks, hosts, strict=True) if host == world.host]
    assert here == list(range(world.local_size))
    assert world.describe()["backend"] in ("mpi", "loopback")


def check_every_grid(world: World) -> None:
    """Sums stay within a stage, messages within a replica, for each way to lay out the ranks."""
    for stages in (stages for stages in range(1, world.size + 1) if world.size % stages == 0):
        for fastest in ("stage", "replica"):
            grid = Grid(world.size // stages, stages, fastest)
            place = grid.place(world.rank)
            collective = world.collective(grid, CPU)
            link = world.peer_link(grid)
            assert (collective.rank, collective.size) == (place.replica, grid.replicas)

            buffer = torch.full((5,), float(world.rank))
            collective.sum_(buffer, Wire.FP32)
            assert buffer.tolist() == [sum(grid.replicas_of(place.stage))] * 5

            arrived = torch.full((stages,), -1)
            others = [stage for stage in range(stages) if stage != place.stage]
            works = [link.irecv(arrived[stage], stage, tag=3) for stage in others]
            works += [link.isend(torch.tensor(world.rank), stage, tag=3) for stage in others]
            for work in works:
                work.wait()
            arrived[place.stage] = world.rank
            assert arrived.tolist() == grid.stages_of(place.replica)
            collective.close()

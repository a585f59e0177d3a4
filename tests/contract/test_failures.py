"""What a rank that fails does to the others: nobody waits for ever, and its traceback is seen."""

import threading

import pytest

from hpc_train.comm.interface import Wire
from hpc_train.comm.loopback import LoopbackWorld, run_ranks
from hpc_train.errors import PeerLost
from hpc_train.grid import Grid

ONE_RANK_RAISES = """
import traceback
from hpc_train.comm.connect import connect
world = connect("mpi")
try:
    if world.rank == 1:
        raise RuntimeError("this is what happened")
    world.control.total([1.0])
except RuntimeError:
    traceback.print_exc()
    world.control.abort(3)
"""
A_THREAD_ABORTS = """
import sys, threading
from hpc_train.comm.connect import connect
world = connect("mpi")
if world.rank == 1:
    threading.Thread(target=world.control.abort, args=(5,)).start()
world.control.barrier()
while True:
    world.control.barrier()
"""


@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_abort_ends_all_ranks_with_its_exit_code_and_the_traceback(mpirun, level):
    done = mpirun(3, ["-c", ONE_RANK_RAISES], timeout_s=30, env={"HPC_TRAIN_THREAD_LEVEL": level})
    assert done.returncode == 3
    assert "RuntimeError: this is what happened" in done.stdout + done.stderr


@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_abort_works_from_a_thread_while_the_main_thread_is_inside_mpi(mpirun, level):
    done = mpirun(2, ["-c", A_THREAD_ABORTS], timeout_s=30, env={"HPC_TRAIN_THREAD_LEVEL": level})
    assert done.returncode == 5


def test_the_first_failure_comes_out_and_the_others_get_peer_lost():
    seen = {}

    def body(world):
        if world.rank == 1:
            raise KeyError("first")
        try:
            world.control.agree(True)
        except PeerLost as lost:
            seen[world.rank] = lost.ranks
            raise

    with pytest.raises(KeyError, match="first"):
        run_ranks(3, body)
    assert seen == {0: (1,), 2: (1,)}


def test_a_rank_that_has_ended_is_lost_too():
    def body(world):
        if world.rank == 0:
            world.collective(Grid(2, 1), None).sum_(_ones(), Wire.FP32)

    with pytest.raises(PeerLost, match="lost rank 1 during sum"):
        run_ranks(2, body)


def test_what_was_sent_before_the_end_still_arrives():
    def body(world):
        link = world.peer_link(Grid(1, 2))
        if world.rank == 1:
            link.isend(_ones(), 0, tag=0)
            return None
        out = _ones() * 0
        link.irecv(out, 1, tag=0).wait()
        return out.tolist()

    assert run_ranks(2, body)[0] == [1.0, 1.0]


def test_a_rank_that_hangs_is_named():
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 are not done after 0.2 s"):
        run_ranks(2, lambda world: never.wait() if world.rank else world.control.barrier(), timeout_s=0.2)
    never.set()


def test_abort_of_a_rank_thread_comes_out_as_system_exit():
    def body(world):
        if world.rank == 1:
            world.control.abort(4)
        world.control.barrier()

    with pytest.raises(SystemExit) as end:
        run_ranks(2, body)
    assert end.value.code == 4


def test_the_world_of_one_rank_needs_nobody():
    world = LoopbackWorld()
    collective = world.collective(Grid(1, 1), None)
    buffer = _ones()
    collective.sum_(buffer, Wire.FP16)
    assert buffer.tolist() == [1.0, 1.0]
    assert world.control.gather(b"ab").result() == [b"ab"]
    assert world.control.broadcast(b"cd", 2).result() == b"cd"
    world.close()


def _ones():
    import torch

    return torch.ones(2)

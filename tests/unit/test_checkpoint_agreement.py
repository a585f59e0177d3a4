"""What fails on one rank is one line on all of them; what is a mistake of ours stays an exception."""

import socket

import pytest

from hpc_train.checkpoint.agreement import attempt, share
from hpc_train.comm.loopback import run_ranks
from hpc_train.errors import UserError


def caught(num_ranks, body):
    """The line of the UserError that every rank gets."""

    def rank_body(world):
        with pytest.raises(UserError) as error:
            attempt(world.control, "cannot do it", lambda: body(world.rank))
        return str(error.value)

    return run_ranks(num_ranks, rank_body, timeout_s=20)


def test_all_have_everybodys_value():
    values = run_ranks(3, lambda world: share(world.control, {"rank": world.rank, "list": [None, 0.1]}))
    assert values == [[{"rank": rank, "list": [None, 0.1]} for rank in range(3)]] * 3


def test_all_have_what_each_gave():
    given = run_ranks(3, lambda world: attempt(world.control, "cannot", lambda: world.rank * 2))
    assert given == [[0, 2, 4]] * 3


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_one_that_fails_makes_all_raise_the_same_line(failing):
    def body(rank):
        if rank == failing:
            raise OSError(28, "No space left on device", "/scratch/x")

    line = f"cannot do it: rank {failing} on {socket.gethostname()}: No space left on device (/scratch/x)"
    assert caught(4, body) == [line] * 4


def test_several_that_fail_are_counted():
    def body(rank):
        if rank:
            raise UserError(f"mistake {rank}")

    here = socket.gethostname()
    assert caught(2, body) == [f"cannot do it: rank 1 on {here}: mistake 1"] * 2
    assert caught(3, body) == [f"cannot do it: rank 1 on {here}: mistake 1 (and 1 more rank)"] * 3
    assert caught(4, body) == [f"cannot do it: rank 1 on {here}: mistake 1 (and 2 more ranks)"] * 4


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError("the disk is gone"), "the disk is gone"),
        (OSError(28, "No space left on device"), "No space left on device"),  # as os.fsync raises it
        (OSError(28, "No space left on device", "/x"), "No space left on device (/x)"),
        (UserError("a mistake"), "a mistake"),
    ],
)
def test_one_rank_alone_is_not_named(error, cause):
    def body(rank):
        raise error

    assert caught(1, body) == [f"cannot do it: {cause}"]


def test_a_mistake_of_ours_stays_what_it_is():
    def body(world):
        attempt(world.control, "cannot", lambda: 1 / world.rank)

    with pytest.raises(ZeroDivisionError):
        run_ranks(2, body, timeout_s=20)

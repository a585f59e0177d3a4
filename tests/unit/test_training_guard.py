"""How a run ends: a user's mistake in one line and with 2, anything else with its traceback and 1."""

import pytest

from hpc_train.comm.loopback import LoopbackWorld, run_ranks
from hpc_train.errors import UserError
from hpc_train.training import guard as guard_file
from hpc_train.training.guard import attempt, guard, settle, together

MISTAKE = "batch.size=0: set it to at least 1"


def refuse(text=MISTAKE):
    raise UserError(text)


def ending(body):
    """The exit code that `body` ends with."""
    with pytest.raises(SystemExit) as caught:
        body()
    return caught.value.code


def ends_of(num_ranks, body):
    """All ranks together: each one's exit code."""
    return run_ranks(num_ranks, lambda world: ending(lambda: body(world)))


def test_an_attempt_keeps_the_value_or_what_was_raised():
    assert attempt(lambda: 7) == (7, None)
    value, error = attempt(refuse)
    assert value is None
    assert str(error) == MISTAKE


def test_without_a_mistake_every_rank_goes_on_with_its_own_value(capsys):
    assert run_ranks(3, lambda world: together(world, lambda: world.rank * 10)) == [0, 10, 20]
    assert capsys.readouterr().err == ""


def test_a_mistake_of_all_ranks_is_told_once(capsys):
    assert ends_of(4, lambda world: together(world, refuse)) == [2] * 4
    assert capsys.readouterr() == ("", f"error: {MISTAKE}\n")


def test_a_mistake_of_some_ranks_is_told_with_their_numbers_and_hosts(capsys):
    def body(world):
        world.host = f"node{world.rank}"
        together(world, lambda: refuse() if world.rank in (1, 3) else 1)

    assert ends_of(4, body) == [2] * 4
    assert capsys.readouterr().err == f"error: {MISTAKE} (rank 1 on node1, 3 on node3)\n"


def test_the_line_stays_short_with_many_ranks(capsys):
    def body(world):
        world.host = f"n{world.rank}"
        together(world, lambda: refuse() if world.rank else 1)

    assert ends_of(12, body) == [2] * 12
    assert (
        capsys.readouterr().err == f"error: {MISTAKE} (rank 1 on n1, 2 on n2, 3 on n3, 4 on n4 and 7 more)\n"
    )


def test_mistakes_that_differ_by_rank_are_one_line_all_the_same(capsys):
    def body(world):
        world.host = "a"
        together(world, lambda: refuse(f"local rank {world.rank} sees 0 CUDA devices"))

    assert ends_of(4, body) == [2] * 4
    line = "error: local rank 0 sees 0 CUDA devices (rank 0 on a; other mistakes on 3 more)\n"
    assert capsys.readouterr().err == line


def test_what_is_no_users_mistake_is_raised_again():
    value, error = attempt(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        settle(LoopbackWorld(), value, error)


def test_guard_returns_what_its_body_returns():
    assert guard(LoopbackWorld(), lambda: "done") == "done"


def test_guard_tells_a_users_mistake_in_one_line(capsys):
    assert ending(lambda: guard(LoopbackWorld(), refuse)) == 2
    assert capsys.readouterr() == ("", f"error: {MISTAKE}\n")


def test_guard_tells_anything_else_with_traceback_rank_and_host(capsys):
    world = LoopbackWorld()
    assert ending(lambda: guard(world, lambda: 1 // 0)) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"rank 0 of 1 on {world.host} failed:\nTraceback (most recent call last):\n")
    assert "ZeroDivisionError: " in err


@pytest.mark.parametrize(("error", "code"), [(UserError(MISTAKE), 2), (ZeroDivisionError("zero"), 1)])
def test_a_rank_that_fails_ends_the_others_that_wait_for_it(capsys, monkeypatch, error, code):
    """Rank 1 fails while rank 0 waits in a barrier, which nobody else will enter."""
    monkeypatch.setattr(guard_file, "_FIRST_WORD_S", 0.0)

    def fail():
        raise error

    def body(world):
        world.host = f"node{world.rank}"
        guard(world, world.control.barrier if world.rank == 0 else fail)

    assert ending(lambda: run_ranks(2, body)) == code
    err = capsys.readouterr().err
    if code == 2:
        assert f"error: {MISTAKE} (rank 1 on node1)\n" in err
    else:
        assert "rank 1 of 2 on node1 failed:\nTraceback" in err
        assert "ZeroDivisionError: zero" in err

"""How a run ends when something goes wrong: said once, with the right exit code, by all ranks.

A user's mistake is one line from rank 0 and exit code 2.  Any other exception ends every rank within
seconds, with the traceback, number and host of the rank it happened on, and exit code 1.
"""

import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

from hpc_train.comm.interface import World
from hpc_train.errors import EXIT_FAILED, EXIT_USAGE, UserError

T = TypeVar("T")

# Ranks that meet the same mistake at the same time leave it to rank 0 to say so: its abort reaches them
# sooner than this.
_FIRST_WORD_S = 1.0
_RANKS_SHOWN = 4


def say(text: str) -> None:
    """One message on stderr, out before the process ends."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


class _Settled(SystemExit):
    """All ranks have agreed to end."""


def attempt(body: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The value of `body`, or None and what it raised, for `settle`."""
    try:
        return body(), None
    except Exception as error:  # noqa: BLE001  (settle tells it, or raises it again)
        return None, error


def settle(world: World, value: T | None, error: Exception | None) -> T:
    """Go on with `value` when no rank found a mistake; else all ranks end, and rank 0 says why.

    Collective, within `guard`.  A mistake that only some ranks see is told with their numbers and hosts.
    What is no user's mistake is raised again.
    """
    if error is not None and not isinstance(error, UserError):
        raise error
    parts = world.control.all_gather(json.dumps([str(error or ""), world.host]).encode())
    found: dict[str, list[str]] = {}
    for rank, part in enumerate(parts):
        text, host = json.loads(part)
        if text:
            found.setdefault(text, []).append(f"{rank} on {host}")
    if not found:
        assert value is not None
        return value
    if world.rank == 0:
        say(_one_line(found, world.size))
    world.control.barrier()  # no rank's end may cut off rank 0's words
    world.close()
    raise _Settled(EXIT_USAGE)


def _one_line(found: Mapping[str, Sequence[str]], num_ranks: int) -> str:
    """The first mistake and who found it; how many ranks found others."""
    (text, ranks), *others = found.items()
    if len(ranks) == num_ranks:
        return f"error: {text}"
    where = f"rank {', '.join(ranks[:_RANKS_SHOWN])}"
    if len(ranks) > _RANKS_SHOWN:
        where += f" and {len(ranks) - _RANKS_SHOWN} more"
    if others:
        where += f"; other mistakes on {sum(len(more) for _, more in others)} more"
    return f"error: {text} ({where})"


def together(world: World, body: Callable[[], T]) -> T:
    """Run on every rank a `body` that needs no message, and go on only if no rank found a mistake."""
    return settle(world, *attempt(body))


def guard(world: World, body: Callable[[], T]) -> T:
    """Run `body` on this rank; if it fails, end the whole job."""
    try:
        return body()
    except UserError as error:
        if world.rank != 0:
            time.sleep(_FIRST_WORD_S)
            say(f"error: {error} (rank {world.rank} on {world.host})")
        else:
            say(f"error: {error}")
        _end(world, EXIT_USAGE)
    except _Settled:
        raise
    except KeyboardInterrupt:
        _end(world, 128 + signal.SIGINT)
    except BaseException:  # noqa: BLE001  (a task's sys.exit on one rank too: told in full, it ends the job)
        name = f"rank {world.rank} of {world.size} on {world.host}"
        say(f"{name} failed:\n{traceback.format_exc()}{name} failed: all ranks end now")
        _end(world, EXIT_FAILED)


def _end(world: World, exit_code: int) -> NoReturn:
    if world.size == 1:
        sys.exit(exit_code)
    world.control.abort(exit_code)

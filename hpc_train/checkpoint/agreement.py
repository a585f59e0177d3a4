"""All ranks do something that may fail on some of them, and all learn how it went: nobody waits for ever."""

import json
import socket
from collections.abc import Callable
from typing import Any

from hpc_train.comm.interface import ControlPlane
from hpc_train.errors import UserError


def share(control: ControlPlane, value: Any) -> list[Any]:
    """Every rank's `value`, by rank; it passes through JSON.  All ranks call it."""
    return [json.loads(part) for part in control.all_gather(json.dumps(value).encode())]


def attempt(control: ControlPlane, cannot: str, body: Callable[[], Any]) -> list[Any]:
    """Run `body` on every rank, and return what each gave, by rank; it passes through JSON.

    All ranks call it; `body` sends no message.

    Raises:
        UserError: `body` raised OSError or UserError on some rank.  Raised on all ranks alike: "`cannot`:
            rank, host and cause of the first, and how many more".
    """
    try:
        part = {"value": body()}
    except UserError as error:
        part = {"cause": str(error)}
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        part = {"cause": (error.strerror or str(error)) + where}
    if control.size > 1:
        part["rank"] = f"rank {control.rank} on {socket.gethostname()}: "
    parts = share(control, part)
    failed = [part for part in parts if "cause" in part]
    if not failed:
        return [part["value"] for part in parts]
    first, *more = failed
    others = f" (and {len(more)} more rank{'s' * (len(more) > 1)})" if more else ""
    raise UserError(f"{cannot}: {first.get('rank', '')}{first['cause']}{others}")

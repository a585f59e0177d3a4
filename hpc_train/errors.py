"""The few exceptions that a user meets, and the exit codes that go with them."""

from collections.abc import Sequence

EXIT_OK = 0
EXIT_FAILED = 1  # an exception on some rank, or a parity check that does not hold
EXIT_USAGE = 2  # a mistake in the command, the settings or the launch
EXIT_STOPPED = 75  # saved and stopped before the end (sysexits' EX_TEMPFAIL): run again to resume


class UserError(Exception):
    """A mistake that the user can mend: one line that says what, the numbers and the fix.

    Shown without a traceback, once and not once a rank; the process ends with exit code 2.
    """


class PeerLost(Exception):
    """A rank that this one was waiting for is gone."""

    def __init__(self, ranks: Sequence[int], doing: str) -> None:
        self.ranks = tuple(ranks)
        self.doing = doing
        names = ", ".join(map(str, self.ranks)) or "unknown"
        super().__init__(f"lost rank {names} during {doing}")

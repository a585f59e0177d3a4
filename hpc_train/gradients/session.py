"""The job that a script with its own loop takes part in: from init() to shutdown().

The names are Horovod's.  `_session` is the package's one module-level state: functions without an
argument need a place to look.
"""

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from hpc_train.comm.interface import Collective, World
from hpc_train.errors import EXIT_FAILED, EXIT_USAGE, UserError
from hpc_train.grid import Grid
from hpc_train.launch import horovod_settings

if TYPE_CHECKING:  # a script may ask for its rank before it waits for torch
    import torch


class Closable(Protocol):
    """What shutdown closes, all ranks together."""

    def close(self) -> None:
        """Leave in good order."""


class Session:
    """The job, as this process sees it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bucket_bytes: int | None = None  # as HOROVOD_FUSION_THRESHOLD says
        self.closed_at_shutdown: list[Closable] = []
        self._collectives: dict[str, Collective] = {}
        self._pid = os.getpid()
        self._hooks_before = (sys.excepthook, threading.excepthook)

    def new_collective(self, device: "torch.device") -> Collective:
        """Sums among all ranks, for one user: each thread that sums needs its own.  Collective."""
        return self.world.collective(Grid(replicas=self.world.size, stages=1), device)

    def collective(self, device: "torch.device") -> Collective:
        """The shared one for calls of the main thread.  Collective."""
        if device.type not in self._collectives:
            self._collectives[device.type] = self.new_collective(device)
        return self._collectives[device.type]

    def watch(self) -> None:
        """From now on an uncaught exception on this rank ends all ranks, and says where it was."""
        before, before_in_thread = self._hooks_before

        def in_main_thread(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            self._end_all_ranks(error, lambda: before(kind, error, traceback))

        def in_thread(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is None or isinstance(args.exc_value, SystemExit):
                before_in_thread(args)
            else:
                self._end_all_ranks(args.exc_value, lambda: before_in_thread(args))

        sys.excepthook = in_main_thread
        threading.excepthook = in_thread
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Leave in good order, all ranks together."""
        atexit.unregister(self._at_exit)
        for closable in [*self.closed_at_shutdown, *self._collectives.values()]:
            closable.close()
        self.world.close()
        sys.excepthook, threading.excepthook = self._hooks_before

    def _end_all_ranks(self, error: BaseException, show: Callable[[], object]) -> None:
        """Show the error and end the job; a forked child, and a job of one rank, end as Python ends them."""
        if os.getpid() != self._pid:
            show()
            return
        where = f"rank {self.world.rank} of {self.world.size} on {self.world.host}"
        if isinstance(error, UserError):
            print(f"{where}: {error}", file=sys.stderr)  # noqa: T201
        else:
            if self.world.size > 1:
                print(f"{where} failed, which ends all ranks:", file=sys.stderr)  # noqa: T201
            show()
        if self.world.size > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            self.world.control.abort(EXIT_USAGE if isinstance(error, UserError) else EXIT_FAILED)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        try:
            shutdown()
        except BaseException as error:
            # Python would print it and end with exit code 0, while the other ranks wait.
            sys.excepthook(type(error), error, error.__traceback__)
            raise


_session: Session | None = None


def current() -> Session:
    """The session that init() began.  Raises UserError before it."""
    if _session is None:
        raise UserError("hpc_train.init() comes first")
    return _session


def bucket_bytes() -> int | None:
    """The size of buckets that the user's environment asks for, if it does."""
    return None if _session is None else _session.bucket_bytes


def init(backend: str = "auto") -> None:
    """Join the job that mpirun or srun started; alone, be a job of one rank.  All ranks together.

    Call it before anything else of this package.  From then on an exception that nobody catches, on
    any rank, ends all of them with its traceback, rank and host, and exit code 1.  A second call does
    nothing.

    Args:
        backend: "auto", "mpi", "gloo", "nccl" or "horovod", as the setting `comm.backend`.
    """
    global _session
    if _session is None:
        from hpc_train.comm.connect import connect

        _session = Session(connect(backend))
        _session.watch()
        found = horovod_settings.variables(os.environ, _session.world.control)
        _session.bucket_bytes = horovod_settings.bucket_bytes(found)
        warning = horovod_settings.without_effect(found, backend, tunes=False)
        if warning and _session.world.rank == 0:
            warnings.warn(warning, stacklevel=2)


def shutdown() -> None:
    """Leave the job, all ranks together; the end of the script does the same."""
    global _session
    if _session is not None:
        _session.close()
        _session = None


def rank() -> int:
    """The number of this process in the job, from 0."""
    return current().world.rank


def size() -> int:
    """The number of ranks in the job."""
    return current().world.size


def local_rank() -> int:
    """The number of this rank on its host: modulo the visible GPUs it is the GPU to use."""
    return current().world.local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return current().world.local_size

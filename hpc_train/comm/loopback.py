"""Ranks as threads of one process, for tests, and the world of one rank that needs no MPI.

    results = run_ranks(4, lambda world: world.control.total([world.rank]))     # [[6.0], [6.0], ...]

Everything stands on the mailbox of mail.py.  A rank that waits for one that raised or ended gets PeerLost.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from hpc_train.comm.host_memory import Shelf
from hpc_train.comm.interface import ControlPlane
from hpc_train.comm.mail import Mail
from hpc_train.comm.routed_collective import RoutedCollective
from hpc_train.comm.routes import Hosts
from hpc_train.grid import Grid

T = TypeVar("T")


class LoopbackWorld:
    """One rank of `size` in this process.  `hosts`: by rank, the host that it plays to be on."""

    def __init__(
        self, rank: int = 0, size: int = 1, mail: Mail | None = None, hosts: Sequence[int] = ()
    ) -> None:
        self._hosts = tuple(hosts) or (0,) * size
        self.rank = rank
        self.size = size
        self.local_rank = self._hosts[:rank].count(self._hosts[rank])
        self.local_size = self._hosts.count(self._hosts[rank])
        name = socket.gethostname()
        self.host = f"{name}-{self._hosts[rank]}" if self.local_size < size else name
        self._mail = mail or Mail()
        self._channels = 0
        self.control: ControlPlane = LoopbackControl(self._mail, rank, size)

    def peer_link(self, grid: Grid) -> "LoopbackPeerLink":
        """See interface.World."""
        ranks = grid.stages_of(grid.place(self.rank).replica)
        return LoopbackPeerLink(self._mail, self._channel(), ranks, self.rank)

    def collective(self, grid: Grid, device: torch.device) -> "LoopbackCollective":
        """See interface.World."""
        ranks = grid.replicas_of(grid.place(self.rank).stage)
        return LoopbackCollective(self._mail, self._channel(), ranks, self.rank, device, self._hosts)

    def describe(self) -> dict[str, Any]:
        """See interface.World."""
        return {"backend": "loopback", "ranks": self.size}

    def close(self) -> None:
        """See interface.World."""
        self.control.barrier()

    def _channel(self) -> int:
        """A number of its own for each link and collective; all ranks make them in the same order."""
        self._channels += 1
        return self._channels


class LoopbackWork:
    """A message to take at `wait`; nothing for a message that was sent."""

    def __init__(
        self, take: Callable[[], None] = lambda: None, is_there: Callable[[], bool] = lambda: True
    ) -> None:
        self._take, self._is_there = take, is_there

    def wait(self) -> None:
        """See interface.Work."""
        self._take()
        self._is_there = lambda: True

    def is_complete(self) -> bool:
        """See interface.Transfer."""
        return self._is_there()


class LoopbackPeerLink:
    """Stage to stage of one replica; a tensor is copied when it is sent."""

    def __init__(self, mail: Mail, channel: int, ranks: Sequence[int], rank: int) -> None:
        self._mail = mail
        self._channel = channel
        self._ranks = ranks
        self._rank = rank

    def isend(self, tensor: Tensor, stage: int, tag: int) -> LoopbackWork:
        """See interface.PeerLink."""
        self._mail.put((self._channel, tag), self._rank, self._ranks[stage], tensor.detach().clone())
        return LoopbackWork()

    def irecv(self, out: Tensor, stage: int, tag: int) -> LoopbackWork:
        """See interface.PeerLink."""
        box = (self._channel, tag), self._ranks[stage], self._rank

        def take() -> None:
            sent = self._mail.take(*box, doing=f"a receive from stage {stage}")
            out.detach().view(-1).copy_(sent.view(-1))

        return LoopbackWork(take, lambda: self._mail.holds(*box))


class LoopbackCollective(RoutedCollective):
    """Sums among threads; those of one host share their buffers, as threads can."""

    threaded = True

    def __init__(
        self,
        mail: Mail,
        channel: int,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        hosts: Sequence[int],
    ) -> None:
        self._mail = mail
        self._channel = channel
        self._ranks = ranks
        me = ranks.index(rank)
        where = Hosts(tuple(hosts[r] for r in ranks))
        neighbours = [ranks[i] for i in where.neighbours(me)]
        self._memory = _HostOfThreads(mail, (channel, "host"), neighbours, rank)
        super().__init__(me, where, self, self._memory, device, message_bytes=16 * 2**10)

    def allocate(self, numel: int) -> Tensor:
        """See interface.Collective."""
        return self._memory.put(super().allocate(numel))

    def start(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int
    ) -> LoopbackWork:
        """See routed_sum.Transport."""
        here = self._ranks[self.rank]
        for peer, words in sends:
            self._mail.put((self._channel, tag), here, self._ranks[peer], words.clone())

        def take() -> None:
            for peer, out in receives:
                out.copy_(self._mail.take((self._channel, tag), self._ranks[peer], here, "sum"))

        return LoopbackWork(take)

    def max(self, value: float) -> float:
        """See interface.Collective."""
        values: list[float] = self._share([value] * self.size, "max")
        return max(values)

    def broadcast_(self, tensor: Tensor, root: int) -> None:
        """See interface.Collective."""
        sent = self._share([tensor.detach().clone()] * self.size, "broadcast")
        tensor.detach().copy_(sent[root])

    def barrier(self) -> None:
        """See interface.Collective."""
        self._share([None] * self.size, "barrier")

    def close(self) -> None:
        """See interface.Collective."""

    def _share(self, messages: Sequence[Any], doing: str) -> list[Any]:
        """Send message i to replica i; return what came, by replica."""
        return _share(self._mail, self._channel, self._ranks, self._ranks[self.rank], messages, doing)


class _HostOfThreads:
    """See routed_sum.HostMemory: the ranks of a host tell each other where their buffers are."""

    def __init__(self, mail: Mail, channel: Hashable, ranks: Sequence[int], rank: int) -> None:
        self._mail = mail
        self._channel = channel
        self._ranks = ranks
        self._rank = rank
        self._others = [r for r in ranks if r != rank]
        self._shelf = Shelf()
        self._scratch: Tensor | None = None

    def put(self, tensor: Tensor) -> Tensor:
        """Take in this rank's part of an allocation; all ranks of the host together."""
        if not self._others:
            return tensor
        arrays = dict(zip(self._ranks, self._share(tensor.numpy()), strict=True))
        return self._shelf.put([arrays[r] for r in (self._rank, *self._others)])

    def rows(self, buffer: Tensor) -> list[Tensor] | None:
        """See routed_sum.HostMemory."""
        return self._shelf.rows(buffer) if self._others else [buffer]

    def scratch(self, numel: int) -> Tensor:
        """See routed_sum.HostMemory."""
        if self._scratch is None or self._scratch.numel() < numel:
            self._scratch = self.put(torch.zeros(numel))
        return self._scratch[:numel]

    def barrier(self) -> None:
        """See routed_sum.HostMemory."""
        self._share(None)

    def _share(self, message: Any) -> list[Any]:
        return _share(self._mail, self._channel, self._ranks, self._rank, [message] * len(self._ranks), "sum")


def _share(
    mail: Mail, channel: Hashable, ranks: Sequence[int], here: int, messages: Sequence[Any], doing: str
) -> list[Any]:
    """Send message i to rank i of `ranks`; return what came from each."""
    for dest, message in zip(ranks, messages, strict=True):
        mail.put(channel, here, dest, message)
    return [mail.take(channel, source, here, doing) for source in ranks]


class _Now:
    """A Pending whose result is worked out when it is asked for."""

    def __init__(self, result: Callable[[], Any]) -> None:
        self.result = result


class LoopbackControl:
    """Small messages among all ranks."""

    def __init__(self, mail: Mail, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._mail = mail
        self._rounds = 0

    def gather(self, record: bytes) -> _Now:
        """See interface.ControlPlane."""
        channel = self._next("gather")
        self._mail.put(channel, self.rank, 0, record)
        sources = range(self.size) if self.rank == 0 else ()
        return _Now(lambda: [self._mail.take(channel, s, 0, "gather") for s in sources] or None)

    def broadcast(self, record: bytes | None, num_bytes: int) -> _Now:
        """See interface.ControlPlane."""
        channel = self._next("broadcast")
        if self.rank == 0:
            assert record is not None
            assert len(record) == num_bytes
            for dest in range(self.size):
                self._mail.put(channel, 0, dest, record)
        return _Now(lambda: self._mail.take(channel, 0, self.rank, "broadcast"))

    def all_gather(self, data: bytes) -> list[bytes]:
        """See interface.ControlPlane."""
        return self._share(data, "all_gather")

    def total(self, values: Sequence[float]) -> list[float]:
        """See interface.ControlPlane."""
        return [
            sum(column)
            for column in zip(*self._share([float(value) for value in values], "total"), strict=True)
        ]

    def agree(self, flag: bool) -> bool:
        """See interface.ControlPlane."""
        return all(self._share(flag, "agree"))

    def barrier(self) -> None:
        """See interface.ControlPlane."""
        self._share(None, "barrier")

    def abort(self, exit_code: int) -> NoReturn:
        """See interface.ControlPlane.  Rank threads raise SystemExit; the other ranks get PeerLost."""
        end = SystemExit(exit_code)
        self._mail.leave(self.rank, end)
        if self.size > 1 or threading.current_thread() is threading.main_thread():
            raise end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)  # the world of one rank, from a thread whose SystemExit nobody would see

    def _share(self, message: Any, doing: str) -> list[Any]:
        channel = self._next(doing)
        for dest in range(self.size):
            self._mail.put(channel, self.rank, dest, message)
        return [self._mail.take(channel, source, self.rank, doing) for source in range(self.size)]

    def _next(self, doing: str) -> tuple[str, str, int]:
        """A channel for each operation, so that one which is fetched late stays out of the others' way."""
        self._rounds += 1
        return ("control", doing, self._rounds)


def run_ranks(
    num_ranks: int,
    body: Callable[[LoopbackWorld], T],
    timeout_s: float = 60,
    hosts: Sequence[int] | None = None,
) -> list[T]:
    """Call `body` with the world of each rank, in a thread each; return the results by rank.

    `hosts`: by rank, the host that it plays to be on; by default each is on one of its own, so that
    every sum travels.

    Raises:
        TimeoutError: some rank is not done after `timeout_s`; its thread is given up.
        BaseException: what the first rank that raised has raised.
    """
    mail = Mail()
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = body(LoopbackWorld(rank, num_ranks, mail, hosts or range(num_ranks)))
        except BaseException as error:  # noqa: BLE001  handed on below, in the caller's thread
            mail.leave(rank, error)
        else:
            mail.leave(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        too_late = TimeoutError(f"ranks {late} of {num_ranks} are not done after {timeout_s} s")
        mail.leave(late[0], too_late)  # wakes those that wait for a message
    error = mail.first_error()
    if error is not None:
        raise error
    return [results[rank] for rank in range(num_ranks)]

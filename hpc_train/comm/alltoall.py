"""A round's messages as one exchange among all, for libraries that have no messages from one to one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpc_train.comm.interface import Work
from hpc_train.comm.routed_sum import Message

# exchange(sent, received, sent_sizes, received_sizes): uint8, the parts for and from all, by rank
Exchange = Callable[[Tensor, Tensor, list[int], list[int]], Work]


class AllToAll:
    """See routed_sum.Transport.

    Each round is an all-to-all of parts of any size; every replica takes part in it, with no bytes if
    need be.
    """

    def __init__(self, size: int, device: torch.device, exchange: Exchange) -> None:
        self._size = size
        self._device = device
        self._exchange = exchange

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Work:
        """See routed_sum.Transport."""
        outgoing, incoming = dict(sends), dict(receives)
        sent_sizes = [outgoing[peer].numel() if peer in outgoing else 0 for peer in range(self._size)]
        received_sizes = [incoming[peer].numel() if peer in incoming else 0 for peer in range(self._size)]
        parts = [outgoing[peer] for peer in sorted(outgoing)]
        sent = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=self._device)
        received = torch.empty(sum(received_sizes), dtype=torch.uint8, device=self._device)
        work = self._exchange(sent, received, sent_sizes, received_sizes)
        return _Exchange(work, received, [incoming[peer] for peer in sorted(incoming)])


class _Exchange:
    """An exchange under way: what came is handed out when it is waited for."""

    def __init__(self, work: Work, received: Tensor, parts: list[Tensor]) -> None:
        self._work = work
        self._received = received
        self._parts = parts

    def wait(self) -> None:
        self._work.wait()
        begin = 0
        for part in self._parts:
            part.copy_(self._received[begin : begin + part.numel()])
            begin += part.numel()

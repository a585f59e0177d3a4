"""What the collectives of all backends have in common: sums by an order, shards, and the way to take."""

import torch
from torch import Tensor

from hpc_train.comm.interface import Losses, Wire
from hpc_train.comm.routed_sum import HostMemory, RoutedSum, Transport, Way
from hpc_train.comm.routes import Cut, Hosts, direct
from hpc_train.comm.wire import BLOCK

_HOST_BYTES = 256 * 2**10  # on one host nothing is sent: what stays in a core's cache is best


class RoutedCollective:
    """The part of interface.Collective that stands on `RoutedSum`; a backend adds the rest.

    Args:
        rank: of this replica.
        hosts: which replicas share memory.
        transport: carries bytes between them.
        memory: what this replica shares with its host.
        device: where buffers lie.
        message_bytes: the length of a message that this transport carries well.
    """

    def __init__(
        self,
        rank: int,
        hosts: Hosts,
        transport: Transport,
        memory: HostMemory,
        device: torch.device,
        message_bytes: int,
    ) -> None:
        self.rank = rank
        self.size = len(hosts.of)
        self.losses = Losses()
        self._hosts = hosts
        self._device = device
        self._routed = RoutedSum(transport, memory, self.losses)
        several = len(hosts.members) > 1
        self._direct = Way(direct(hosts, rank), message_bytes if several else _HOST_BYTES, whole=True)

    def allocate(self, numel: int) -> Tensor:
        """See interface.Collective."""
        return torch.zeros(numel, dtype=torch.float32, device=self._device)

    def shard(self, numel: int) -> slice:
        """See interface.Collective."""
        return Cut(numel, self.size, BLOCK, True, BLOCK).whole_piece(self.rank)

    def sum_(self, buffer: Tensor, wire: Wire, residual: Tensor | None = None) -> None:
        """See interface.Collective."""
        if self.size > 1 and buffer.numel():
            self._routed.sum_(buffer, self._direct, self._wire_of(wire), residual)

    def reduce_scatter_(self, buffer: Tensor, wire: Wire, residual: Tensor | None = None) -> None:
        """See interface.Collective."""
        if self.size > 1 and buffer.numel():
            self._routed.reduce_scatter_(buffer, self._direct, self._wire_of(wire), residual)

    def all_gather_(self, buffer: Tensor) -> None:
        """See interface.Collective."""
        if self.size > 1 and buffer.numel():
            self._routed.all_gather_(buffer, self._direct)

    def prepare(self, numel: int, wire: Wire) -> str:
        """See interface.Collective."""
        return ""

    def _wire_of(self, wire: Wire) -> Wire:
        """Inside one host nothing is rounded: bytes that do not travel need no fewer bits."""
        return wire if len(self._hosts.members) > 1 else Wire.FP32

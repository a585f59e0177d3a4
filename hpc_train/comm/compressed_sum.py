"""The sum with two bytes a value on the network and four in the arithmetic.

    3 replicas, the buffer cut into 3 pieces a b c:

    replica 0   a0 b0 c0      1. exchange: piece a of everybody to replica 0, b to 1, c to 2
    replica 1   a1 b1 c1      2. replica 0 adds a0 + a1 + a2 in fp32, replica 1 the b's, ...
    replica 2   a2 b2 c2      3. all_gather: everybody gets the three sums

Reduce-scatter by direct exchange, then all-gather: 2 (n-1)/n of the words leave each replica, which
is the least that any sum can do, and a contribution is rounded once however many replicas there are.
Whoever owns a piece decodes its own words too, so that all replicas end with the same bits.
"""

from typing import Protocol

import torch
from torch import Tensor

from hpc_train.comm.wire import HEADER_WORDS, decode, encode

SEGMENT = 2**24  # values summed at a time: bounds the scratch memory, and messages to well below 2 GiB


class Transport(Protocol):
    """What a backend gives: two exchanges of bytes (uint8, contiguous) among the replicas; they block."""

    def exchange(self, sent: Tensor, received: Tensor) -> None:
        """Row i of `sent` [replicas, bytes] goes to replica i; row i of `received` came from there."""

    def all_gather(self, mine: Tensor, gathered: Tensor) -> None:
        """`mine` [bytes] of all replicas becomes `gathered` [replicas, bytes]."""


class CompressedSum:
    """Sums fp32 buffers over `size` replicas through 16-bit words.  One sum at a time."""

    def __init__(self, size: int, transport: Transport) -> None:
        self.size = size
        self._transport = transport
        self._values = torch.empty(0)
        self._words = [torch.empty(0, dtype=torch.int16), torch.empty(0, dtype=torch.int16)]

    def sum_(self, buffer: Tensor) -> None:
        """Replace `buffer` (fp32, [values], contiguous) by its sum over the replicas."""
        if self.size > 1:
            for segment in torch.split(buffer, SEGMENT):
                if segment.numel():
                    self._sum_segment(segment)

    def _sum_segment(self, buffer: Tensor) -> None:
        piece = -(-buffer.numel() // self.size)
        values, sent, received = self._scratch(piece, buffer.device)

        padded = values.view(-1)
        padded[: buffer.numel()] = buffer
        padded[buffer.numel() :] = 0.0
        encode(values, sent)
        self._transport.exchange(sent.view(torch.uint8), received.view(torch.uint8))

        decode(received, values)
        mine = sent[0]
        encode(values.sum(dim=0, keepdim=True), mine.unsqueeze(0))
        self._transport.all_gather(mine.view(torch.uint8), received.view(torch.uint8))

        decode(received, values)
        buffer.copy_(padded[: buffer.numel()])

    def _scratch(self, piece: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """fp32 [size, piece] and twice int16 [size, 1 + piece]; kept, as fresh pages cost more than sums."""
        num_values, num_words = self.size * piece, self.size * (HEADER_WORDS + piece)
        if self._values.numel() < num_values or self._values.device != device:
            self._values = torch.empty(num_values, dtype=torch.float32, device=device)
            self._words = [torch.empty(num_words, dtype=torch.int16, device=device) for _ in range(2)]
        sent, received = (words[:num_words].view(self.size, -1) for words in self._words)
        return self._values[:num_values].view(self.size, piece), sent, received

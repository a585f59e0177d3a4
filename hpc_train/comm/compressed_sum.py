"""The sum with two bytes a value on the network and four in the arithmetic.

    3 replicas, the buffer cut into 3 pieces a b c:

    replica 0   a0 b0 c0      1. exchange: piece a of everybody to replica 0, b to 1, c to 2
    replica 1   a1 b1 c1      2. replica 0 adds a0 + a1 + a2 in fp32, replica 1 the b's, ...
    replica 2   a2 b2 c2      3. all_gather: everybody gets the three sums

Reduce-scatter by direct exchange, then all-gather: 2 (n-1)/n of the words leave each replica, which
is the least that any sum can do, and a contribution is rounded once however many replicas there are.
Whoever owns a piece decodes its own words too, so that all replicas end with the same bits.
"""

from collections.abc import Callable
from functools import partial
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
        self._memory: dict[str, Tensor] = {}

    def sum_(self, buffer: Tensor) -> None:
        """Replace `buffer` (fp32, [values], contiguous) by its sum over the replicas."""
        if self.size > 1:
            for segment in torch.split(buffer, SEGMENT):
                if segment.numel():
                    self._sum_segment(segment)

    def _sum_segment(self, buffer: Tensor) -> None:
        values = self._pieces(buffer)
        sent, received = self._word_rows(values)
        encode(values, sent)
        self._transport.exchange(sent.view(torch.uint8), received.view(torch.uint8))

        decode(received, values)
        add_rows(values)
        mine = sent[:1]
        encode(values[:1], mine)
        self._transport.all_gather(mine.view(torch.uint8).view(-1), received.view(torch.uint8))

        decode(received, values)
        if values.data_ptr() != buffer.data_ptr():
            buffer.copy_(values.view(-1)[: buffer.numel()])

    def _pieces(self, buffer: Tensor) -> Tensor:
        """fp32 [size, piece] with the buffer's values: the buffer itself, or a copy with zeros at the end."""
        piece, left = divmod(buffer.numel(), self.size)
        if left == 0:
            return buffer.view(self.size, piece)
        padded = self._keep("values", self.size * (piece + 1), buffer.new_empty)
        padded[: buffer.numel()] = buffer
        padded[buffer.numel() :] = 0.0
        return padded.view(self.size, piece + 1)

    def _word_rows(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Twice int16 [size, 1 + piece]."""
        rows, piece = values.shape
        empty = partial(values.new_empty, dtype=torch.int16)
        sent, received = (
            self._keep(name, rows * (HEADER_WORDS + piece), empty) for name in ("sent", "received")
        )
        return sent.view(rows, -1), received.view(rows, -1)

    def _keep(self, name: str, numel: int, empty: Callable[[int], Tensor]) -> Tensor:
        """Scratch memory, kept from sum to sum: the system's fresh pages cost more than the arithmetic."""
        memory = self._memory.get(name)
        if memory is None or memory.numel() < numel:
            memory = self._memory[name] = empty(numel)
        return memory[:numel]


def add_rows(values: Tensor) -> None:
    """Leave the sum of the rows of [rows, values] in its first row, by halves, without memory of its own."""
    rows = values.shape[0]
    while rows > 1:
        half = rows // 2
        values[:half] += values[rows - half : rows]
        rows -= half

"""Sums a buffer over replicas: inside each host through its memory, between hosts by an order's messages.

    segment 0   add up | round 1 |  add  | round 2 | hand out            on one host nothing is sent:
    segment 1            add up  | round 1 |  add  | round 2 | ...       add up | hand out
    segment 2                      add up  | round 1 |  add  | ...

A segment is a few blocks of every piece.  While the messages of some segments are under way, others are
added up: several are in flight, so that neither network nor cores stand still.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hpc_train.comm.interface import Losses, Wire, Work
from hpc_train.comm.routes import Cut, Order
from hpc_train.comm.wire import BLOCK, decode, encode, encoded_bytes, values_within

_TINY_BYTES = 8 * 2**10  # shorter messages cost by their number

Message = tuple[int, Tensor]  # a peer, and the bytes (uint8) to or from it


class Transport(Protocol):
    """How bytes get to other replicas."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Work:
        """Start all of a round's messages; all replicas start the same rounds in the same order.

        The Work is complete when all of them are.  Rounds may be started before earlier ones are
        complete, as many as `RoutedSum` has segments in flight.
        """


class HostMemory(Protocol):
    """What the ranks of one host share."""

    def rows(self, buffer: Tensor) -> list[Tensor] | None:
        """The host's buffers, this rank's first: the same place in the memory of all of its ranks.

        None when `buffer` does not lie where the others, or the network, can reach it.
        """

    def scratch(self, numel: int) -> Tensor:
        """Memory that they can reach, fp32 [numel], kept for the next time; all ask for it together."""

    def barrier(self) -> None:
        """Return when all ranks of this host have called it."""


@dataclass(frozen=True)
class Way:
    """How to sum.

    Attributes:
        order: who sends what to whom.
        message_bytes: the longest messages.
        whole: whether pieces lie whole, as shards do.
        in_flight: how many segments at most.
        segments: how many at least, if messages do not become tiny by it.
    """

    order: Order
    message_bytes: int
    whole: bool
    in_flight: int = 8
    segments: int = 1

    def cut(self, numel: int, wire: Wire) -> Cut:
        """The pieces of a buffer, and its segments, which are about equally long."""
        piece = -(-numel // self.order.pieces)
        wanted = min(self.segments, piece // values_within(wire, _TINY_BYTES))
        longest = values_within(wire, self.message_bytes // self.order.widest)
        segments = max(wanted, -(-piece // longest))
        width = -(-piece // (segments * BLOCK)) * BLOCK
        return Cut(numel, self.order.pieces, width, self.whole, BLOCK)


class RoutedSum:
    """One sum at a time, over these rows of memory and this transport."""

    def __init__(self, transport: Transport, memory: HostMemory, losses: Losses) -> None:
        self._transport = transport
        self._host = memory
        self._losses = losses
        self._kept: dict[tuple[int, int, bool], Tensor] = {}

    def sum_(self, buffer: Tensor, way: Way, wire: Wire, residual: Tensor | None = None) -> None:
        """See interface.Collective."""
        self._walk(buffer, way, wire, residual, reduce=True, spread=True)

    def reduce_scatter_(self, buffer: Tensor, way: Way, wire: Wire, residual: Tensor | None = None) -> None:
        """See interface.Collective.  The way's pieces must be whole."""
        self._walk(buffer, way, wire, residual, reduce=True, spread=False)

    def all_gather_(self, buffer: Tensor, way: Way) -> None:
        """See interface.Collective.  The way's pieces must be whole."""
        self._walk(buffer, way, Wire.FP32, None, reduce=False, spread=True)

    def _walk(
        self, buffer: Tensor, way: Way, wire: Wire, residual: Tensor | None, reduce: bool, spread: bool
    ) -> None:
        """Bring all segments through all rounds, the one that began first always first."""
        rows = self._host.rows(buffer)
        if rows is None:
            there = self._host.scratch(buffer.numel())
            there.copy_(buffer)
            # The residual meets the values in one sum, so it must be where they are: in the host's memory.
            kept = residual.to(there.device) if residual is not None and wire.lossy else None
            self._walk(there, way, wire, kept, reduce, spread)
            buffer.copy_(there)
            if residual is not None and kept is not None and kept is not residual:
                residual.copy_(kept)
            return
        cut = way.cut(buffer.numel(), wire)
        walk = _Walk(self, rows, way.order, cut, wire, residual, reduce, spread)
        self._host.barrier()  # all of the host's buffers are filled
        in_flight: deque[tuple[Iterator[Work], Work]] = deque()
        for segment in range(cut.segments):
            if len(in_flight) == way.in_flight:
                self._advance(in_flight, until=way.in_flight - 1)
            steps = walk.segment(segment, slot=segment % way.in_flight)
            work = next(steps, None)
            if work is not None:
                in_flight.append((steps, work))
        self._advance(in_flight, until=0)
        self._host.barrier()  # all of the host's buffers have the sum

    @staticmethod
    def _advance(in_flight: "deque[tuple[Iterator[Work], Work]]", until: int) -> None:
        """Go on with the oldest segments until no more than `until` are under way."""
        while len(in_flight) > until:
            steps, work = in_flight.popleft()
            work.wait()
            following = next(steps, None)
            if following is not None:
                in_flight.append((steps, following))

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Work:
        """Start a round."""
        return self._transport.start(sends, receives, tag)

    def encode(self, values: Tensor, words: Tensor, wire: Wire) -> None:
        """Encode, and count what is lost."""
        encode(values, words, wire, self._losses)

    def scratch(self, slot: int, number: int, incoming: bool, num_bytes: int, like: Tensor) -> Tensor:
        """Memory kept from sum to sum: the system's fresh pages cost more than the arithmetic."""
        key = (slot, number, incoming)
        memory = self._kept.get(key)
        if memory is None or memory.numel() < num_bytes:
            memory = self._kept[key] = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
        return memory[:num_bytes]


class _Walk:
    """One buffer's way through an order.  `rows[0]` is this rank's; the others are its host's."""

    def __init__(
        self,
        owner: RoutedSum,
        rows: Sequence[Tensor],
        order: Order,
        cut: Cut,
        wire: Wire,
        residual: Tensor | None,
        reduce: bool,
        spread: bool,
    ) -> None:
        self._owner = owner
        self._mine, *self._others = rows
        self._order = order
        self._cut = cut
        self._wire = wire
        self._residual = residual if wire.lossy else None
        self._reduce = order.reduce if reduce else ()
        self._adds_up = reduce
        self._spread = order.spread if spread else ()
        self._hands_out = spread

    def segment(self, number: int, slot: int) -> Iterator[Work]:
        """Bring one segment through; yields what must be waited for before it can go on."""
        cut = self._cut
        handled = [cut.span(number, piece, piece + 1) for piece in self._order.handled]
        if self._adds_up:
            for span in handled:
                self._add_up(span)
        for tag, each in enumerate(self._reduce):
            sends = [(t.peer, cut.span(number, t.first, t.last)) for t in each.sends]
            receives = [(t.peer, cut.span(number, t.first, t.last)) for t in each.receives]
            incoming = [self._scratch(slot, i, True, span) for i, (_, span) in enumerate(receives)]
            yield self._start(
                [(peer, self._outgoing(slot, i, span)) for i, (peer, span) in enumerate(sends) if _any(span)],
                [(peer, words) for (peer, _), words in zip(receives, incoming, strict=True) if words.numel()],
                tag,
            )
            for (_, span), words in zip(receives, incoming, strict=True):
                self._add(span, words)
        if self._spread:
            yield from self._spread_total(number, slot)
        if self._hands_out:
            for span in handled:
                for other in self._others:
                    other[span] = self._mine[span]

    def _spread_total(self, number: int, slot: int) -> Iterator[Work]:
        cut = self._cut
        for tag, each in enumerate(self._spread, start=len(self._order.reduce)):
            outgoing: dict[tuple[int, int], Tensor] = {}
            sends = []
            for t in each.sends:
                span = cut.span(number, t.first, t.last)
                if _any(span):
                    if (t.first, t.last) not in outgoing:  # the same words go to several peers
                        words = self._outgoing(slot, len(outgoing), span, final=True)
                        outgoing[t.first, t.last] = words
                    sends.append((t.peer, outgoing[t.first, t.last]))
            receives = [(t.peer, cut.span(number, t.first, t.last)) for t in each.receives]
            incoming = [
                self._bytes(span) if not self._wire.lossy else self._scratch(slot, i, True, span)
                for i, (_, span) in enumerate(receives)
            ]
            yield self._start(
                sends,
                [(peer, words) for (peer, _), words in zip(receives, incoming, strict=True) if words.numel()],
                tag,
            )
            if self._wire.lossy:
                for (_, span), words in zip(receives, incoming, strict=True):
                    if words.numel():
                        decode(words, self._mine[span], self._wire)

    def _add_up(self, span: slice) -> None:
        """The host's sum of a span, in this rank's row; with what was rounded off before."""
        values = self._mine[span]
        for other in self._others:
            values += other[span]
        if self._residual is not None:
            values += self._residual[span]
            self._residual[span] = 0.0

    def _outgoing(self, slot: int, number: int, span: slice, final: bool = False) -> Tensor:
        """A span as bytes.  The final words are what all get, this rank too."""
        if not self._wire.lossy:
            return self._bytes(span)
        values = self._mine[span]
        words = self._scratch(slot, number, False, span)
        self._owner.encode(values, words, self._wire)
        if self._residual is not None or final:
            rounded = torch.empty_like(values)
            decode(words, rounded, self._wire)
            if self._residual is not None:
                self._residual[span] += values - rounded
            if final:
                values.copy_(rounded)
        return words

    def _add(self, span: slice, words: Tensor) -> None:
        if words.numel():
            values = self._mine[span]
            if self._wire.lossy:
                arrived = torch.empty_like(values)
                decode(words, arrived, self._wire)
            else:
                arrived = words.view(torch.float32)
            values += arrived

    def _start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Work:
        return self._owner.start(sends, receives, tag)

    def _scratch(self, slot: int, number: int, incoming: bool, span: slice) -> Tensor:
        num_bytes = encoded_bytes(self._wire, span.stop - span.start)
        return self._owner.scratch(slot, number, incoming, num_bytes, self._mine)

    def _bytes(self, span: slice) -> Tensor:
        return self._mine[span].view(torch.uint8)


def _any(span: slice) -> bool:
    return bool(span.stop > span.start)

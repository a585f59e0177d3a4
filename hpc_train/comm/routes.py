"""Who sends which part of a sum to whom, as data.  PURE: neither torch nor MPI.

A buffer is cut into pieces.  On each host one rank *handles* a piece: it adds up what the host's ranks
hold of it, sends that sum to where the total is made, and gets the total back for all of the host.

    direct, 2 hosts: a has the ranks 0 and 1, b has 2.  Piece i is added up by rank i.

             handles    round 1 (adds)               round 2 (replaces)
    rank 0   0 2        sends 2 to rank 2, adds 0    sends 0 to rank 2, takes 2
    rank 1   1          adds 1                       sends 1 to rank 2
    rank 2   2 0 1      sends 0 and 1, adds 2        sends 2 to rank 0, takes 0 and 1

However many ranks a host has, each byte of a piece leaves it once: 2 (hosts - 1) / hosts of the buffer
in all where hosts have equally many ranks, which is the least that any sum can do.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Transfer:
    """The pieces `first` to `last - 1`, to or from `peer`, in one message."""

    peer: int
    first: int
    last: int


@dataclass(frozen=True)
class Round:
    """Messages that are under way together."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class Order:
    """What one rank does.

    `reduce`: rounds whose receives are added.  `spread`: rounds whose receives replace.
    `pieces`: how many the buffer is cut into.  `handled`: those that this rank handles on its host.
    `total`: first and last + 1 of the pieces whose total this rank has after `reduce`.
    `widest`: the most pieces in one message of any rank.
    """

    pieces: int
    handled: tuple[int, ...]
    total: tuple[int, int]
    reduce: tuple[Round, ...] = ()
    spread: tuple[Round, ...] = ()
    widest: int = 1


@dataclass(frozen=True)
class Hosts:
    """Which ranks share a host: `of[rank]` is any mark that ranks of one host have in common."""

    of: tuple[int, ...]
    members: dict[int, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        members: dict[int, tuple[int, ...]] = {}
        for rank, host in enumerate(self.of):
            members[host] = (*members.get(host, ()), rank)
        object.__setattr__(self, "members", members)

    @property
    def even(self) -> bool:
        """Whether all hosts have equally many ranks."""
        return len({len(ranks) for ranks in self.members.values()}) == 1

    @property
    def alone(self) -> bool:
        """Whether each rank is the only one of its host."""
        return len(self.members) == len(self.of)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """All ranks of this rank's host."""
        return self.members[self.of[rank]]


def direct(hosts: Hosts, rank: int) -> Order:
    """Two rounds: every host to every piece's owner, and back.  The latency of two messages.

    Rank i has the total of piece i, of as many pieces as there are ranks.
    """
    size = len(hosts.of)
    here = hosts.of[rank]
    handlers = {host: _handlers(hosts, host) for host in hosts.members}
    handled = tuple(piece for piece in range(size) if handlers[here][piece] == rank)
    relayed = tuple(Transfer(piece, piece, piece + 1) for piece in handled if hosts.of[piece] != here)
    others = tuple(Transfer(handlers[host][rank], rank, rank + 1) for host in hosts.members if host != here)
    alone = not relayed and not others
    return Order(
        size,
        handled,
        (rank, rank + 1),
        () if alone else (Round(sends=relayed, receives=others),),
        () if alone else (Round(sends=others, receives=relayed),),
    )


def halving(hosts: Hosts, rank: int) -> Order:
    """Recursive halving, then doubling (Rabenseifner, ICCS 2004): 2 log2(hosts) rounds.

    For even hosts.  The ranks with the same place on their hosts make up a lane, which sums its part of the
    buffer.  Hosts beyond a power of two hand theirs in first, and get the total last.

    Raises:
        ValueError: hosts have different numbers of ranks.
    """
    if not hosts.even:
        raise ValueError(f"hosts have different numbers of ranks: {hosts.members}")
    lane = hosts.neighbours(rank).index(rank)
    ranks = [members[lane] for members in hosts.members.values()]  # of this lane, by host
    me = ranks.index(rank)
    core = 1 << (len(ranks).bit_length() - 1)  # the largest power of two that is not above the hosts
    extra = len(ranks) - core
    low, high = begin, end = lane * core, (lane + 1) * core

    def pair(peer: int, sent: tuple[int, int] | None, received: tuple[int, int] | None) -> Round:
        return Round(
            (Transfer(ranks[peer], *sent),) if sent else (),
            (Transfer(ranks[peer], *received),) if received else (),
        )

    reduce, spread = [Round()], [Round()]
    if me >= core:
        reduce[0] = pair(me - core, (begin, end), None)
        spread[0] = pair(me - core, None, (begin, end))
    elif me < extra:
        reduce[0] = pair(me + core, None, (begin, end))
        spread[0] = pair(me + core, (begin, end), None)
    distance = core // 2
    while distance:
        if me >= core:
            reduce.append(Round())
            spread.insert(0, Round())
        else:
            middle = (low + high) // 2
            lower, upper = (low, middle), (middle, high)
            kept, given = (upper, lower) if me & distance else (lower, upper)
            reduce.append(pair(me ^ distance, given, kept))
            spread.insert(0, pair(me ^ distance, kept, given))
            low, high = kept
        distance //= 2
    total = (low, high) if me < core else (begin, begin)
    lanes = len(hosts.neighbours(rank))
    widest = core if extra else max(core // 2, 1)
    return Order(lanes * core, tuple(range(begin, end)), total, tuple(reduce), tuple(spread), widest)


def _handlers(hosts: Hosts, host: int) -> dict[int, int]:
    """For each piece the rank of `host` that handles it: its owner, or else each in turn."""
    members = hosts.members[host]
    foreign = [piece for piece, place in enumerate(hosts.of) if place != host]
    return {piece: piece for piece in members} | {
        piece: members[i % len(members)] for i, piece in enumerate(foreign)
    }


@dataclass(frozen=True)
class Cut:
    """Where the pieces of a buffer lie, and the segments in which they are summed one after the other.

        whole=True     |piece 0          |piece 1          |     a segment: `width` values of each piece
                       |s0  |s1  |s2 |   |s0  |s1  |s2 |   |
        whole=False    |p0|p1|p0|p1|p0|p1|                       a segment: all pieces, `width` values each
                       |s0   |s1   |s2   |

    A piece that is not whole lies scattered, but neighbouring pieces of one segment lie side by side.
    `block`: where pieces and segments may begin; `width` is a multiple of it.
    """

    numel: int
    pieces: int
    width: int
    whole: bool
    block: int

    @property
    def piece(self) -> int:
        """The length of a whole piece; the last ones may be shorter, or empty."""
        return -(-self.numel // (self.pieces * self.block)) * self.block

    @property
    def segments(self) -> int:
        """How many segments there are."""
        step = self.width if self.whole else self.width * self.pieces
        return -(-(self.piece if self.whole else self.numel) // step)

    def span(self, segment: int, first: int, last: int) -> slice:
        """Where the pieces `first` to `last - 1` of a segment lie.  Whole ones are asked for one by one."""
        if self.whole:
            assert last - first <= 1
            begin = first * self.piece + segment * self.width
            end = min(begin + self.width, last * self.piece)
        else:
            begin = (segment * self.pieces + first) * self.width
            end = (segment * self.pieces + last) * self.width
        return slice(min(begin, self.numel), max(min(begin, self.numel), min(end, self.numel)))

    def whole_piece(self, piece: int) -> slice:
        """Where a whole piece lies."""
        begin = min(piece * self.piece, self.numel)
        return slice(begin, min(begin + self.piece, self.numel))

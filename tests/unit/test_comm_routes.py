"""Orders of messages: walked with plain numbers, and counted."""

import pytest

from hpc_train.comm.routes import Cut, Hosts, direct, halving

SHAPES = ["0", "00", "01", "001", "0011", "0101", "0001", "0123", "01234", "0120121", "001122334455"]
EVEN = [shape for shape in SHAPES if Hosts(tuple(map(int, shape))).even] + ["0123456", "00112233445566"]


def orders_of(make, shape):
    hosts = Hosts(tuple(map(int, shape)))
    return hosts, [make(hosts, rank) for rank in range(len(hosts.of))]


def walk(hosts, orders):
    """Sum 10^rank over ranks by the orders; returns each rank's pieces, and messages between hosts."""
    size = len(orders)
    held = [[float(10**rank)] * orders[0].pieces for rank in range(size)]
    sent = []
    for rank, order in enumerate(orders):  # each host adds up what its ranks have
        for piece in order.handled:
            held[rank][piece] = sum(10.0**r for r in hosts.neighbours(rank))
    for phase in ("reduce", "spread"):
        assert len({len(getattr(order, phase)) for order in orders}) == 1
        for number in range(len(getattr(orders[0], phase))):
            mail = {}
            for rank, order in enumerate(orders):
                for t in getattr(order, phase)[number].sends:
                    assert t.first < t.last
                    mail[rank, t.peer, t.first, t.last] = held[rank][t.first : t.last]
                    sent.append((hosts.of[rank], hosts.of[t.peer], t.last - t.first))
            for rank, order in enumerate(orders):
                for t in getattr(order, phase)[number].receives:
                    came = mail.pop((t.peer, rank, t.first, t.last))
                    for i, value in zip(range(t.first, t.last), came, strict=True):
                        held[rank][i] = held[rank][i] + value if phase == "reduce" else value
            assert not mail, "sent, and nobody takes it"
        if phase == "reduce":
            whole = sum(10.0**rank for rank in range(size))
            owned = sorted(piece for order in orders for piece in range(*order.total))
            assert owned == list(range(orders[0].pieces))
            for rank, order in enumerate(orders):
                assert all(held[rank][piece] == whole for piece in range(*order.total))
    return held, sent


def check_every_rank_gets_the_sum(hosts, orders):
    held, sent = walk(hosts, orders)
    whole = sum(10.0**rank for rank in range(len(orders)))
    for rank, order in enumerate(orders):
        assert all(held[rank][piece] == whole for piece in order.handled)
    for members in hosts.members.values():  # each piece is handled once on each host
        handled = sorted(piece for rank in members for piece in orders[rank].handled)
        assert handled == list(range(orders[0].pieces))
    return sent


@pytest.mark.parametrize("shape", SHAPES)
def test_direct_sums(shape):
    hosts, orders = orders_of(direct, shape)
    sent = check_every_rank_gets_the_sum(hosts, orders)
    assert all(here != there for here, there, _ in sent), "inside a host nothing is sent"
    assert [order.total for order in orders] == [(rank, rank + 1) for rank in range(len(orders))]


@pytest.mark.parametrize("shape", EVEN)
def test_halving_sums(shape):
    check_every_rank_gets_the_sum(*orders_of(halving, shape))


@pytest.mark.parametrize("shape", ["01", "0011", "0101", "0123", "00112233", "000111222333"])
def test_direct_sends_each_byte_once_whatever_the_ranks_of_a_host(shape):
    hosts, orders = orders_of(direct, shape)
    _, sent = walk(hosts, orders)
    n = len(hosts.members)
    for host in hosts.members:
        left = sum(pieces for here, _, pieces in sent if here == host) / orders[0].pieces
        assert left == pytest.approx(2 * (n - 1) / n)


def test_uneven_hosts_send_each_byte_once_too():
    hosts, orders = orders_of(direct, "0001")
    _, sent = walk(hosts, orders)
    for host in hosts.members:
        assert sum(pieces for here, _, pieces in sent if here == host) == orders[0].pieces


@pytest.mark.parametrize("shape", ["0011", "0101", "00001111", "0123", "0001"])
def test_the_ranks_of_a_host_share_its_work(shape):
    hosts, orders = orders_of(direct, shape)
    for members in hosts.members.values():
        loads = [len(orders[rank].handled) for rank in members]
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("shape", ["0123", "0123456", "0011223344556677"])
def test_halving_needs_few_messages(shape):
    hosts, orders = orders_of(halving, shape)
    n = len(hosts.members)
    for order in orders:
        assert sum(len(r.sends) for r in order.reduce + order.spread) <= 2 * (n - 1).bit_length()


def test_thousands_of_ranks_are_planned_at_once():
    hosts = Hosts(tuple(rank // 8 for rank in range(4096)))
    order = direct(hosts, 1234)
    assert len(order.reduce[0].receives) == 511
    assert len(order.handled) == 512
    lane = halving(hosts, 1234)
    assert len(lane.reduce) == 10


def test_halving_refuses_uneven_hosts():
    with pytest.raises(ValueError, match="different numbers of ranks"):
        halving(Hosts((0, 0, 1)), 0)


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 100, 1000, 1001])
@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
@pytest.mark.parametrize("whole", [True, False])
def test_segments_cover_a_buffer_once(numel, pieces, whole):
    cut = Cut(numel, pieces, width=32, whole=whole, block=16)
    seen = [0] * numel
    for segment in range(cut.segments):
        for piece in range(pieces):
            for i in range(*cut.span(segment, piece, piece + 1).indices(numel)):
                seen[i] += 1
    assert seen == [1] * numel


def test_pieces_side_by_side_are_one_span():
    cut = Cut(200, 4, width=16, whole=False, block=16)
    assert cut.span(1, 1, 3) == slice(80, 112)
    assert cut.span(3, 0, 4) == slice(192, 200)
    assert [cut.span(3, i, i + 1) for i in range(4)][1:] == [slice(200, 200)] * 3

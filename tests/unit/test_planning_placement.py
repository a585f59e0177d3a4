"""Clusters, and what of a grid shares hosts."""

import math

import pytest

from hpc_train.errors import UserError
from hpc_train.grid import Grid
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.placement import Placement, Summing, Way

FOUR_HOSTS = Cluster(8, 2, bandwidth_host=1000.0, bandwidth=100.0, latency_host_s=1.0, latency_s=7.0)
PAIRS = [(0, 1), (1, 2), (2, 3)]


def test_a_cluster_as_options_describe_it():
    cluster = Cluster.read(64, 8, "80GB", "300GB/s", "25GB/s", "2us")
    assert cluster == Cluster(64, 8, 80e9, 300e9, 25e9, 0.0, 2e-6)
    assert (cluster.hosts, cluster.speed_of(1)) == (8, 1.0)
    alone = Cluster.read(4)
    assert (alone.hosts, alone.memory_bytes, alone.bandwidth) == (1, math.inf, math.inf)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "a cluster with ranks 0: give a number above 0"),
        ((4, 2, 1e9, 0.0), "a cluster with bandwidth_host 0.0"),
        ((4, 2, 1e9, 1.0, 1.0, 0.0, -1.0), "a cluster with latency_s -1.0: give 0 or more"),
        ((4, 2, 1e9, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, (1.0,)), r"1 speed \[1.0\] for 2 hosts of 2 ranks"),
    ],
)
def test_no_cluster(arguments, message):
    with pytest.raises(UserError, match=message):
        Cluster(*arguments)


def test_stages_on_neighbouring_ranks():
    """Replica 0 on hosts a a b b, replica 1 on c c d d: one message leaves a host, all its sums do."""
    placement = Placement(Grid(2, 4, "stage"), FOUR_HOSTS, PAIRS)
    assert placement.way(0, 1) == Way(1.0, 1000.0)
    assert placement.way(1, 2) == Way(7.0, 100.0)
    assert [placement.summing(stage) for stage in range(4)] == [Summing(2, 2, 1, 2)] * 4
    assert placement.host_bytes([10, 20, 30, 40], [(0, 1, 5), (1, 2, 7), (2, 3, 9)]) == 70 + 7


def test_replicas_on_neighbouring_ranks():
    """Host a has stage 0 of both replicas, and so on: two messages leave a host at a time, and no sum."""
    placement = Placement(Grid(2, 4, "replica"), FOUR_HOSTS, PAIRS)
    assert [placement.way(*pair) for pair in PAIRS] == [Way(7.0, 100.0, senders=2)] * 3
    # 2 messages of 30 bytes: 0.6 s on the line; the one comes after 0.3 s, the other after 0.6 s
    assert placement.way(0, 1).line_s(30) == pytest.approx(0.6)
    assert placement.way(0, 1).lag_s(30) == pytest.approx(7.0 - 0.15)
    assert placement.summing(2) == Summing(2, 1, 2, 1)
    # the hosts between send activations of two replicas one way, and gradients the other
    assert placement.host_bytes([10, 20, 30, 40], [(0, 1, 5), (1, 2, 7), (2, 3, 9)]) == 2 * (7 + 9)


def test_the_first_bytes_of_a_message_may_leave_in_a_burst():
    """Of 50 bytes 20 go at once; the line is busy as long as ever."""
    way = Placement(Grid(1, 4), Cluster(4, 1, bandwidth=10.0, latency_s=1.0, burst_bytes=20.0), PAIRS).way(
        0, 1
    )
    assert (way.line_s(50), way.line_s(50) + way.lag_s(50)) == (5.0, 1.0 + 3.0)
    assert way.line_s(10) + way.lag_s(10) == 1.0


def test_a_stage_is_as_fast_as_its_slowest_replica():
    cluster = Cluster(8, 2, speeds=(1.0, 0.5, 2.0, 3.0))
    assert Placement(Grid(2, 4, "stage"), cluster).speeds == [1.0, 1.0, 0.5, 0.5]
    assert Placement(Grid(2, 4, "replica"), cluster).speeds == [1.0, 0.5, 2.0, 3.0]


def test_the_last_host_may_have_fewer_ranks():
    placement = Placement(Grid(3, 2, "replica"), Cluster(6, 4), [(0, 1)])
    assert placement.hosts.tolist() == [[0, 0], [0, 1], [0, 1]]
    assert placement.summing(1) == Summing(3, 2, 2, 1)


def test_ranks_that_are_dealt_to_hosts_in_turn_stand_where_they_are():
    """Neighbours are on different hosts: with stages side by side, activations cross and gradients do not."""
    blocks, dealt = Cluster(4, 2), Cluster(4, 2, host_of=(0, 1, 0, 1))
    assert Placement(Grid(2, 2), blocks).hosts.tolist() == [[0, 0], [1, 1]]
    placement = Placement(Grid(2, 2), dealt)
    assert placement.hosts.tolist() == [[0, 1], [0, 1]]
    assert [placement.summing(stage).hosts for stage in (0, 1)] == [1, 1]


def test_a_host_with_one_rank_among_fuller_ones():
    cluster = Cluster(5, 3, host_of=(0, 1, 1, 1, 2), speeds=(0.5, 1.0, 2.0))
    assert cluster.hosts == 3
    placement = Placement(Grid(1, 5), cluster)
    assert placement.speeds == [0.5, 1.0, 1.0, 1.0, 2.0]
    assert placement.summing(0).replicas == 1
    assert placement.host_bytes([0.0] * 5, [(0, 1, 7.0), (1, 2, 7.0)]) == 7.0

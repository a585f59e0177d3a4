"""What is measured of a job's hosts, on ranks that are threads and play to be on one host or several."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch

from hpc_train.comm.interface import Wire
from hpc_train.comm.loopback import run_ranks
from hpc_train.grid import Grid
from hpc_train.training import network

CPU = torch.device("cpu")


def measured(hosts, speeds=None):
    """The cluster, which is the same on all ranks; `speeds` by rank."""
    speeds = speeds or [1.0] * len(hosts)
    clusters = run_ranks(
        len(hosts), lambda world: network.measure_cluster(world, CPU, speeds[world.rank]), hosts=hosts
    )
    assert all(cluster == clusters[0] for cluster in clusters)
    assert clusters[0].ranks == len(hosts)
    return clusters[0]


@pytest.fixture
def lines(monkeypatch):
    """Lines of known latency and bandwidth in place of measured ones; returns who exchanged."""
    exchanges = set()

    def ring(link, group, rank, num_bytes):
        inside = 1 in group or 3 in group  # in the tests below the leaders of hosts have even numbers
        exchanges.add((num_bytes, *group))
        latency_s, bandwidth = (1e-6, 8e9) if inside else (2e-5, 1e9)
        return latency_s + (num_bytes / bandwidth if num_bytes > 1000 else 0.0)

    monkeypatch.setattr(network, "_ring", ring)
    return exchanges


def test_several_ranks_of_one_host_have_no_line_between_hosts():
    cluster = measured([0, 0, 0])
    assert cluster.ranks_per_host == 3
    assert 0 < cluster.bandwidth_host < math.inf
    assert 0 < cluster.latency_host_s < 60
    assert (cluster.bandwidth, cluster.latency_s) == (math.inf, 0.0)
    assert cluster.speeds == ()


def test_hosts_with_a_rank_each_have_no_line_inside():
    cluster = measured([0, 1, 2])
    assert (cluster.ranks_per_host, cluster.hosts) == (1, 3)
    assert 0 < cluster.bandwidth < math.inf
    assert 0 < cluster.latency_s < 60
    assert (cluster.bandwidth_host, cluster.latency_host_s) == (math.inf, 0.0)


def test_a_single_rank_has_no_line_at_all():
    cluster = measured([0])
    assert cluster.ranks_per_host == 1
    assert (cluster.bandwidth, cluster.bandwidth_host) == (math.inf, math.inf)
    assert (cluster.latency_s, cluster.latency_host_s) == (0.0, 0.0)


def test_small_messages_tell_the_latency_and_large_ones_the_bandwidth(lines):
    cluster = measured([0, 0, 1, 1])
    assert (cluster.latency_host_s, cluster.latency_s) == (1e-6, 2e-5)
    assert cluster.bandwidth_host == pytest.approx(8e9)
    assert cluster.bandwidth == pytest.approx(1e9)


def test_the_first_two_ranks_of_each_host_exchange_and_the_first_of_all_hosts(lines):
    cluster = measured([0, 0, 1, 1, 1, 1])
    assert {exchange[1:] for exchange in lines} == {(0, 1), (2, 3), (0, 2)}
    assert {exchange[0] for exchange in lines} == {8, 2**22}
    assert cluster.ranks_per_host == 4  # of the fullest


def test_ranks_dealt_to_hosts_in_turn_are_found_where_they_are(lines):
    assert measured([0, 1, 0, 1]).ranks_per_host == 2
    assert {exchange[1:] for exchange in lines} == {(0, 2), (1, 3), (0, 1)}


def test_a_rank_that_waits_for_long_tells_the_overhead_and_a_burst(monkeypatch, lines):
    """A message is there 50 us later than the latency says, the same at both ends; 2^17 bytes go at once."""

    def answer(link, group, rank, num_bytes):
        if rank == group[1]:
            return None  # only one of two has measured
        latency_s, bandwidth = (1e-6, 8e9) if 1 in group or 3 in group else (2e-5, 1e9)
        return latency_s + 5e-5 + max(0, num_bytes - 2**17) / bandwidth

    monkeypatch.setattr(network, "_answer", answer)
    cluster = measured([0, 0, 1, 1])
    assert cluster.overhead_s == pytest.approx(2.5e-5)
    assert cluster.burst_bytes == pytest.approx(2**17)


def test_pauses_between_messages_do_not_count():
    cluster = measured([0, 0, 1])
    assert 0 <= cluster.overhead_s < network._PAUSE_S
    assert 0 <= cluster.burst_bytes <= network._MEDIUM_BYTES


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_beside_computing_cost_what_it_takes_longer(size):
    """The ranks lose 20 %, 30 % and 40 %: the slowest counts."""

    def body(world):
        calls = []

        def work_s():
            calls.append(threading.active_count())
            return [1.0, 1.0 / (0.8 - world.rank / 10)][len(calls) - 1]

        collective = world.collective(Grid(world.size, 1), CPU)
        return network.measure_overlap_cost(collective, Wire.FP32, 1000, work_s), len(calls)

    expected = [(0.0, 0)] if size == 1 else [(pytest.approx(0.1 + size / 10), 2)] * size
    assert run_ranks(size, body) == expected


def test_work_that_fails_beside_sums_ends_them(monkeypatch):
    def body(world):
        seconds = iter([1.0])
        collective = world.collective(Grid(world.size, 1), CPU)
        with pytest.raises(StopIteration):
            network.measure_overlap_cost(collective, Wire.FP32, 1000, lambda: next(seconds))
        return True

    assert run_ranks(2, body) == [True, True]


def test_a_large_message_that_seems_faster_than_a_small_one_still_gives_a_bandwidth(monkeypatch):
    monkeypatch.setattr(network, "_ring", lambda link, group, rank, size: 1e-3 if size == 8 else 5e-4)
    cluster = measured([0, 0])
    assert 0 < cluster.bandwidth_host < math.inf


def test_a_host_is_as_fast_as_the_median_of_its_ranks():
    cluster = measured([0, 0, 0, 1, 1, 1], speeds=[1.0, 0.9, 5.0, 0.5, 0.4, 0.6])
    assert cluster.speeds == (1.0, 0.5)


def test_speeds_are_left_out_for_one_host_and_known_for_hosts_of_different_sizes():
    assert measured([0, 0, 0], speeds=[1.0, 2.0, 3.0]).speeds == ()
    assert measured([0, 0, 1], speeds=[1.0, 1.0, 0.5]).speeds == (1.0, 0.5)


@pytest.mark.parametrize(
    ("hosts", "host_of"),
    [
        ([0, 0, 1, 1], ()),  # as hosts are filled
        ([0, 0, 0, 1], ()),  # the last one has fewer
        ([0, 1, 1, 1], (0, 1, 1, 1)),
        ([7, 3, 7, 3], (0, 1, 0, 1)),  # in turn; hosts are numbered as they come
        ([0, 0, 0, 1, 2, 2], (0, 0, 0, 1, 2, 2)),
    ],
)
def test_where_ranks_stand_is_known(hosts, host_of):
    cluster = measured(hosts)
    assert cluster.host_of == host_of
    assert cluster.hosts == len(set(hosts))


def test_ranks_of_a_host_share_its_memory_and_the_one_with_least_counts(monkeypatch):
    available = {"rank 0": 8e9, "rank 1": 8e9, "rank 2": 6e9}
    monkeypatch.setattr(
        network.psutil,
        "virtual_memory",
        lambda: SimpleNamespace(available=available[threading.current_thread().name]),
    )
    assert measured([0, 0, 1]).memory_bytes == 4e9
    assert measured([0, 1, 2]).memory_bytes == 6e9


@pytest.mark.parametrize(
    ("gpus", "memory_bytes"),
    [
        ("abcd", 6e9),  # a GPU each, however ranks number them
        ("aabc", 4e9),
        ("aaab", 8e9 / 3),
        ("aaaa", 2e9),
    ],
)
def test_ranks_of_a_gpu_share_its_memory(monkeypatch, gpus, memory_bytes):
    """The last GPU has 6 GB free, the others 8; each rank sees its own as number 0."""

    def mine():
        return gpus[int(threading.current_thread().name.removeprefix("rank "))]

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=mine()))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6e9 if mine() == "d" else 8e9, 9e9))
    cuda = torch.device("cuda", 0)
    clusters = run_ranks(4, lambda world: network.measure_cluster(world, cuda), hosts=[0] * 4)
    assert [cluster.memory_bytes for cluster in clusters] == [memory_bytes] * 4


def test_gpus_without_identities_are_told_apart_by_what_is_shown(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    names = set()
    for shown in ("0", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        names.add(network._memory_of("a", cuda))
    assert len(names) == 2


def test_gpus_of_two_hosts_are_two_though_they_say_the_same(monkeypatch):
    """A virtual GPU's identity may be the same on each host."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8e9, 9e9))
    cuda = torch.device("cuda", 0)
    clusters = run_ranks(2, lambda world: network.measure_cluster(world, cuda), hosts=[0, 1])
    assert clusters[0].memory_bytes == 8e9

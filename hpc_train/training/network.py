"""Measures what the planner must know of a job's hosts: lines, latencies, memory; all ranks together."""

import json
import math
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import psutil
import torch

from hpc_train.comm.interface import Collective, PeerLink, Wire, World
from hpc_train.grid import Grid
from hpc_train.pipeline.messages import Outbox, receive_message
from hpc_train.planning.cluster import Cluster

_SMALL_BYTES, _MEDIUM_BYTES, _LARGE_BYTES = 8, 2**18, 2**22
_REPEATS = 3
_PAUSE_S = 5e-3  # a stage waits so long for a message, or longer
_PATIENT_REPEATS = 8


def measure_cluster(world: World, device: torch.device, speed: float = 1.0) -> Cluster:
    """The hosts of this job, as they are while all ranks are at work.

    Within each host its first two ranks exchange messages; between hosts the first rank of each sends to the
    next host's, all at once. Then two by two answer each other, after a pause, as stages do.

    Args:
        world: all ranks.
        device: this rank's.
        speed: of this rank, against the profile that will be planned with.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for later is free
    link = world.peer_link(Grid(1, world.size))
    hosts = [data.decode() for data in world.control.all_gather(world.host.encode())]
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    lines = {}
    for name, groups in (("_host", _inside(hosts)), ("", [leaders] if len(leaders) > 1 else [])):
        mine = next((group for group in groups if world.rank in group), [])
        spans = []
        for way, size in (
            (_ring, _SMALL_BYTES),
            (_ring, _LARGE_BYTES),
            (_answer, _SMALL_BYTES),
            (_answer, _MEDIUM_BYTES),
        ):
            world.control.barrier()
            spans.append(way(link, mine, world.rank, size) if mine else None)
        lines[name] = _Line.of(world.control.all_gather(json.dumps(spans).encode()))
    told = json.dumps([_memory_of(world.host, device), _free_bytes(device), speed])
    rows = [json.loads(data) for data in world.control.all_gather(told.encode())]
    users = Counter(row[0] for row in rows)
    sizes = Counter(hosts)
    speeds = [
        statistics.median(row[-1] for row, at in zip(rows, hosts, strict=True) if at == host)
        for host in sizes
    ]
    inside, between = lines["_host"], lines[""]
    return Cluster(
        ranks=world.size,
        ranks_per_host=max(sizes.values()),
        memory_bytes=min(free_bytes / users[memory] for memory, free_bytes, _ in rows),
        bandwidth_host=inside.bandwidth,
        bandwidth=between.bandwidth,
        latency_host_s=inside.latency_s,
        latency_s=between.latency_s,
        burst_bytes=between.burst_bytes,
        overhead_s=max(inside.overhead_s, between.overhead_s),
        speeds=tuple(speeds) if len(sizes) > 1 else (),
        host_of=_unless_in_blocks([list(sizes).index(host) for host in hosts], max(sizes.values())),
    )


def measure_overlap_cost(
    collective: Collective, wire: Wire, numel: int, work_s: Callable[[], float]
) -> float:
    """Seconds of computing that each second of sums beside it costs.

    Sums go on in a thread, as beside a backward. They may need the cores that compute, which then lose up to
    all that they could have gained; they need none where hosts have cores to spare or the device computes.

    Args:
        collective: of all ranks, each a replica.
        wire: of the sums.
        numel: values of a bucket.
        work_s: computes, always the same, and tells how long that took.
    """
    if collective.size == 1 or not collective.threaded:
        return 0.0
    alone_s = work_s()
    buffer = collective.allocate(numel)
    busy = threading.Event()
    busy.set()

    def sums() -> None:
        while collective.max(float(busy.is_set())):  # until all ranks have measured
            collective.sum_(buffer, wire)

    with ThreadPoolExecutor(1) as pool:
        summing = pool.submit(sums)
        try:
            beside_s = work_s()
        finally:
            busy.clear()
        summing.result()
    lost = max(0.0, 1 - alone_s / beside_s) if beside_s else 0.0
    return collective.max(lost)


def _unless_in_blocks(host_of: list[int], most: int) -> tuple[int, ...]:
    """The host of each rank; none where hosts are filled with `most` ranks one after the other."""
    return () if host_of == [rank // most for rank in range(len(host_of))] else tuple(host_of)


class _Line(NamedTuple):
    """One kind of line; nothing is known of one that is not there."""

    latency_s: float = 0.0
    bandwidth: float = math.inf
    burst_bytes: float = 0.0
    overhead_s: float = 0.0

    @classmethod
    def of(cls, told: Sequence[bytes]) -> "_Line":
        """From what ranks have measured: medians of those that have."""
        columns = zip(*(json.loads(data) for data in told), strict=True)
        measured = [[seconds for seconds in column if seconds is not None] for column in columns]
        if not measured[0]:
            return cls()
        latency_s, large_s, small_s, medium_s = map(statistics.median, measured)
        bandwidth = _LARGE_BYTES / max(large_s - latency_s, 1e-9)
        burst_bytes = _MEDIUM_BYTES - max(0.0, medium_s - small_s) * bandwidth
        return cls(latency_s, bandwidth, max(0.0, burst_bytes), max(0.0, small_s - latency_s) / 2)


def _inside(hosts: Sequence[str]) -> list[list[int]]:
    """The first two ranks of every host that has two."""
    ranks = [[rank for rank, at in enumerate(hosts) if at == host] for host in dict.fromkeys(hosts)]
    return [held[:2] for held in ranks if len(held) > 1]


def _ring(link: PeerLink, group: Sequence[int], rank: int, num_bytes: int) -> float:
    """Median seconds until each of the group has sent to the next one and received from the one before."""
    at = group.index(rank)
    after, before = group[(at + 1) % len(group)], group[at - 1]
    out, into = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    spans = []
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        arriving = link.irecv(into, before, tag=0)
        leaving = link.isend(out, after, tag=0)
        arriving.wait()
        leaving.wait()
        spans.append(time.perf_counter() - began)
    return statistics.median(spans[1:])


def _answer(link: PeerLink, group: Sequence[int], rank: int, num_bytes: int) -> float | None:
    """Median seconds of a message to one of the group that waits for it already; None for who is left over.

    As between stages it has a header, and whoever has it pauses before the answer; a pause is told in it.
    """
    at = group.index(rank)
    if at ^ 1 >= len(group):
        return None
    other, outbox = group[at ^ 1], Outbox(link)
    value = torch.zeros(max(1, num_bytes // 4))
    spans = []
    for _ in range(1 + _PATIENT_REPEATS):
        if at % 2:
            receive_message(link, other, 0, Wire.FP32, value.device)
        began = time.perf_counter()
        time.sleep(_PAUSE_S)
        paused_s = time.perf_counter() - began
        outbox.wait_all()
        value[0] = paused_s
        outbox.send_message(value, other, 0)
        if not at % 2:
            answer = receive_message(link, other, 0, Wire.FP32, value.device)
            spans.append((time.perf_counter() - began - paused_s - float(answer[0])) / 2)
    outbox.wait_all()
    return statistics.median(spans[1:]) if spans else None


def _memory_of(host: str, device: torch.device) -> str:
    """A name of the memory that this rank computes in, which all ranks that share it give it.

    Where each rank is shown a GPU of its own, that is number 0 for all of them: GPUs have identities.
    """
    if device.type != "cuda":
        return host
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    identity = getattr(
        torch.cuda.get_device_properties(device), "uuid", f"{shown} {device.index}"
    )  # torch 2.2
    return f"{host} {identity}"


def _free_bytes(device: torch.device) -> float:
    """Of that memory, for all ranks that share it together."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)

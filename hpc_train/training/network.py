"""Measures what the planner must know of a job's hosts: lines, latencies, memory; all ranks together."""

import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence

import psutil
import torch

from hpc_train.comm.interface import PeerLink, World
from hpc_train.grid import Grid
from hpc_train.planning.cluster import Cluster

_SMALL_BYTES, _LARGE_BYTES = 8, 2**22
_REPEATS = 3


def measure_cluster(world: World, device: torch.device, speed: float = 1.0) -> Cluster:
    """The hosts of this job, as they are while all ranks are at work.

    Within each host its first two ranks exchange messages; between hosts the first rank of each sends to the
    next host's, all at once.

    Args:
        world: all ranks.
        device: this rank's.
        speed: of this rank, against the profile that will be planned with.
    """
    link = world.peer_link(Grid(1, world.size))
    hosts = [data.decode() for data in world.control.all_gather(world.host.encode())]
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    seconds = {}
    for name, groups in (("inside", _inside(hosts)), ("between", [leaders] if len(leaders) > 1 else [])):
        for size in (_SMALL_BYTES, _LARGE_BYTES):
            mine = next((group for group in groups if world.rank in group), None)
            world.control.barrier()
            seconds[name, size] = _ring(link, mine, world.rank, size) if mine else None
    told = json.dumps([seconds[key] for key in sorted(seconds)] + [_memory(world, device), speed])
    rows = [json.loads(data) for data in world.control.all_gather(told.encode())]
    between_small, between_large, inside_small, inside_large, memory, _ = (
        [value for value in column if value is not None] for column in zip(*rows, strict=True)
    )
    sizes = Counter(hosts)
    speeds = [
        statistics.median(row[-1] for row, at in zip(rows, hosts, strict=True) if at == host)
        for host in sizes
    ]
    return Cluster(
        ranks=world.size,
        ranks_per_host=max(sizes.values()),
        memory_bytes=min(memory),
        **_line("", between_small, between_large),
        **_line("_host", inside_small, inside_large),
        speeds=tuple(speeds) if len(sizes) > 1 and min(sizes.values()) == max(sizes.values()) else (),
    )


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


def _line(suffix: str, small_s: Sequence[float], large_s: Sequence[float]) -> dict[str, float]:
    """Latency and bandwidth of one kind of line; nothing is known of one that is not there."""
    if not small_s:
        return {}
    latency_s = statistics.median(small_s)
    transfer_s = max(statistics.median(large_s) - latency_s, 1e-9)
    return {f"latency{suffix}_s": latency_s, f"bandwidth{suffix}": _LARGE_BYTES / transfer_s}


def _memory(world: World, device: torch.device) -> float:
    """Bytes that this rank may still take."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available) / world.local_size

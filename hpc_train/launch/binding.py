"""What of this host a rank may use: its cores, its torch threads, its device."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.errors import UserError

if TYPE_CHECKING:  # choosing a device needs torch; counting cores does not
    import torch

    from hpc_train.comm.interface import World

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cpus() -> frozenset[int]:
    """The logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cores(of_cpus: frozenset[int] | None = None) -> frozenset[int]:
    """The cores behind logical CPUs (default: this process's), each named by its first logical CPU.

    Two hardware threads of one core compute no faster than one, so that torch is given cores.
    """
    return frozenset(_core(cpu) for cpu in (cpus() if of_cpus is None else of_cpus))


def _core(cpu: int) -> int:
    try:
        siblings = (_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:  # not Linux, or hidden in a container: count every CPU as a core
        return cpu
    return int(siblings.replace("-", ",").split(",")[0])


def quota() -> float:
    """The cores' worth of time that a container grants this process; infinity without a limit."""
    try:
        limit, period = _QUOTA.read_text().split()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if limit == "max" else int(limit) / int(period)


def share_of_cores(cores_by_rank: Sequence[frozenset[int]], local_rank: int) -> int:
    """How many cores' work a rank can do beside the others on its host, at least 1.  PURE.

    A core that several ranks may use counts for each of them in part:

        rank 0  {0,1}   rank 1  {2,3}         each has 2
        rank 0  {0..3}  rank 1  {0..3}        not bound: each has 2
    """
    users = Counter(core for mine in cores_by_rank for core in mine)
    return max(1, int(sum(1 / users[core] for core in cores_by_rank[local_rank]) + 1e-6))


def choose_threads(world: "World", wanted: int = 0) -> int:
    """The torch threads for this rank: `wanted`, else OMP_NUM_THREADS, else its share of the host's cores.

    Collective: all ranks call it.
    """
    mine = {"host": world.host, "local_rank": world.local_rank, "cores": sorted(cores())}
    everybody = [json.loads(text) for text in world.control.all_gather(json.dumps(mine).encode())]
    neighbours = sorted((r for r in everybody if r["host"] == world.host), key=lambda r: int(r["local_rank"]))
    if wanted:
        return wanted
    stated = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if stated.isdigit() and int(stated) > 0:
        return int(stated)
    share = share_of_cores([frozenset(r["cores"]) for r in neighbours], world.local_rank)
    return max(1, int(min(share, quota() / len(neighbours))))


def choose_device(name: str, local_rank: int) -> "torch.device":
    """The device of a rank: `name` is "auto", "cpu" or "cuda".

    It is the local rank modulo the *visible* devices: where a scheduler shows each rank one GPU, that
    one is number 0 for all of them.

    Raises:
        UserError: "cuda" is asked for and this rank sees no CUDA device.
    """
    import torch

    visible = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if visible:
        return torch.device("cuda", local_rank % visible)
    if name == "cuda":
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES={shown!r}" if shown is not None else "no driver answers"
        if torch.version.cuda is None:
            why = f"torch {torch.__version__} is built without CUDA"
        raise UserError(
            f"train.device=cuda, but local rank {local_rank} sees 0 CUDA devices ({why}): "
            f"set train.device=auto, or ask the scheduler for GPUs"
        )
    return torch.device("cpu")

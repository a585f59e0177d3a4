"""hpc_train: the public names, nothing else.

They are imported when first used, so that `import hpc_train` costs nothing, and a process that only
loads data never starts MPI.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.gradients.broadcast import broadcast_optimizer_state, broadcast_parameters
    from hpc_train.gradients.distributed_optimizer import Compression, DistributedOptimizer
    from hpc_train.gradients.session import init, local_rank, local_size, rank, shutdown, size
    from hpc_train.pipeline.layers import LayerSpec
    from hpc_train.tasks.task import Task
    from hpc_train.training.trainer import Trainer

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "LayerSpec",
    "Task",
    "Trainer",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

_HOMES = {
    "gradients.session": ["init", "local_rank", "local_size", "rank", "shutdown", "size"],
    "gradients.broadcast": ["broadcast_optimizer_state", "broadcast_parameters"],
    "gradients.distributed_optimizer": ["Compression", "DistributedOptimizer"],
    "pipeline.layers": ["LayerSpec"],
    "tasks.task": ["Task"],
    "training.trainer": ["Trainer"],
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

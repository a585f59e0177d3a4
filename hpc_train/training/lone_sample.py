"""Micro-batches of a single sample, over which BatchNorm cannot normalise.

batch.size 18, 2 replicas, micro-batches of 4

    replica 0   0 1 2 3 | 4 5 6 7 | 8      one alone: of a feature there is but one value
    replica 1   9 ...
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

from hpc_train.config import BatchSettings, Settings
from hpc_train.coordinator.policies.equal_shares import equal_shares
from hpc_train.data.sampler import cut
from hpc_train.errors import UserError
from hpc_train.pipeline.layers import LayerSpec, apply_layer, built_without_memory, layer_name
from hpc_train.pipeline.values import put_together, take_apart
from hpc_train.tasks.task import Task

_REFUSAL = "Expected more than 1 value per channel"  # torch's own


def normalising(specs: Sequence[LayerSpec]) -> list[int]:
    """The layers that have a BatchNorm, as far as they can be looked at without memory."""
    built = [built_without_memory(spec) for spec in specs]
    return [
        index
        for index, layer in enumerate(built)
        if layer is not None and any(isinstance(module, _BatchNorm) for module in layer.modules())
    ]


def find_lone(batch: BatchSettings, num_samples: int, replicas: int) -> tuple[int, int] | None:
    """The size of a batch, and a replica that has a micro-batch of one sample of it; None if there is none.

    `num_samples`: of an epoch, whose last batch may be smaller.
    """
    shares = equal_shares(batch.size, replicas)
    for size in (min(batch.size, num_samples), num_samples % batch.size):
        for replica, share in enumerate(cut(size, shares)):
            if share and (share % batch.micro_batch == 1 or batch.micro_batch == 1):
                return size, replica
    return None


def lone_rule(settings: Settings, task: Task) -> Callable[[int, int], bool] | None:
    """For the planner: whether so many replicas, and samples a micro-batch, leave one alone; None: never."""
    if not normalising(task.layers()):
        return None
    size, num_samples = settings.batch.size, len(task.dataset("train"))
    return lambda replicas, micro_batch: (
        find_lone(BatchSettings(size=size, micro_batch=micro_batch), num_samples, replicas) is not None
    )


def check_lone(settings: Settings, task: Task, replicas: int) -> None:
    """Before training, where it would fail at the first such micro-batch, perhaps at the end of an epoch.

    Raises:
        UserError: the model refuses a single sample, and gets one.
    """
    specs, batch = task.layers(), settings.batch
    if not normalising(specs):
        return
    dataset = task.dataset("train")
    lone = find_lone(batch, len(dataset), replicas)
    refusing = _refusing(specs, default_collate([dataset[0]])[0]) if lone else None
    if lone is None or refusing is None:
        return
    size, replica = lone
    which = "" if size == batch.size else f" of the last {size} of an epoch"
    raise UserError(
        f"{layer_name(refusing)} normalises over the samples of a micro-batch (BatchNorm) and needs 2 "
        f"or more, but batch.micro_batch={batch.micro_batch} and batch.size={batch.size} on {replicas} "
        f"replica{'s' * (replicas > 1)} leave replica {replica} one with 1{which}: "
        f"{_fix(batch, len(dataset), replicas)}"
    )


def _fix(batch: BatchSettings, num_samples: int, replicas: int) -> str:
    """The nearest micro-batch that leaves no sample alone, the larger one first."""
    sizes = sorted(range(2, batch.size + 1), key=lambda n: (abs(n - batch.micro_batch), -n))
    for size in sizes:
        if not find_lone(BatchSettings(size=batch.size, micro_batch=size), num_samples, replicas):
            return f"set batch.micro_batch to {size}"
    return "set another batch.size, or start another number of ranks"


def _refusing(specs: Sequence[LayerSpec], inputs: object) -> int | None:
    """The layer that refuses one sample; found without memory, and None where that tells nothing.

    A single image is enough for BatchNorm2d, as it has many values of a feature.
    """
    structure, tensors = take_apart(inputs)
    value = put_together(structure, [tensor.to("meta") for tensor in tensors])
    for index, spec in enumerate(specs):
        layer = built_without_memory(spec)
        if layer is None:
            return None
        try:
            with torch.no_grad():
                value = apply_layer(layer.train(), value)
        except Exception as error:  # noqa: BLE001  (whatever else layers cannot do without values)
            return index if _REFUSAL in str(error) else None
    return None

"""Figures of a micro-batch that are one number a sample: the loss and the metrics of a task."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpc_train.errors import UserError


def sum_over_samples(values: Any, name: str, target: Any) -> Tensor:
    """The sum of `values`, [micro-batch], in fp64 and without a graph.

    Args:
        values: what the task's function called `name` has returned for `target`.
        name: for the error.
        target: as the dataset gives it; its first dimension is the micro-batch.

    Raises:
        UserError: they are not one number a sample, so that their sum would depend on the cut of a batch.
    """
    if not isinstance(values, Tensor):
        raise UserError(f"{name} is a {type(values).__name__}: return a tensor with one number a sample")
    num_samples = count_samples(target)
    if values.dim() != 1 or num_samples not in (None, len(values)):
        wanted = "[micro-batch]" if num_samples is None else f"[{num_samples}]"
        raise UserError(
            f"{name} has shape {list(values.shape)}, but must be {wanted}, one number for each sample of a "
            "micro-batch: use reduction='none', and take means over the other dimensions only"
        )
    return values.detach().sum(dtype=torch.float64)


def count_samples(target: Any) -> int | None:
    """The first dimension of the first tensor in `target`; None if there is no such tensor."""
    if isinstance(target, Tensor):
        return len(target) if target.dim() else None
    parts = target.values() if isinstance(target, Mapping) else target
    if isinstance(target, Mapping | tuple | list):
        return next((count for count in map(count_samples, parts) if count is not None), None)
    return None

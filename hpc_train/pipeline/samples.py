"""Figures of a micro-batch that are one number a sample: the loss and the metrics of a task."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpc_train.errors import UserError


class Sum(NamedTuple):
    """Over some samples: what all samples' totals are divided by in the end is the sum of their weights."""

    total: float
    weight: float

    def __add__(self, other: "Sum") -> "Sum":  # type: ignore[override]
        return Sum(self.total + other.total, self.weight + other.weight)


def sum_over_samples(figures: Any, name: str, target: Any) -> tuple[Tensor, Tensor | float]:
    """The sums of the figures and of their weights, in fp64 and without a graph.

    Args:
        figures: what the task's function called `name` has returned for `target`: [micro-batch], or
            that and weights, [micro-batch]; a figure without a weight weighs 1.
        name: for the error.
        target: as the dataset gives it; its first dimension is the micro-batch.

    Raises:
        UserError: they are not one number a sample, so that their sum would depend on the cut of a batch.
    """
    values, weights = figures if isinstance(figures, tuple) and len(figures) == 2 else (figures, None)
    for part, title in ((values, name), (weights, f"the weight of {name}")):
        if part is not None or title == name:
            _check(part, title, target)
    total = values.detach().sum(dtype=torch.float64)
    return total, float(len(values)) if weights is None else weights.detach().sum(dtype=torch.float64)


def _check(values: Any, name: str, target: Any) -> None:
    if not isinstance(values, Tensor):
        raise UserError(f"{name} is a {type(values).__name__}: return a tensor with one number a sample")
    num_samples = count_samples(target)
    if values.dim() != 1 or num_samples not in (None, len(values)):
        wanted = "[micro-batch]" if num_samples is None else f"[{num_samples}]"
        raise UserError(
            f"{name} has shape {list(values.shape)}, but must be {wanted}, one number for each sample of a "
            "micro-batch: use reduction='none', and take means over the other dimensions only"
        )


def count_samples(target: Any) -> int | None:
    """The first dimension of the first tensor in `target`; None if there is no such tensor."""
    if isinstance(target, Tensor):
        return len(target) if target.dim() else None
    parts = target.values() if isinstance(target, Mapping) else target
    if isinstance(target, Mapping | tuple | list):
        return next((count for count in map(count_samples, parts) if count is not None), None)
    return None

"""What one layer hands to the next: tensors, alone or inside tuples, lists and dicts.

A value is taken apart into its tensors, in order, and a structure that says where they belong. The
structure is made of tuples alone, so that it can be compared and looked up, and of what JSON knows,
so that it can travel:

    (x, {"mask": mask, "scale": 0.5})  ->  [x, mask]  and
    ("tuple", "tensor", ("dict", ("mask", "tensor"), ("scale", ("float", 0.5))))
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from hpc_train.errors import UserError

_PLAIN = (bool, int, float, str, type(None))


def take_apart(value: Any) -> tuple[Any, list[Tensor]]:
    """The structure of a value, and its tensors.

    Raises:
        UserError: there is something in it that cannot be sent to another process.
    """
    tensors: list[Tensor] = []
    return _structure(value, tensors), tensors


def put_together(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `take_apart`; `structure` may have been through JSON, which turns tuples into lists."""
    return _value(structure, iter(tensors))


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a value, in order.  Raises UserError as `take_apart` does."""
    return [value] if isinstance(value, Tensor) else take_apart(value)[1]


def _structure(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor"
    if type(value) in _PLAIN:
        return (type(value).__name__, value)  # 1, 1.0 and True are equal, but not the same
    if type(value) in (tuple, list):
        return (type(value).__name__, *(_structure(part, tensors) for part in value))
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ("dict", *((key, _structure(part, tensors)) for key, part in value.items()))
    raise UserError(
        f"a layer gives a {type(value).__name__} to the next: only tensors, None, numbers, texts, and "
        "tuples, lists and dicts (with texts as keys) of them can go to another stage; change the layer"
    )


def _value(structure: Any, tensors: Iterator[Tensor]) -> Any:
    if structure == "tensor":
        return next(tensors)
    kind, *parts = structure
    if kind == "dict":
        return {key: _value(part, tensors) for key, part in parts}
    if kind in ("tuple", "list"):
        values = [_value(part, tensors) for part in parts]
        return tuple(values) if kind == "tuple" else values
    return parts[0]

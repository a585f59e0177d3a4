"""Gives all ranks the parameters and the optimizer state of one of them.

No pickle crosses ranks: what is no tensor travels as JSON, tensors as their bytes.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hpc_train.comm.interface import Collective, ControlPlane
from hpc_train.errors import UserError
from hpc_train.gradients import session

Named = Mapping[str, Any] | Iterable[tuple[str, Any]]


def broadcast_parameters(params: Named, root_rank: int = 0) -> None:
    """Replace tensors in place by those of `root_rank`.  All ranks together.

    Args:
        params: `model.state_dict()`, or pairs such as `model.named_parameters()`.
        root_rank: whose tensors all get.

    Raises:
        UserError: ranks differ in names, shapes or dtypes.
    """
    here = session.current()
    tensors = named_tensors(params)
    check_same_tensors(tensors, root_rank, here.world.control)
    for tensor in tensors.values():
        broadcast_tensor(tensor, root_rank, here.collective(tensor.device))


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Give `optimizer` the state and settings that `root_rank`'s has.  All ranks together.

    Other ranks need none yet: after a resume on one rank this makes them all go on alike.
    """
    here = session.current()
    state = broadcast_state(
        optimizer.state_dict(), root_rank, here.world.control, here.collective(torch.device("cpu"))
    )
    optimizer.load_state_dict(state)


def named_tensors(params: Named) -> dict[str, Tensor]:
    """The tensors among `params` by name, without None entries.

    Raises:
        UserError: something else is among them.
    """
    pairs = params.items() if isinstance(params, Mapping) else params
    tensors = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise UserError(
                f"broadcast_parameters takes a state_dict or pairs (name, tensor), "
                f"not {type(pair).__name__}: give model.state_dict()"
            )
        name, tensor = pair
        if isinstance(tensor, Tensor):
            tensors[str(name)] = tensor.detach()
        elif tensor is not None:
            raise UserError(f"broadcast_parameters: {name} is a {type(tensor).__name__}, not a tensor")
    return tensors


def check_same_tensors(tensors: Mapping[str, Tensor], root: int, control: ControlPlane) -> None:
    """Raise UserError on all ranks where one rank's names, shapes or dtypes are not the root's."""
    if not 0 <= root < control.size:
        raise UserError(f"root_rank={root} is not one of {control.size} ranks: use 0 to {control.size - 1}")
    mine = [f"{name} {_dtype_name(t)} {list(t.shape)}" for name, t in tensors.items()]
    everybody = [json.loads(text) for text in control.all_gather(json.dumps(mine).encode())]
    expected = everybody[root]
    for rank, found in enumerate(everybody):
        if found == expected:
            continue
        position = next(
            (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
            min(len(found), len(expected)),
        )
        here, there = ([*lines[position:], "nothing more"][0] for lines in (found, expected))
        raise UserError(
            f"rank {rank} has {here} where rank {root} has {there}: build the same model on every rank"
        )


def broadcast_tensor(tensor: Tensor, root: int, collective: Collective) -> None:
    """Replace a tensor of any dtype and memory format by the root's."""
    if tensor.numel() == 0 or collective.size == 1:
        return
    values = tensor.detach().contiguous()
    collective.broadcast_(values.view(-1).view(torch.uint8), root)
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values)


def broadcast_state(
    state: dict[str, Any], root: int, control: ControlPlane, collective: Collective
) -> dict[str, Any]:
    """The root's `state`: dicts, lists, tuples, plain values, and tensors, which come on the CPU."""
    if not 0 <= root < control.size:
        raise UserError(f"root_rank={root} is not one of {control.size} ranks: use 0 to {control.size - 1}")
    tensors: list[Tensor] = []
    text = json.dumps(_describe(state, "state", tensors)) if control.rank == root else ""
    tree = json.loads(control.all_gather(text.encode())[root])
    ours = iter(tensors)

    def receive(dtype: str, shape: list[int]) -> Tensor:
        tensor = next(ours) if control.rank == root else torch.empty(shape, dtype=getattr(torch, dtype))
        broadcast_tensor(tensor, root, collective)
        return tensor

    return _rebuild(tree, receive)  # type: ignore[no-any-return]


def _describe(value: Any, where: str, tensors: list[Tensor]) -> Any:
    """JSON that `_rebuild` turns back: a list whose first entry says what it is.  Tensors are set aside."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().contiguous())
        return ["tensor", _dtype_name(value), list(value.shape)]
    if isinstance(value, dict):  # as pairs: JSON's keys are strings, while torch numbers its parameters
        return ["dict", [[key, _describe(v, f"{where}[{key!r}]", tensors)] for key, v in value.items()]]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_describe(v, f"{where}[{i}]", tensors) for i, v in enumerate(value)]]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"optimizer state {where} is a {type(value).__name__}, which cannot be sent to other ranks"
    )


def _rebuild(value: Any, receive: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *content = value
    if kind == "tensor":
        return receive(*content)
    if kind == "dict":
        return {key: _rebuild(v, receive) for key, v in content[0]}
    items = [_rebuild(v, receive) for v in content[0]]
    return items if kind == "list" else tuple(items)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

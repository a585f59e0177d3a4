"""Snapshot: the state of layers in memory, by name: parameters, buffers and the optimizer's.

Hyper-parameters such as the learning rate are no state: the settings and the step give them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpc_train.checkpoint.names import optimizer_name, split_optimizer_name

Parameters = Mapping[str, nn.Parameter]
Buffers = Mapping[str, Tensor]
Shape = tuple[int, ...]


def buffers_of(module: nn.Module, parameters: Parameters | None = None) -> dict[str, Tensor]:
    """What the module's `state_dict` has beside these parameters, so that an export has it all.

    That leaves out buffers which are not persistent, and has the second name of a tied parameter.

    `parameters`: those that are kept with their optimizer state; by default all of `named_parameters`.

    Raises:
        TypeError: the module keeps something else than tensors.
    """
    parameters = dict(module.named_parameters()) if parameters is None else parameters
    buffers = {name: v for name, v in module.state_dict(keep_vars=True).items() if name not in parameters}
    for name, value in buffers.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}: a checkpoint keeps tensors only")
    return buffers


def take(parameters: Parameters, buffers: Buffers, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """The state as it stands, by name; the memory is shared with the model, not copied.

    Before its first step an optimizer has no state, and for a frozen parameter never.

    Raises:
        TypeError: the optimizer keeps something else than tensors.
    """
    held: dict[str, Tensor] = {**parameters, **buffers}
    tensors = {name: tensor.detach() for name, tensor in held.items()}
    return {**tensors, **take_optimizer(parameters, optimizer)}


def take_optimizer(parameters: Parameters, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """The optimizer's part of `take`."""
    tensors: dict[str, Tensor] = {}
    if optimizer is None:
        return tensors
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is None:  # SGD, for a parameter that had no gradient yet
                continue
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{type(optimizer).__name__} keeps {key} as {type(value).__name__}: not a tensor"
                )
            tensors[optimizer_name(name, key)] = value.detach()
    return tensors


def shapes(parameters: Parameters, buffers: Buffers, optimizer: Optimizer | None) -> dict[str, Shape]:
    """The names and shapes of what `restore` wants: those that `take` gives after some steps.

    Raises:
        TypeError: the optimizer is none of torch's Adam, AdamW and SGD.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in (*parameters.items(), *buffers.items())}
    return {**wanted, **optimizer_shapes(parameters, optimizer)}


def optimizer_shapes(parameters: Parameters, optimizer: Optimizer | None) -> dict[str, Shape]:
    """The optimizer's part of `shapes`."""
    wanted: dict[str, Shape] = {}
    if optimizer is None:
        return wanted
    names = {parameter: name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        keys = _state_keys(optimizer, group)
        for parameter in group["params"]:
            for key in keys:
                shape = () if key == "step" else tuple(parameter.shape)
                wanted[optimizer_name(names[parameter], key)] = shape
    return wanted


def restore(
    tensors: Mapping[str, Tensor], parameters: Parameters, buffers: Buffers, optimizer: Optimizer | None
) -> None:
    """Put the state of `tensors` in place; dtypes and devices stay those of the model.

    Raises:
        KeyError: a parameter or buffer is not among `tensors`.
    """
    with torch.no_grad():
        for name, tensor in (*parameters.items(), *buffers.items()):
            tensor.copy_(tensors[name])
    restore_optimizer(tensors, parameters, optimizer)


def restore_optimizer(
    tensors: Mapping[str, Tensor], parameters: Parameters, optimizer: Optimizer | None
) -> None:
    """The optimizer's part of `restore`.

    A parameter whose optimizer state is not among `tensors` begins as in a new optimizer.  The optimizer
    keeps the state's tensors themselves: use them no further.
    """
    if optimizer is None:
        return
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if parts := split_optimizer_name(name):
            parameter, key = parts
            by_parameter.setdefault(parameter, {})[key] = tensor
    names = {parameter: name for name, parameter in parameters.items()}
    own = optimizer.state_dict()  # names parameters by position, in the order of its groups
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = {i: by_parameter[name] for i, name in enumerate(ordered) if name in by_parameter}
    optimizer.load_state_dict({"state": state, "param_groups": own["param_groups"]})


def _state_keys(optimizer: Optimizer, group: Mapping[str, object]) -> tuple[str, ...]:
    """What the optimizer keeps for each parameter of a group."""
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one since torch 2.7
        return _adam_keys(group)
    if isinstance(optimizer, torch.optim.AdamW):
        return _adam_keys(group)
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if group["momentum"] else ()
    raise TypeError(f"the state of {type(optimizer).__name__} is not known: use Adam, AdamW or SGD")


def _adam_keys(group: Mapping[str, object]) -> tuple[str, ...]:
    return ("step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))

"""A run that begins with the weights of a plain PyTorch model: the reverse of export."""

import re
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpc_train.checkpoint import tensor_file
from hpc_train.checkpoint.agreement import attempt, share
from hpc_train.checkpoint.matching import Shapes, layers_left, layers_of, mismatch
from hpc_train.checkpoint.names import is_model
from hpc_train.comm.interface import ControlPlane
from hpc_train.errors import UserError

_NAME = re.compile(r"layers\.\d+\.")


class _Held(NamedTuple):
    """A tensor of the file; `name` is that of the other one where it is tied and was left out."""

    name: str
    shape: tuple[int, ...]


def read_model(path: Path, wanted: Shapes, control: ControlPlane) -> dict[str, Tensor]:
    """Read a rank's part of a state dict in a safetensors file; all ranks together.

    Args:
        path: what safetensors' `save_file(model.state_dict(), path)` writes for the task's plain model, or
            `save_model(model, path)` where parameters are tied; or `export`.
        wanted: names and shapes that this rank wants; of an optimizer nothing is read.
        control: all ranks.

    Raises:
        UserError: it cannot be read, or is of another model.
    """
    cannot = f"cannot begin with {path}"
    found: dict[str, _Held] = {}
    attempt(control, cannot, lambda: found.update(_look(path)))
    held = {name: tensor.shape for name, tensor in found.items()}
    parts = share(control, [mismatch(held, wanted), sorted(layers_of(wanted))])
    reasons = [reason for reason, _ in parts if reason]
    left = layers_left(held, {layer for _, layers in parts for layer in layers})
    if reasons or left:
        raise UserError(
            f"{path} is of another model: {reasons[0] if reasons else left}: "
            "save the state_dict of this task's plain_model(), whose names begin with layers.0"
        )
    tensors: dict[str, Tensor] = {}
    names = {name: found[name].name for name in wanted if is_model(name)}
    attempt(control, cannot, lambda: tensors.update(tensor_file.read(path, set(names.values()))))
    return {name: tensors[other] for name, other in names.items()}


def _look(path: Path) -> dict[str, _Held]:
    if not path.is_file():
        raise UserError(f"{path}: no such file (looked in {Path.cwd()})")
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            held = {name: _Held(name, tuple(file.get_slice(name).get_shape())) for name in names}
            left_out = file.metadata() or {}  # save_model notes which other name has the values
    except SafetensorError as error:
        raise UserError(f"{path} is no safetensors file: {error}") from None
    strangers = [name for name in held if not _NAME.match(name)]
    if strangers:
        raise UserError(
            f"{path} has {strangers[0]!r}, which is no name of the task's plain_model(): save that "
            "model's state_dict, whose names begin with layers.0"
        )
    tied = {name: held[other] for name, other in left_out.items() if _NAME.match(name) and other in held}
    return {**tied, **held}

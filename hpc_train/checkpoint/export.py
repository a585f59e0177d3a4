"""Export: the whole model of a checkpoint as one safetensors file with plain names, without MPI.

model = MyTask().plain_model()
model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
"""

from pathlib import Path

from torch import Tensor

from hpc_train.checkpoint import tensor_file
from hpc_train.checkpoint.listing import Saved, first_whole, look, none_whole
from hpc_train.checkpoint.manifest import Broken
from hpc_train.checkpoint.names import is_model
from hpc_train.errors import UserError


def export(source: Path, out: Path) -> str:
    """Write parameters and buffers to `out`, and return a line for people.

    Args:
        source: a checkpoint, or a run's directory for its newest whole one.
        out: the file to write; it is there whole or not at all, and replaces an older export.

    Raises:
        UserError: there is no whole checkpoint at `source`, or `out` cannot be written or is another file.
    """
    if out.is_dir():
        raise UserError(f"{out} is a directory: give the name of a file, such as {out / 'model.safetensors'}")
    if out.exists() and not (out.is_file() and out.suffix == ".safetensors"):
        raise UserError(f"{out} is there, and no .safetensors file: give another name, it would be lost")
    try:
        found, passed = first_whole(look(source), _check)
        if found is None:
            raise none_whole(source, passed)
        tensors: dict[str, Tensor] = {}
        by_file: dict[str, list[str]] = {}
        for name, where in found.manifest.tensors.items():
            if is_model(name):
                by_file.setdefault(where.file, []).append(name)
        for file, names in by_file.items():
            tensors.update(tensor_file.read(found.path / file, names))
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror or error}") from None
    try:
        record = tensor_file.write(out, tensors)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from None
    numbers = sum(tensor.numel() for tensor in tensors.values())
    line = (
        f"{out}: step {found.manifest.step}, {len(tensors)} tensors, {numbers:,} numbers, "
        f"{record.bytes:,} bytes"
    )
    return line + "".join(f"\nwarning: passed over {path}: {cause}" for path, cause in passed.items())


def _check(saved: Saved) -> str:
    try:
        for name, record in saved.manifest.files.items():
            tensor_file.check(saved.path / name, record)
    except Broken as error:
        return str(error)
    return ""

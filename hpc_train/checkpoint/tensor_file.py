"""One safetensors file: written atomically, checked against its record, read in part."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hpc_train.checkpoint.manifest import Broken, FileRecord, sync_directory

_PIECE_BYTES = 4 * 2**20


def write(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write all tensors to `path`, which is not there before it is complete and on the disk.

    Raises:
        OSError: no space, no permission and the like.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # the umask's: safetensors replaces it by a file for the owner alone
        save_file(_separate(tensors), temporary, metadata={"format": "pt"})
        temporary.chmod(mode)
        record = _measure(temporary, sync=True)
        os.replace(temporary, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return record


def check(path: Path, record: FileRecord) -> None:
    """Compare a file with its record.  Raises Broken with the difference."""
    try:
        size = path.stat().st_size
        if size != record.bytes:
            raise Broken(f"{path.name} has {size} bytes instead of {record.bytes}")
        if _measure(path) != record:
            raise Broken(f"the checksum of {path.name} is wrong: its content has changed")
    except FileNotFoundError:
        raise Broken(
            f"{path.name} is missing: deleted, or written on a host that does not share this directory"
        ) from None
    except OSError as error:
        raise Broken(f"{path.name} cannot be read: {error}") from None


def own(name: str, tensor: Tensor) -> Tensor:
    """All of a tensor that was read, in memory of its own."""
    return tensor.clone()


def read(path: Path, names: Iterable[str], cut: Callable[[str, Tensor], Tensor] = own) -> dict[str, Tensor]:
    """These tensors, on the CPU, or what `cut` makes of each before the next is read.  Raises OSError.

    `cut` must give memory of its own: what safe_open gives may be a view of the mapped file.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: cut(name, file.get_tensor(name)) for name in names}
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, and no two in the same memory, as the format wants it (tied parameters and views are)."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        own = tensor.detach().contiguous()
        separate[name] = own.clone() if memory in seen else own
        if tensor.numel():
            seen.add(memory)
    return separate


def _measure(path: Path, sync: bool = False) -> FileRecord:
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
    return FileRecord(bytes=size, sha256=digest.hexdigest())

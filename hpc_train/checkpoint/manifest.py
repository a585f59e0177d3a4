"""The manifest of a checkpoint: what belongs to it, with checksums; it is written last.

A checkpoint is whole when its manifest is there and every file is as the manifest says.
"""

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpc_train.checkpoint.names import MANIFEST

FORMAT = 1

# A plain name: a manifest must not make anybody read or delete outside its own directory.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]


class Broken(Exception):
    """A checkpoint is not whole; the text is the cause."""


class Record(BaseModel):
    """Every record is closed and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class FileRecord(Record):
    """A file as it was written."""

    bytes: int
    sha256: str


class TensorRecord(Record):
    """Where a tensor is, and what it looks like."""

    file: FileName
    shape: tuple[int, ...]
    dtype: str


class Manifest(Record):
    """All of a checkpoint.

    `serial` counts the checkpoints of a run in the order of writing, which is not that of their steps
    when somebody goes back to an earlier one.  `state` is what the trainer wants back, as JSON.
    """

    format: int
    step: int
    serial: int
    files: dict[FileName, FileRecord]
    tensors: dict[str, TensorRecord]
    state: dict[str, Any]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by name."""
        return {name: record.shape for name, record in self.tensors.items()}

    def to_text(self) -> str:
        """As JSON, with a checksum of its own."""
        body = self.model_dump(mode="json")
        return json.dumps({"checksum": _checksum(body), **body}, indent=1, allow_nan=False)

    @classmethod
    def from_text(cls, text: str) -> "Manifest":
        """What `to_text` made.  Raises Broken."""
        try:
            body = json.loads(text)
            checksum = body.pop("checksum")
        except (ValueError, AttributeError, KeyError, TypeError):
            raise Broken(f"{MANIFEST} is not a readable manifest ({len(text)} characters)") from None
        if body.get("format") != FORMAT:
            raise Broken(f"{MANIFEST} has format {body.get('format')}, and this version reads {FORMAT}")
        if checksum != _checksum(body):
            raise Broken(f"the checksum of {MANIFEST} is wrong: it was changed after it was written")
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            raise Broken(f"{MANIFEST}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def read(directory: Path) -> Manifest:
    """A checkpoint's manifest.  Raises Broken."""
    return Manifest.from_text(read_text(directory))


def read_text(directory: Path) -> str:
    """The text of a checkpoint's manifest.  Raises Broken."""
    try:
        return (directory / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Broken(f"it has no {MANIFEST}: saving was not finished") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Broken(f"{MANIFEST} cannot be read: {error}") from None


def write(directory: Path, manifest: Manifest) -> None:
    """Put the manifest in place at once: from here on the checkpoint is whole.  Raises OSError."""
    temporary = directory / f".{MANIFEST}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(manifest.to_text())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, directory / MANIFEST)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory last through a power cut, where the file system offers that."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # it cannot be asked for here, as on CIFS
            raise
    finally:
        os.close(descriptor)


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

"""Which checkpoints there are, newest first, and which of them are broken as far as a look tells."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hpc_train.checkpoint import manifest as manifests
from hpc_train.checkpoint.manifest import Broken, Manifest
from hpc_train.checkpoint.names import CHECKPOINTS, MANIFEST, step_of
from hpc_train.errors import UserError


class Saved(NamedTuple):
    """A checkpoint that has a manifest; its files were not looked at."""

    path: Path
    manifest: Manifest


class Listing(NamedTuple):
    """`saved`, the newest first, and the rest, by path, with the cause."""

    saved: list[Saved]
    broken: dict[Path, str]


def list_directory(directory: Path) -> Listing:
    """What is in a directory of checkpoints; nothing when there is no such directory.

    The newest is the one that was written last: a run that went back to an earlier step goes on from
    what it has done since.  Raises OSError.
    """
    listing = Listing([], {})
    if not directory.is_dir():
        return listing
    for path in sorted(path for path in directory.iterdir() if step_of(path.name) is not None):
        try:
            listing.saved.append(Saved(path, manifests.read(path)))
        except Broken as error:
            listing.broken[path] = str(error)
    listing.saved.sort(key=lambda saved: saved.manifest.serial, reverse=True)
    return listing


def look(path: Path) -> Listing:
    """What a person means by `path`: one checkpoint, a directory of them, or a run's directory.

    Raises:
        UserError: it is none of these, or has no checkpoint.
        OSError: it cannot be read.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "is not there"
        raise UserError(f"{path} {what}: give the directory of a run or of a checkpoint")
    if step_of(path.name) is not None or (path / MANIFEST).exists():
        try:
            return Listing([Saved(path, manifests.read(path))], {})
        except Broken as error:
            return Listing([], {path: str(error)})
    inside = path / CHECKPOINTS
    listing = list_directory(inside if inside.is_dir() else path)
    if not listing.saved and not listing.broken:
        raise UserError(f"{path} holds no checkpoint (looked for {CHECKPOINTS}/step-*/{MANIFEST})")
    return listing


def first_whole(listing: Listing, check: Callable[[Saved], str]) -> tuple[Saved | None, dict[Path, str]]:
    """The newest checkpoint in which `check` finds no fault; those passed over, by path, with the cause."""
    passed = dict(listing.broken)
    for saved in listing.saved:
        cause = check(saved)
        if not cause:
            return saved, passed
        passed[saved.path] = cause
    return None, passed


def none_whole(path: Path, passed: dict[Path, str]) -> UserError:
    """What to raise when all that is at `path` is broken."""
    first, cause = next(iter(passed.items()))
    if list(passed) == [path]:
        return UserError(f"{path} is not whole: {cause}")
    return UserError(f"{path} has no whole checkpoint, but {len(passed)} broken: {first.name}: {cause}")

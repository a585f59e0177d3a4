"""The checkpoints of a run on disk: written by all ranks together, whole or not at all.

    RUN/checkpoints/step-00000100/
        layers-0-3-1f0c9a2b.safetensors     by the rank that holds layers 0 to 3
        layers-4-6-77d02e51.safetensors     by the rank that holds layers 4 to 6
        manifest.json                       by rank 0: all of the files, with their checksums

The order of writing:

    1  every writer   its file: temporary name, fsync, rename, fsync of the directory
    2  all            agree that all files were written
    3  rank 0         the manifest, in the same way: the checkpoint is whole from this rename on
    4  all            agree that it was
    5  rank 0         removes what an older writing of this step has left, and the oldest checkpoints

File names are new at every writing, so that the older checkpoint of the same step is whole until 3.
"""

import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from hpc_train.checkpoint import manifest as manifests
from hpc_train.checkpoint import tensor_file
from hpc_train.checkpoint.agreement import attempt, share
from hpc_train.checkpoint.listing import Listing, Saved, first_whole, list_directory, look, none_whole
from hpc_train.checkpoint.manifest import FORMAT, Broken, FileRecord, Manifest, TensorRecord
from hpc_train.checkpoint.matching import Shapes, layers_left, layers_of, mismatch, usable
from hpc_train.checkpoint.names import MANIFEST, group_file, is_ours, layer_of, step_directory, step_of
from hpc_train.comm.interface import ControlPlane
from hpc_train.errors import UserError

Cut = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Loaded:
    """What `load` found: this rank's tensors, by name, and the state that every rank gets."""

    path: Path
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Store:
    """The checkpoints in `directory`, of which the newest `keep` whole ones are kept.

    Every method is collective: all ranks call it, and all return or all raise.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self._keep = keep
        self._distrusted: set[Path] = set()  # found broken by `load`, however whole they look

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        control: ControlPlane,
        writer: bool,
    ) -> Path:
        """Write the checkpoint of `step`, and return its directory.

        Args:
            step: how many steps are done.
            tensors: this rank's, by layer name; no two writers have the same.
            state: whatever else is wanted back, for JSON; rank 0's is written.
            control: all ranks.
            writer: whether this rank writes its tensors; others pass what they like.

        Raises:
            UserError: it could not be written on some rank; earlier checkpoints are as they were.
        """
        path = self.directory / step_directory(step)
        layers = {layer_of(name) for name in tensors} if writer else set()
        mine = path / group_file(layers, secrets.token_hex(4)) if layers else None

        def write() -> dict[str, Any] | None:
            if mine is None:
                return None
            path.mkdir(parents=True, exist_ok=True)
            record = tensor_file.write(mine, tensors)
            held = {
                name: TensorRecord(
                    file=mine.name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")
                ).model_dump()
                for name, tensor in tensors.items()
            }
            return {"file": mine.name, "record": record.model_dump(), "tensors": held}

        cannot = f"cannot save {path}"
        leads = control.rank == 0
        try:
            parts = attempt(control, cannot, write)
            attempt(control, cannot, lambda: self._complete(path, step, parts, state) if leads else None)
        except UserError:
            _take_back(path, mine)
            control.barrier()
            if leads and path.is_dir() and not any(path.iterdir()):
                with suppress(OSError):  # as with the file: the cause is told already
                    path.rmdir()
            raise
        self._distrusted.discard(path.resolve())
        if leads:
            self._tidy(path)
        control.barrier()  # or the next save of this step would see its new files tidied away
        return path

    def load(
        self,
        which: Literal["auto"] | Path,
        wanted: Shapes,
        control: ControlPlane,
        note: Callable[[str], None] = lambda line: None,
        cut: Cut = tensor_file.own,
    ) -> Loaded | None:
        """Read this rank's part of a checkpoint, whatever grid has written it.

        Args:
            which: "auto" is the newest whole one of this store, if there is any; a path is one
                checkpoint, or a run's directory for its newest whole one.
            wanted: names and shapes that this rank wants, as `snapshot.shapes` gives them.  Optimizer
                state that the checkpoint lacks is left out of what is returned.
            control: all ranks.
            note: told on rank 0, a line each: which checkpoints were passed over, and why.
            cut: makes of a tensor that was read, by its name, what is kept: a copy of a part, say.

        Raises:
            UserError: there is no whole checkpoint at a path, or it is one of another model.
        """
        saved = self._find(which, control, note)
        if saved is None:
            return None
        path, manifest = saved
        held = manifest.shapes
        parts = share(control, [mismatch(held, wanted), sorted(layers_of(wanted))])
        reasons = [reason for reason, _ in parts if reason]
        left = layers_left(held, {layer for _, layers in parts for layer in layers})
        if reasons or left:
            raise UserError(
                f"{path} is of another model: {reasons[0] if reasons else left}: "
                "use the settings it was made with, or begin anew with --resume never"
            )
        names, anew = usable(held, wanted)
        tensors: dict[str, Tensor] = {}
        attempt(control, f"cannot load {path}", lambda: tensors.update(_read(path, manifest, names, cut)))
        beginning = [part for part in share(control, anew[:1]) if part]
        if beginning and control.rank == 0:
            note(
                f"{path} has no optimizer state that fits {beginning[0][0]}"
                f"{' and others' if len(anew) > 1 or len(beginning) > 1 else ''}: it begins anew there"
            )
        return Loaded(path, tensors, manifest.state)

    def _find(
        self, which: Literal["auto"] | Path, control: ControlPlane, note: Callable[[str], None]
    ) -> Saved | None:
        """The checkpoint to load, checked.  Rank 0 lists them for all: its disk has the manifests."""
        where = self.directory if which == "auto" else which

        def listed() -> Any:
            if control.rank:
                return None
            found = list_directory(where) if which == "auto" else look(where)
            return [
                [(str(saved.path), saved.manifest.to_text()) for saved in found.saved],
                [(str(path), cause) for path, cause in found.broken.items()],
            ]

        saved, broken = attempt(control, "cannot resume", listed)[0]
        listing = Listing(
            [Saved(Path(path), Manifest.from_text(text)) for path, text in saved],
            {Path(path): cause for path, cause in broken},
        )
        found, passed = first_whole(listing, lambda saved: _check(saved, control))
        self._distrusted |= {path.resolve() for path in passed}
        if found is None and passed and which != "auto":
            raise none_whole(which, passed)
        if control.rank == 0:
            for path, cause in passed.items():
                note(f"warning: passing over {path}: {cause}")
        return found

    def _complete(
        self, path: Path, step: int, parts: list[dict[str, Any] | None], state: Mapping[str, Any]
    ) -> None:
        """Write the manifest of what all ranks have written."""
        files: dict[str, FileRecord] = {}
        tensors: dict[str, TensorRecord] = {}
        for rank, part in enumerate(parts):
            if part is None:
                continue
            if not (path / part["file"]).exists():
                raise UserError(
                    f"{part['file']}, written by rank {rank}, is not to be seen here: "
                    "put the run's directory on a file system that all hosts share"
                )
            files[part["file"]] = FileRecord(**part["record"])
            for name, record in part["tensors"].items():
                assert name not in tensors, f"{name} has two writers"
                tensors[name] = TensorRecord(**record)
        path.mkdir(parents=True, exist_ok=True)
        manifests.sync_directory(self.directory)
        serial = max((saved.manifest.serial for saved in list_directory(self.directory).saved), default=0) + 1
        manifests.write(
            path,
            Manifest(
                format=FORMAT, step=step, serial=serial, files=files, tensors=tensors, state=dict(state)
            ),
        )

    def _tidy(self, written: Path) -> None:
        """Remove what no checkpoint needs.  What cannot be removed is told, and keeps nothing else."""
        try:
            files = manifests.read(written).files
            left = [path for path in written.iterdir() if is_ours(path.name) and path.name not in files]
            left += self._outdated()
        except (OSError, Broken) as error:
            left = []
            warnings.warn(f"old checkpoints were not removed: {error}", stacklevel=3)
        for path in left:
            try:
                _remove(path)
            except OSError as error:
                warnings.warn(f"{path} was not removed: {error}", stacklevel=3)

    def _outdated(self) -> list[Path]:
        """All whole checkpoints but the newest, and broken ones of steps before those that are kept."""
        listing = list_directory(self.directory)
        trusted = [saved for saved in listing.saved if saved.path.resolve() not in self._distrusted]
        whole = [saved.path for saved in trusted if _looks_whole(saved)]
        kept = whole[: self._keep]
        if len(kept) < self._keep:
            return []
        oldest = min(step_of(path.name) or 0 for path in kept)
        broken = ({saved.path for saved in listing.saved} | set(listing.broken)) - set(whole)
        return whole[self._keep :] + sorted(p for p in broken if (step_of(p.name) or 0) < oldest)


def _remove(path: Path) -> None:
    """Remove a file, or a checkpoint: its manifest first, as what is half removed must not look whole."""
    if not path.is_dir():
        path.unlink()
        return
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def _looks_whole(saved: Saved) -> bool:
    """All files are there and have their sizes; reading them all for the checksums would take too long."""
    sizes = {file.name: file.stat().st_size for file in saved.path.iterdir()}
    return all(sizes.get(name) == record.bytes for name, record in saved.manifest.files.items())


def _check(saved: Saved, control: ControlPlane) -> str:
    """What is wrong with a checkpoint's files, "" if nothing; ranks divide the files among them."""
    cause = ""
    for name in sorted(saved.manifest.files)[control.rank :: control.size]:
        try:
            tensor_file.check(saved.path / name, saved.manifest.files[name])
        except Broken as error:
            cause = str(error)
            break
    causes = [cause for cause in share(control, cause) if cause]
    return causes[0] if causes else ""


def _read(path: Path, manifest: Manifest, names: list[str], cut: Cut) -> dict[str, Tensor]:
    """These tensors, cut, from whichever files hold them."""
    by_file: dict[str, list[str]] = {}
    for name in names:
        by_file.setdefault(manifest.tensors[name].file, []).append(name)
    tensors: dict[str, Tensor] = {}
    for file, wanted in by_file.items():
        tensors.update(tensor_file.read(path / file, wanted, cut))
    return tensors


def _take_back(path: Path, mine: Path | None) -> None:
    """Remove this rank's file of a save that failed, unless the manifest got in place after all."""
    if mine is None:
        return
    try:
        in_place = manifests.read(path).files
    except Broken:
        in_place = {}
    if mine.name not in in_place:
        with suppress(OSError):  # the failure that led here is what is told
            mine.unlink(missing_ok=True)

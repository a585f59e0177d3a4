"""A run directory: metrics.jsonl, config.toml, environment.json."""

import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from hpc_train.comm.interface import World
from hpc_train.config import Settings
from hpc_train.errors import UserError

_PACKAGES = ("hpc_train", "torch", "numpy", "mpi4py")


class RunDirectory:
    """Where a run leaves what can be read later.  Rank 0 writes; the others only take part.

    Args:
        path: made by `start`.
        writer: true on the rank that writes.
    """

    def __init__(self, path: Path, writer: bool) -> None:
        self.path = path
        self._writer = writer
        self._metrics: TextIO | None = None

    def set_aside(self) -> Path | None:
        """Rename an earlier run of this name, so that nothing is lost or mixed; returns its new path.

        Raises:
            UserError: the path is no directory, or cannot be renamed; on the rank that writes.
        """
        try:
            if not self._writer or not (self.path.exists() and any(self.path.iterdir())):
                return None
            number = 1
            while (aside := self.path.parent / f"{self.path.name}.old-{number}").exists():
                number += 1
            return self.path.rename(aside)
        except OSError as error:
            raise UserError(
                f"{self.path}: an earlier run cannot be moved aside: {error.strerror}: "
                "choose another --run-dir"
            ) from None

    def start(
        self, settings: Settings, world: World, resumed_at: int, gradient_sums: Sequence[str] = ()
    ) -> None:
        """Write config and environment, and drop metrics of steps after `resumed_at`.  Collective.

        `gradient_sums`: how they are made, a line each, for the environment.

        Raises:
            UserError: the directory cannot be written; on all ranks.
        """
        hosts: dict[str, list[int]] = {}
        for rank, name in enumerate(world.control.all_gather(world.host.encode())):
            hosts.setdefault(name.decode(), []).append(rank)
        mistake = ""
        if self._writer:
            try:
                self._write(settings, world, hosts, resumed_at, gradient_sums)
            except OSError as error:
                mistake = f"{self.path}: cannot be written: {error.strerror}: choose another --run-dir"
        told = next(filter(None, world.control.all_gather(mistake.encode())), b"")
        if told:
            raise UserError(told.decode())

    def add_fact(self, name: str, value: Any) -> None:
        """Keep what was found out during the run in environment.json, too."""
        if self._metrics is not None:
            path = self.path / "environment.json"
            known = json.loads(path.read_text(encoding="utf-8"))
            _replace(path, json.dumps({**known, name: value}, indent=2) + "\n")

    def record(self, line: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl; numbers that are not finite become null, which JSON knows."""
        if self._metrics is not None:
            self._metrics.write(json.dumps({key: _finite(value) for key, value in line.items()}) + "\n")
            self._metrics.flush()

    def close(self) -> None:
        """Close the file."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def _write(
        self,
        settings: Settings,
        world: World,
        hosts: Mapping[str, list[int]],
        resumed_at: int,
        gradient_sums: Sequence[str],
    ) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.toml").write_text(settings.to_toml(), encoding="utf-8")
        environment = {
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": sys.argv,
            "versions": {"python": platform.python_version(), **_versions()},
            "world": world.describe(),
            "hosts": hosts,
            "gradient_sums": list(gradient_sums),
        }
        text = json.dumps(environment, indent=2, default=str) + "\n"
        (self.path / "environment.json").write_text(text, encoding="utf-8")
        metrics = self.path / "metrics.jsonl"
        kept = _lines_up_to(metrics, resumed_at)
        _replace(metrics, "".join(kept))
        self._metrics = metrics.open("a", encoding="utf-8")


def _replace(path: Path, text: str) -> None:
    """Write a file anew; killed at any moment, it is the old or the new one."""
    renewed = path.with_suffix(".new")
    renewed.write_text(text, encoding="utf-8")
    os.replace(renewed, path)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # mpi4py is not needed by one rank
            found[name] = "not installed"
    return found


def _lines_up_to(metrics: Path, step: int) -> list[str]:
    """The whole lines of steps up to `step`: later ones will be made again, a kill may tear the last."""
    if not metrics.exists():
        return []
    kept = []
    for text in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and line.get("step", math.inf) <= step:
            kept.append(f"{text}\n")  # a kill may have torn off the line's end alone
    return kept


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

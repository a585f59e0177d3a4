"""grid = "auto" in a run that goes on: on as many ranks it keeps what was chosen, and measures nothing.

A measurement may turn out otherwise the second time, and with another micro-batch layers draw other
random numbers: a run that was stopped would not go on as it had begun.
"""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpc_train.checkpoint.listing import list_directory, look
from hpc_train.checkpoint.names import CHECKPOINTS
from hpc_train.comm.interface import World
from hpc_train.config import Settings, changed
from hpc_train.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_CHOSEN = {
    "grid": ("stages", "fastest"),
    "batch": ("micro_batch",),
    "pipeline": ("schedule", "chunks", "split", "recompute", "wire"),
    "gradients": ("wire",),
}


def kept_plan(
    settings: Settings, num_layers: int, world: World, run_dir: Path, resume: str
) -> tuple[Settings, str] | None:
    """The settings with what the checkpoint's run had chosen, and a line that says so.  All ranks together.

    None where there is no checkpoint, or it is of another number of ranks, or what it has chosen is not what
    the settings give or allow now.

    Args:
        settings: as given, with `grid.auto`.
        num_layers: of the model.
        world: all ranks.
        run_dir: of the run.
        resume: "auto", "never" or a path, as for the trainer.
    """
    found = _newest(run_dir, resume) if world.rank == 0 else None
    path, ranks, text = json.loads(world.control.all_gather(json.dumps(found).encode())[0]) or (None, 0, "")
    if ranks != world.size:
        return None
    try:
        saved = Settings.model_validate(tomllib.loads(text))
        values = {
            f"{section}.{key}": _value(saved, section, key)
            for section, keys in _CHOSEN.items()
            for key in keys
        }
        closed = {"grid.auto": False, "gradients.tune_wires": _left(settings), "pipeline.tune_wires": ()}
        kept = changed(settings, {**values, **closed})
    except (tomllib.TOMLDecodeError, ValidationError, UserError):
        return None  # of another version, or it does not go with what is given now
    split = saved.pipeline.split
    if saved.batch.size != settings.batch.size or (split != "auto" and sum(split) != num_layers):
        return None
    if not all(_allows(settings, name, value) for name, value in values.items()):
        return None
    stages = saved.grid.stages
    grid = f"{world.size // stages}x{stages} replicas x stages"
    line = f"{grid}, {saved.pipeline.schedule}, micro-batches of {saved.batch.micro_batch}"
    return kept, f"grid=auto goes on as {path} had chosen: {line}"


def _newest(run_dir: Path, resume: str) -> tuple[str, int, str] | None:
    """The checkpoint that will be gone on from, as far as a look tells; its ranks and settings."""
    if resume == "never":
        return None
    try:
        found = list_directory(run_dir / CHECKPOINTS) if resume == "auto" else look(Path(resume))
    except (OSError, UserError):
        return None  # the trainer tells it
    if not found.saved:
        return None
    state = found.saved[0].manifest.state
    return str(found.saved[0].path), int(state.get("ranks", 0)), str(state.get("settings", ""))


def _value(settings: Settings, section: str, key: str) -> Any:
    return getattr(getattr(settings, section), key)


def _left(settings: Settings) -> tuple[str, ...]:
    """Wires that tuning may still try."""
    return settings.gradients.tune_wires if settings.gradients.tune else ()


def _allows(settings: Settings, name: str, value: Any) -> bool:
    """Whether the settings leave a key open, or give it this value, or list it where they list wires."""
    section, key = name.split(".")
    given = _value(settings, section, key)
    if key == "wire":
        return value in (given, *_value(settings, section, "tune_wires"))
    is_open = key not in getattr(settings, section).model_fields_set or given in ("auto", 0)
    return is_open or given == value

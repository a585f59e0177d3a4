"""Settings: a TOML file and `section.key=value` overrides become frozen, checked values.

settings = load("examples/bytelm.toml", ["grid.stages=1", "optimizer.learning_rate=1e-3"])
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from hpc_train.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: int | str) -> int:
    """`4MiB` or `65536` in bytes."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write for instance 4MiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


Bytes = Annotated[PositiveInt, BeforeValidator(parse_bytes)]


WireName = Literal["fp32", "fp16", "bf16", "int8"]
PipelineWireName = Literal["fp32", "fp16", "bf16"]


_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


def _check_schedule(name: str) -> str:
    if name not in _SCHEDULES and not name.endswith(".csv"):
        raise ValueError(f"known are {', '.join(_SCHEDULES)}, and files that end in .csv")
    return name


ScheduleName = Annotated[str, AfterValidator(_check_schedule)]


class Section(BaseModel):
    """Every section is closed (an unknown key is an error) and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GridSettings(Section):
    """How the ranks are laid out; replicas = ranks / stages.

    `grid = "auto"` instead of a section leaves to a measurement at the start whatever of grid, micro-batch
    and pipeline the settings do not give.
    """

    stages: PositiveInt = 1
    fastest: Literal["stage", "replica"] = "stage"
    auto: bool = False


def _read_grid(value: Any) -> Any:
    return {"auto": True} if value == "auto" else value


class BatchSettings(Section):
    """`size`: samples of one step, over all replicas.  `micro_batch`: samples that flow together."""

    size: PositiveInt = 32
    micro_batch: PositiveInt = 8


class TrainSettings(Section):
    """Length and rhythm of the run."""

    steps: PositiveInt = 100
    evaluate_every: NonNegativeInt = 0  # 0: only at the end
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: NonNegativeInt = 0  # torch threads of a rank; 0: the cores it really has


class OptimizerSettings(Section):
    """The update, and the learning rate over the steps."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: PositiveFloat = 1e-3
    final_learning_rate: NonNegativeFloat = 0.0  # where cosine decay ends
    decay: Literal["cosine", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: NonNegativeFloat = 0.9
    clip_norm: NonNegativeFloat = 0.0  # one norm over all stages; 0: no clipping
    sharded: bool = False  # each replica keeps and updates its share of the optimizer's state


class GradientSettings(Section):
    """How gradients are summed."""

    wire: WireName = "fp32"
    error_feedback: bool | Literal["auto"] = "auto"  # auto: for int8 and powersgd
    compression: Literal["none", "powersgd"] = "none"
    powersgd_rank: PositiveInt = 16
    powersgd_warm_up_steps: NonNegativeInt = 100  # steps that send whole gradients first
    bucket_bytes: Bytes = 4 * 2**20
    overlap: bool = True  # sum in a thread while backward runs
    local_steps: PositiveInt = 1  # H > 1: no gradient sums; parameters are averaged every H steps
    tune: bool = False  # try bucket sizes and wires over the first steps
    tune_wires: tuple[WireName, ...] = ()  # that tune, or grid = "auto", may choose beside `wire`


class PipelineSettings(Section):
    """How layers become stages, and in which order micro-batches flow."""

    schedule: ScheduleName = "1f1b"  # or a file in PyTorch's notation that ends in .csv
    chunks: NonNegativeInt = 0  # that a stage holds; 0: as the schedule has it, 2 with interleaved
    split: Literal["auto"] | tuple[PositiveInt, ...] = "auto"  # or layers of each chunk: [4, 2]
    wire: PipelineWireName = "fp32"  # of activations and their gradients between stages
    tune_wires: tuple[PipelineWireName, ...] = ()  # that grid = "auto" may choose beside `wire`
    recompute: Literal["none", "all", "auto"] = "none"  # activations in backward, instead of keeping them


class CheckpointSettings(Section):
    """Saving: every so many steps (0: only at the end), and how many to keep."""

    every: NonNegativeInt = 0
    keep: PositiveInt = 3


class DataSettings(Section):
    """Loading: worker processes of each rank that reads data; 0 loads in the rank itself."""

    workers: NonNegativeInt = 0


class CommSettings(Section):
    """Which backend carries gradients and activations."""

    backend: Literal["auto", "mpi", "gloo", "nccl", "horovod"] = "auto"


class Settings(Section):
    """All of it, as resolved."""

    task: str
    name: str = ""
    seed: NonNegativeInt = 0
    task_options: dict[str, Any] = Field(default_factory=dict)
    grid: Annotated[GridSettings, BeforeValidator(_read_grid)] = GridSettings()
    batch: BatchSettings = BatchSettings()
    train: TrainSettings = TrainSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    gradients: GradientSettings = GradientSettings()
    pipeline: PipelineSettings = PipelineSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    data: DataSettings = DataSettings()
    comm: CommSettings = CommSettings()

    def to_toml(self) -> str:
        """The settings as a file that `load` reads back."""
        return tomli_w.dumps(self.model_dump(mode="json"))


def load(path: str | Path, overrides: Sequence[str] = ()) -> Settings:
    """Read a TOML file, apply `section.key=value` overrides, and check it all.

    Raises:
        UserError: the file is not there or not TOML, or a setting is unknown or wrong.
    """
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file (looked in {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not TOML: {error}") from None
    for text in overrides:
        _override(raw, text)
    raw.setdefault("name", path.stem)
    try:
        settings = Settings.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{path}: {_explain(error)}") from None
    _check_together(settings)
    return settings


def changed(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """The settings with other values, by `section.key`; all others count as not given where they were not.

    Raises:
        UserError: they do not fit together.
    """
    raw = settings.model_dump(exclude_unset=True)
    for name, value in values.items():
        section, _, key = name.partition(".")
        raw.setdefault(section, {})[key] = value
    result = Settings.model_validate(raw)
    _check_together(result)
    return result


def _check_together(settings: Settings) -> None:
    """Raise UserError for settings that are right alone and wrong together."""
    batch, gradients = settings.batch, settings.gradients
    if batch.micro_batch > batch.size:
        raise UserError(
            f"batch.micro_batch={batch.micro_batch} is more than batch.size={batch.size}: "
            f"set it to at most {batch.size}"
        )
    if gradients.local_steps > 1:
        others = {"wire": "fp32", "compression": "none", "tune": False}
        for name, unused in others.items():
            if (value := getattr(gradients, name)) != unused:
                raise UserError(
                    f"gradients.local_steps={gradients.local_steps} averages parameters in fp32 and sums no "
                    f"gradients, but gradients.{name}={str(value).lower()}: "
                    f"set it to {str(unused).lower()}, or local_steps to 1"
                )
    if settings.optimizer.sharded and gradients.local_steps > 1:
        raise UserError(
            f"optimizer.sharded=true shares the update of every step, but with gradients.local_steps="
            f"{gradients.local_steps} each replica makes its own: set one of them to false or 1"
        )
    planned = settings.grid.auto and gradients.local_steps == 1
    if gradients.tune_wires and not (gradients.tune or planned):
        raise UserError(
            f"gradients.tune_wires={','.join(gradients.tune_wires)} are tried by gradients.tune=true "
            'and grid="auto" only'
        )
    if settings.pipeline.tune_wires and not settings.grid.auto:
        raise UserError(
            f'pipeline.tune_wires={",".join(settings.pipeline.tune_wires)} are tried by grid="auto" only'
        )
    if settings.optimizer.sharded and gradients.compression != "none":
        raise UserError(
            f"optimizer.sharded=true sums shards of gradients, but gradients.compression="
            f"{gradients.compression} sums whole ones: set one of them to false or none"
        )


def _override(raw: dict[str, Any], text: str) -> None:
    """Set one `section.key=value` in the raw tables; the value is TOML, or else a plain string."""
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f"{text!r} is not an override: write section.key=value, for instance batch.size=64")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    table = raw
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise UserError(f"{text!r}: {key!r} is a value, not a section")
    table[keys[-1]] = parsed


def _explain(error: ValidationError) -> str:
    """The first thing that is wrong, in one line, and how many more there are."""
    first, *more = error.errors()
    place = [part for part in map(str, first["loc"]) if not part.startswith(("literal[", "tuple["))]
    name = ".".join(place)
    if first["type"] == "extra_forbidden":
        section: Any = Settings
        for part in place[:-1]:
            section = section.model_fields[part].annotation
        text = f"unknown setting {name}: known here are {', '.join(sorted(section.model_fields))}"
    elif first["type"] == "missing":
        text = f"setting {name} is missing"
    else:
        text = f"{name}={first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return text + (f" (and {len(more)} more)" if more else "")

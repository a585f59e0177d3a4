"""Names of state and of files: by layer, never by rank.  PURE: neither torch nor MPI.

layers.3.weight                        a parameter or a buffer
optimizer/layers.3.weight/exp_avg      what the optimizer keeps for it
residual/layers.3.weight               what lossy sums still owe its gradient, over all replicas
powersgd/layers.3.weight               the last Q of its gradient's thin matrices

RUN/checkpoints/step-00000100/manifest.json
RUN/checkpoints/step-00000100/layers-0-3-1f0c9a2b.safetensors
"""

import re
from collections.abc import Iterable

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"

_OPTIMIZER = "optimizer/"
_RESIDUAL = "residual/"
_BASIS = "powersgd/"
_LAYER = re.compile(r"(?:(?:optimizer|residual|powersgd)/)?layers\.(\d+)\.")
_FILE = re.compile(
    r"layers-[\d-]+-[0-9a-f]+\.safetensors"
    r"|\.(?:layers-.*|manifest\.json)\.tmp"
    r"|\.tmp\w{6}"  # what safetensors leaves when it is killed in the middle of writing
)
_STEP = re.compile(r"step-(\d{8,})")


def step_directory(step: int) -> str:
    """The directory of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_of(directory: str) -> int | None:
    """The step in the name of a checkpoint's directory, or None for another directory."""
    match = _STEP.fullmatch(directory)
    return int(match[1]) if match else None


def group_file(layers: Iterable[int], token: str) -> str:
    """The file of a group of layers; the token tells two writings of the same step apart."""
    ends = sorted(layers)
    span = f"{ends[0]}-{ends[-1]}" if len(ends) > 1 else f"{ends[0]}"
    return f"layers-{span}-{token}.safetensors"


def is_ours(file: str) -> bool:
    """True for a file that saving makes, whole or not; False for what people put beside it."""
    return _FILE.fullmatch(file) is not None


def layer_of(name: str) -> int:
    """The layer that a tensor belongs to.  Raises ValueError when its name does not say so."""
    match = _LAYER.match(name)
    if match is None:
        raise ValueError(f"state is named by layer, such as layers.3.weight: {name!r} is not")
    return int(match[1])


def optimizer_name(parameter: str, key: str) -> str:
    """The name of the optimizer state `key` of a parameter."""
    return f"{_OPTIMIZER}{parameter}/{key}"


def split_optimizer_name(name: str) -> tuple[str, str] | None:
    """(parameter, key) of an optimizer state's name, None for a parameter or buffer."""
    if not name.startswith(_OPTIMIZER):
        return None
    parameter, _, key = name[len(_OPTIMIZER) :].rpartition("/")
    return parameter, key


def residual_name(parameter: str) -> str:
    """The name of the residual of a parameter's gradient."""
    return _RESIDUAL + parameter


def basis_name(parameter: str) -> str:
    """The name of the Q of a parameter's gradient."""
    return _BASIS + parameter


def split_sum_name(name: str) -> tuple[str, bool] | None:
    """(parameter, whether it is a residual) of what sums remember, None for all else."""
    for prefix in (_RESIDUAL, _BASIS):
        if name.startswith(prefix):
            return name[len(prefix) :], prefix == _RESIDUAL
    return None


def is_model(name: str) -> bool:
    """True for a parameter or buffer, False for what the optimizer and sums remember."""
    return not name.startswith((_OPTIMIZER, _RESIDUAL, _BASIS))

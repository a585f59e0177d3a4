"""What a model wants of a checkpoint, compared with what that has.  PURE: neither torch nor MPI."""

from collections.abc import Collection, Iterable, Mapping

from hpc_train.checkpoint.names import is_model, layer_of, split_optimizer_name, split_sum_name

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


def mismatch(held: Shapes, wanted: Shapes) -> str:
    """Why layers of a model (`wanted`) cannot be filled from a checkpoint (`held`); "" when they can.

    Only parameters and buffers count: the optimizer may begin anew.
    """
    mine = {name: shape for name, shape in wanted.items() if is_model(name)}
    layers = layers_of(mine)
    theirs = {name: shape for name, shape in held.items() if is_model(name)}
    for name, shape in mine.items():
        if name not in theirs:
            return f"the model's {name} {list(shape)} is not in it: it holds {spans(layers_of(theirs))}"
        if theirs[name] != shape:
            return f"{name} is {list(theirs[name])} there and {list(shape)} in this model"
    for name, shape in theirs.items():
        if name not in mine and layer_of(name) in layers:
            return f"its {name} {list(shape)} is not in this model"
    return ""


def layers_left(held: Shapes, layers: Collection[int]) -> str:
    """Why a model of these layers, all ranks' together, is smaller than the checkpoint; "" if it is not."""
    more = layers_of(held) - set(layers)
    return f"it holds {spans(layers_of(held))}, and this model has only {spans(layers)}" if more else ""


def usable(held: Shapes, wanted: Shapes) -> tuple[list[str], list[str]]:
    """The names to read, and the parameters whose optimizer state begins anew.

    What sums remember is taken where it is there and fits; else it begins anew, and nothing is told of it.

    The state of a parameter is taken whole or not at all: half of it (from another optimizer, or from
    before the first step) would be a state that never was.
    """
    names = [name for name in wanted if is_model(name)]
    names += [name for name in wanted if split_sum_name(name) and held.get(name) == wanted[name]]
    states: dict[str, list[str]] = {}
    for name in wanted:
        if parts := split_optimizer_name(name):
            states.setdefault(parts[0], []).append(name)
    anew = []
    for parameter, parts_of_it in states.items():
        if all(held.get(name) == wanted[name] for name in parts_of_it):
            names += parts_of_it
        else:
            anew.append(parameter)
    return names, anew


def layers_of(names: Iterable[str]) -> set[int]:
    """The layers that these parameters and buffers belong to."""
    return {layer_of(name) for name in names if is_model(name)}


def spans(layers: Iterable[int]) -> str:
    """`layers 0-3, 5`, or `no layers`."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    named = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"layers {named}" if runs else "no layers"

"""The layers that one rank holds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hpc_train.pipeline.layers import apply_layer


class Stage(nn.Module):
    """Neighbouring layers of the model, under the names that they have in the whole model.

    `named_parameters`, `named_buffers` and `state_dict` give `layers.3.weight` on whatever rank
    layer 3 stands. A stage may have no parameters, or none that is trained.

    Args:
        modules: pairs of a name (`layers.3`, from `layers.layer_name`) and the module, in order.
        is_first, is_last: whether it holds the model's first and last layer.
        device: where activations are received; by default where the parameters and buffers are.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        is_first: bool,
        is_last: bool,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.layer_names = tuple(name for name, _ in modules)
        self.is_first = is_first
        self.is_last = is_last
        self.layers = nn.ModuleDict()
        for name, module in modules:
            whole, _, key = name.partition(".")
            assert whole == "layers", f"{name} is not the name of a layer"
            self.layers[key] = module
        held = next(iter([*self.parameters(), *self.buffers()]), None)
        self.device = device or (torch.device("cpu") if held is None else held.device)

    def forward(self, inputs: Any) -> Any:
        """Pass `inputs` (the model's, or what the stage before gives) through the layers."""
        for layer in self.layers.values():
            inputs = apply_layer(layer, inputs)
        return inputs

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, layers are in eval mode and no graph is recorded; each one's own mode comes back after."""
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

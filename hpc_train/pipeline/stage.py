"""The layers that one rank holds."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

Modules = Sequence[tuple[str, nn.Module]]  # names (`layers.3`, from `layers.layer_name`) and layers, in order


class Chunk:
    """A contiguous run of the model's layers.

    Attributes:
        index: among all chunks of the model.
        layers: each with its number in the model.
    """

    def __init__(self, index: int, modules: Modules) -> None:
        self.index = index
        self.layers = [(int(name.partition(".")[2]), module) for name, module in modules]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that are trained, each once."""
        held = {p: None for _, layer in self.layers for p in layer.parameters() if p.requires_grad}
        return list(held)


class Stage(nn.Module):
    """One chunk of the model or several, its layers under the names that they have in the whole model.

    `named_parameters`, `named_buffers` and `state_dict` give `layers.3.weight` on whatever rank
    layer 3 stands. A stage may have no parameters, or none that is trained.

    Args:
        chunks: the modules of each chunk that is held here, by the chunk's number.
        num_chunks: of the whole model.
        device: where activations are received; by default where the parameters and buffers are.
    """

    def __init__(
        self, chunks: Mapping[int, Modules], num_chunks: int, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.num_chunks = num_chunks
        self.chunks = {index: Chunk(index, modules) for index, modules in sorted(chunks.items())}
        self.layers = nn.ModuleDict()
        for _, modules in sorted(chunks.items()):
            for name, module in modules:
                whole, _, key = name.partition(".")
                assert whole == "layers", f"{name} is not the name of a layer"
                self.layers[key] = module
        held = next(iter([*self.parameters(), *self.buffers()]), None)
        self.device = device or (torch.device("cpu") if held is None else held.device)

    @property
    def is_first(self) -> bool:
        """Whether it holds the model's first layer, which takes the batch's inputs."""
        return 0 in self.chunks

    @property
    def is_last(self) -> bool:
        """Whether it holds the model's last layer, whose output the loss takes."""
        return self.num_chunks - 1 in self.chunks

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

"""Random numbers of a layer, dropout for instance, that depend on the step, the sample and the layer alone.

So they are the same with every schedule, however the layers are cut into stages, when activations
are computed a second time, and when a run is resumed.
"""

import hashlib
import struct

import torch


class Draws:
    """Sets torch's generator before each layer.

    Args:
        device: where the layers compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.default_generator
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generator = torch.cuda.default_generators[index]
        self.step_seed: int | None = None  # None: numbers are drawn on, whatever the layer

    def start(self, sample: int, layer: int) -> None:
        """From here on draw for a layer and the micro-batch that begins with a sample of the batch."""
        if self.step_seed is not None:
            key = struct.pack("<qqq", self.step_seed, sample, layer)
            digest = hashlib.blake2b(key, digest_size=8).digest()
            self._generator.manual_seed(int.from_bytes(digest, "little") >> 1)

    def state(self) -> torch.Tensor:
        """Where the generator is: it changes when something draws."""
        return self._generator.get_state()

"""What each layer of a model costs, as measured, and the file that keeps it.  PURE: neither torch nor MPI.

profile = read_profile("bytelm.profile.json")
profile.layers[3].forward.seconds(8)      # of 8 samples

Seconds are a straight line over the samples of a micro-batch: `fixed_s`, what a call costs, and `sample_s`.
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, NonNegativeFloat, NonNegativeInt, ValidationError

from hpc_train.config import Section
from hpc_train.errors import UserError


class Line(Section):
    """Seconds = `fixed_s` + `sample_s` * samples."""

    fixed_s: NonNegativeFloat = 0.0
    sample_s: NonNegativeFloat = 0.0

    def seconds(self, samples: float) -> float:
        """Of one micro-batch of so many samples."""
        return self.fixed_s + self.sample_s * samples

    @classmethod
    def through(cls, few: tuple[int, float], many: tuple[int, float]) -> "Line":
        """The line through two measurements (samples, seconds) of different sizes.

        Where it would fall, or begin below 0, as it can from noise, it goes through the one with more
        samples, which is measured better: level, or from 0.
        """
        (few_samples, few_s), (many_samples, many_s) = sorted([few, many])
        if few_samples == many_samples:
            raise ValueError(f"two measurements of {few_samples} samples give no line")
        sample_s = (many_s - few_s) / (many_samples - few_samples)
        sample_s = min(max(0.0, sample_s), many_s / many_samples)
        return cls(fixed_s=max(0.0, many_s - sample_s * many_samples), sample_s=sample_s)


class LayerProfile(Section):
    """One layer.

    Attributes:
        title: what people read.
        forward: seconds of a forward pass.
        input: seconds of the backward for the input.
        weight: seconds of the backward for the weights.
        activation_bytes: that a sample's forward keeps until its backward.
        output_bytes: of a sample, as they go to the next layer in fp32.
        parameter_bytes: of all its parameters.
        frozen_bytes: of those among them that are not trained: they have no gradient.
        tied: bytes of those that are one with other layers' parameters, by the name of the tie.
    """

    title: str = ""
    forward: Line = Line()
    input: Line = Line()
    weight: Line = Line()
    activation_bytes: NonNegativeFloat = 0.0
    output_bytes: NonNegativeFloat = 0.0
    parameter_bytes: NonNegativeInt = 0
    frozen_bytes: NonNegativeInt = 0
    tied: Mapping[str, NonNegativeInt] = Field(default_factory=dict)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that have a gradient."""
        return self.parameter_bytes - self.frozen_bytes


class Profile(Section):
    """All layers of a model.

    Attributes:
        layers: in their order.
        optimizer_bytes_a_byte: the optimizer's state for each byte of a trained parameter: 2 for AdamW.
        optimizer_s_a_byte: seconds of its update for each byte of a trained parameter.
        source: where it was measured, for people.
    """

    layers: tuple[LayerProfile, ...]
    optimizer_bytes_a_byte: NonNegativeFloat = 2.0
    optimizer_s_a_byte: NonNegativeFloat = 0.0
    source: str = ""

    def to_json(self) -> str:
        """The profile as a file that `read_profile` reads back."""
        return self.model_dump_json(indent=1) + "\n"


def read_profile(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        UserError: the file is not there, not JSON, or not a profile that a plan can be made of.
    """
    path = Path(path)
    try:
        profile = Profile.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such profile (looked in {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"{path}: {place}: {first['msg']}: measure the profile again") from None
    check_profile(profile, str(path))
    return profile


def check_profile(profile: Profile, name: str = "the profile") -> None:
    """Raise UserError where there is nothing to plan with."""
    if not profile.layers:
        raise UserError(f"{name}: 0 layers: measure a model that has some")
    for index, layer in enumerate(profile.layers):
        tied_bytes = sum(layer.tied.values())
        if max(layer.frozen_bytes, tied_bytes) > layer.parameter_bytes:
            raise UserError(
                f"{name}: layer {index} has {layer.parameter_bytes} bytes of parameters, but "
                f"{layer.frozen_bytes} frozen and {tied_bytes} tied: measure the profile again"
            )
    if not any(line.sample_s + line.fixed_s for layer in profile.layers for line in _lines(layer)):
        raise UserError(f"{name}: all layers take 0 s: measure the profile again")


def _lines(layer: LayerProfile) -> tuple[Line, Line, Line]:
    return layer.forward, layer.input, layer.weight

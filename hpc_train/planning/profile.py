"""What each layer of a model costs, as measured, and the file that keeps it.  PURE: neither torch nor MPI.

profile = read_profile("bytelm.profile.json")
profile.layers[3].forward.seconds(8)      # of 8 samples

Seconds are straight lines between the numbers of samples that were measured.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError, field_validator

from hpc_train.config import Section
from hpc_train.errors import UserError


class Curve(Section):
    """Seconds by the samples of a micro-batch: none without points, in proportion with one.

    Attributes:
        points: (samples, seconds), by samples.
    """

    points: tuple[tuple[PositiveInt, NonNegativeFloat], ...] = ()

    @field_validator("points")
    @classmethod
    def _in_order(cls, points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        samples = [point[0] for point in points]
        if samples != sorted(set(samples)):
            raise ValueError(f"samples {samples} do not rise")
        return points

    def seconds(self, samples: float) -> float:
        """Of one micro-batch of so many samples; beyond the points, on the line through the nearest two."""
        if len(self.points) < 2:
            return sum(seconds / at * samples for at, seconds in self.points)
        after = min(max(1, bisect_left(self.points, (samples, 0.0))), len(self.points) - 1)
        (few, few_s), (many, many_s) = self.points[after - 1 : after + 1]
        on_line_s = few_s + (many_s - few_s) * (samples - few) / (many - few)
        return max(on_line_s, few_s * samples / few) if samples < few else on_line_s

    @property
    def most_s(self) -> float:
        """Of the largest micro-batch that was measured."""
        return self.points[-1][1] if self.points else 0.0

    @classmethod
    def line(cls, fixed_s: float, sample_s: float) -> "Curve":
        """What a call costs, and each sample."""
        return cls(points=((1, fixed_s + sample_s), (2, fixed_s + 2 * sample_s)))

    @classmethod
    def through(cls, measured: Sequence[tuple[int, float]]) -> "Curve":
        """Measurements (samples, seconds), each of another size.

        Where it would fall with more samples, as it can from noise, it is level: the larger micro-batch
        is measured better.
        """
        points = sorted(measured)
        for index in range(len(points) - 2, -1, -1):
            samples, seconds = points[index]
            points[index] = samples, min(seconds, points[index + 1][1])
        return cls(points=tuple(points))


class LayerProfile(Section):
    """One layer.

    Attributes:
        title: what people read.
        forward: seconds of a forward pass.
        input: seconds of the backward for the input.
        weight: seconds of the backward for the weights.
        activation_bytes: that a sample's forward keeps until its backward.
        output_bytes: of a sample, as they go to the next layer in fp32.
        kept_output_bytes: those among them that are activations of this layer, too, and count there.
        parameter_bytes: of all its parameters.
        frozen_bytes: of those among them that are not trained: they have no gradient.
        tied: bytes of those that are one with other layers' parameters, by the name of the tie.
    """

    title: str = ""
    forward: Curve = Curve()
    input: Curve = Curve()
    weight: Curve = Curve()
    activation_bytes: NonNegativeFloat = 0.0
    output_bytes: NonNegativeFloat = 0.0
    kept_output_bytes: NonNegativeFloat = 0.0
    parameter_bytes: NonNegativeInt = 0
    frozen_bytes: NonNegativeInt = 0
    tied: Mapping[str, NonNegativeInt] = Field(default_factory=dict)

    @property
    def curves(self) -> tuple[Curve, Curve, Curve]:
        """Forward, and backward for the input and for the weights."""
        return self.forward, self.input, self.weight

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
    if not any(curve.most_s for layer in profile.layers for curve in layer.curves):
        raise UserError(f"{name}: all layers take 0 s: measure the profile again")

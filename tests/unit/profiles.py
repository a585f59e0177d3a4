"""Models to plan for, with times that are easy to compute by hand."""

from hpc_train.planning.profile import Curve, LayerProfile, Profile


def even_layers(num_layers, sample_s=1.0, fixed_s=0.0, **bytes_):
    """Layers that are all alike: forward, and backward for the input and the weights, take the same time."""
    line = Curve.line(fixed_s, sample_s)
    layer = LayerProfile(forward=line, input=line, weight=line, **bytes_)
    return Profile(layers=[layer] * num_layers)

"""Models to plan for, with times that are easy to compute by hand."""

from hpc_train.planning.profile import LayerProfile, Line, Profile


def even_layers(num_layers, sample_s=1.0, fixed_s=0.0, **bytes_):
    """Layers that are all alike: forward, and backward for the input and the weights, take the same time."""
    line = Line(fixed_s=fixed_s, sample_s=sample_s)
    layer = LayerProfile(forward=line, input=line, weight=line, **bytes_)
    return Profile(layers=[layer] * num_layers)


def transformer(num_layers=96, hidden=4096, sequence=2048, flops=150e12):
    """Embedding, blocks and head, about as they are on a fast GPU; the embedding is tied to the head."""
    embedding_bytes = 50_000 * hidden * 4
    block_s = 24 * hidden**2 * sequence / flops

    def layer(title, shares, activation_bytes, output_bytes, **more):
        lines = [Line(fixed_s=2e-5, sample_s=block_s * share) for share in shares]
        forward, inputs, weight = lines
        return LayerProfile(
            title=title,
            forward=forward,
            input=inputs,
            weight=weight,
            activation_bytes=activation_bytes,
            output_bytes=output_bytes,
            **more,
        )

    passed_bytes = 4 * sequence * hidden
    tied = {"parameter_bytes": embedding_bytes, "tied": {"embedding": embedding_bytes}}
    block = layer("block", (1, 1, 1), 34 * sequence * hidden, passed_bytes, parameter_bytes=48 * hidden**2)
    first = layer("embedding", (0.01, 0, 0.02), passed_bytes, passed_bytes, **tied)
    last = layer("head", (0.35, 0.35, 0.35), 4 * sequence * 50_000, 4, **tied)
    return Profile(layers=[first, *[block] * (num_layers - 2), last], optimizer_s_a_byte=1e-12)

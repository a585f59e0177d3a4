"""How long planning itself takes: 1,024 ranks and a Transformer of 96 layers, on one core."""

import time

from benchmarks.records import Record, record
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.planner import plan
from hpc_train.planning.profile import Curve, LayerProfile, Profile

CASE = "planning for 1024 ranks, 96 layers"
_BATCH_SIZE = 1536
_REPEATS = {False: 5, True: 2}  # --short or not


def measure(short: bool) -> Record:
    """Seconds of `plan`, with all that it does anew each time."""
    cluster = Cluster.read(1024, 8, "80GB", "300GB/s", "25GB/s", "2us", "1us")
    profile = transformer()
    raw_s = []
    for _ in range(_REPEATS[short]):
        began = time.perf_counter()
        planned = plan(profile, cluster, _BATCH_SIZE)
        raw_s.append(time.perf_counter() - began)
    num_bytes = round(sum(layer.trained_bytes for layer in profile.layers))
    return record(
        CASE,
        "hpc_train",
        "fp32",
        num_bytes,
        raw_s,
        "ours",
        choices=planned.considered,
        simulated=planned.simulated,
    )


def transformer(
    num_layers: int = 96, hidden: int = 4096, sequence: int = 2048, flops: float = 150e12
) -> Profile:
    """Embedding, blocks and head, about as they are on a fast GPU; the embedding is tied to the head."""
    embedding_bytes = 50_000 * hidden * 4
    block_s = 24 * hidden**2 * sequence / flops

    def layer(title, shares, activation_bytes, output_bytes, **more):
        curves = [Curve.line(2e-5, block_s * share) for share in shares]
        forward, inputs, weight = curves
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

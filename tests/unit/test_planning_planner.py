"""The planner: by hand, against trying everything, and for a thousand ranks."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from profiles import even_layers

from benchmarks.planner.large import transformer
from hpc_train.comm.interface import Wire
from hpc_train.errors import UserError
from hpc_train.grid import Grid
from hpc_train.pipeline.schedules import find
from hpc_train.pipeline.simulate import simulate
from hpc_train.planning.choice import settings_of
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.options import Options, choices, possible_stages
from hpc_train.planning.planner import Search, plan
from hpc_train.planning.profile import Curve, LayerProfile, Profile

EVERY_WIRE = Options(wires=tuple(Wire), pipeline_wires=(Wire.FP32, Wire.BF16))
SLOW = Cluster(8, 2, memory_bytes=6e9, bandwidth_host=5e9, bandwidth=2e8, latency_host_s=2e-6, latency_s=5e-5)
SMALL = transformer(num_layers=14, hidden=768, sequence=256, flops=2e12)


def test_replicas_win_where_sums_are_free():
    """4 samples of 2 x 3 s on 2 ranks: 12 s as replicas; as stages 3 x (4 + 1) s, with zero bubble 13 s."""
    planned = plan(
        even_layers(2), Cluster(2, 2), 4, Options(schedules=("1f1b", "zb-h1"), recompute=("none",))
    )
    assert [(each.stages, each.schedule, each.step_s) for each in planned.best] == [
        (1, "1f1b", pytest.approx(12)),
        (2, "zb-h1", pytest.approx(13)),
        (2, "1f1b", pytest.approx(15)),
    ]
    assert planned.best[2].bubble == pytest.approx(1 / 5)
    assert planned.best[0].samples_per_s == pytest.approx(4 / 12)
    assert planned.losers == ["micro-batches of 2: just as fast"]


def test_stages_win_where_sums_are_slow():
    """Of 100 bytes at 10 bytes/s each of 2 hosts sends 100: 10 s, of which one bucket's 2 s hide."""
    cluster = Cluster(2, 1, bandwidth=10.0)
    profile = even_layers(2, parameter_bytes=50, output_bytes=5)
    options = Options(schedules=("1f1b",), recompute=("none",), bucket_bytes=10, micro_batches=(1,))
    stages, replicas = plan(profile, cluster, 4, options).best
    # a message takes 0.5 s: stage 0 starts its backwards at 5, 8, 12 and 15 s
    assert (stages.stages, stages.step_s) == (2, pytest.approx(17))
    assert (stages.host_bytes, stages.exposed_sum_s) == (4 * 5, 0)
    # the last backward takes from 8 to 12 s, its first of 10 buckets is there at 8.4 s
    assert (replicas.stages, replicas.step_s) == (1, pytest.approx(8.4 + 10))
    assert (replicas.host_bytes, replicas.exposed_sum_s) == (100, pytest.approx(6.4))


def test_a_candidate_says_what_a_simulation_of_its_settings_says():
    options = replace(EVERY_WIRE, best=12)
    for candidate in plan(SMALL, SLOW, 64, options).best:
        settings = settings_of(candidate)
        stages, micro_batch = settings["grid.stages"], settings["batch.micro_batch"]
        grid = Grid.for_ranks(8, stages, settings["grid.fastest"])
        schedule = find(settings["pipeline.schedule"], settings["pipeline.chunks"])
        split = settings["pipeline.split"]
        assert len(split) == stages * settings["pipeline.chunks"]
        assert sum(split) == 14
        times, start = [], 0
        for size in split:
            layers = SMALL.layers[start : start + size]
            start += size
            forward, inputs, weight = (
                sum(getattr(layer, part).seconds(micro_batch) for layer in layers)
                for part in ("forward", "input", "weight")
            )
            again = forward if settings["pipeline.recompute"] == "all" else 0
            times.append((forward, inputs + again, weight))
        order = schedule.order(stages, -(-(64 // grid.replicas) // micro_batch))
        assert candidate.pipeline_s >= simulate(order, *zip(*times, strict=True)).step_s * 0.999
        assert candidate.step_s >= candidate.pipeline_s + candidate.exposed_sum_s


@pytest.mark.parametrize("options", [Options(), replace(EVERY_WIRE, sharded=True, overlap=False)])
def test_the_best_of_all_is_found_though_few_are_simulated(options):
    cluster = replace(SLOW, speeds=(1.0, 1.0, 0.8, 1.0))
    search = Search(SMALL, cluster, 32, options)
    best = search.best(3)
    assert len(search.drafts) > 100
    played = search.forecast.simulated
    assert played < 0.4 * len(search.drafts)
    fastest = {}
    for draft in search.drafts:
        candidate = search.candidate(draft)
        assert candidate.step_s >= draft.bound_s * (1 - 1e-9), draft.choice
        kind = (candidate.stages, candidate.schedule, candidate.chunks)
        fastest[kind] = min(fastest.get(kind, math.inf), candidate.step_s)
    assert [each.step_s for each in best] == pytest.approx(sorted(fastest.values())[:3])


def test_more_bandwidth_is_never_slower():
    steps_s = []
    for bandwidth in (1e7, 1e8, 1e9, 1e10, math.inf):
        cluster = replace(SLOW, bandwidth=bandwidth)
        steps_s.append(plan(SMALL, cluster, 32, EVERY_WIRE).best[0].step_s)
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[0] > steps_s[-1]


def test_less_memory_never_fits_more_and_is_never_faster():
    counts, steps_s = [], []
    for memory_bytes in (8e9, 4e9, 2e9, 1e9, 7e8):
        search = Search(SMALL, replace(SLOW, memory_bytes=memory_bytes), 32, Options())
        counts.append({draft.choice for draft in search.drafts})
        steps_s.append(search.best(1)[0].step_s)
        assert all(draft.rank_bytes <= memory_bytes for draft in search.drafts)
    assert all(fewer <= more for more, fewer in pairwise(counts))
    assert len(counts[-1]) < len(counts[0])
    assert steps_s == sorted(steps_s)


def test_layers_move_to_where_memory_is():
    """Stage 0 would keep two micro-batches of the layer with large activations: it gets fewer layers."""
    layer = LayerProfile(forward=Curve.line(0, 1), activation_bytes=10)
    profile = Profile(layers=[layer] * 6)
    options = Options(stages=(2,), schedules=("1f1b",), recompute=("none",), micro_batches=(1,))
    assert plan(profile, Cluster(2, 2, memory_bytes=60), 8, options).best[0].split == (3, 3)
    tight = plan(profile, Cluster(2, 2, memory_bytes=40), 8, options).best[0]
    assert (tight.split, tight.rank_bytes) == ((2, 4), 40)


def test_slow_hosts_hold_fewer_layers():
    options = Options(stages=(2,), schedules=("1f1b",), fastest=("replica",))
    cluster = Cluster(4, 2, speeds=(0.5, 1.0))
    assert plan(even_layers(9), cluster, 32, options).best[0].split == (3, 6)


def test_a_sharded_optimizer_fits_where_the_whole_one_does_not():
    profile = even_layers(4, parameter_bytes=100)
    cluster = Cluster(4, 4, memory_bytes=1100)
    whole = plan(profile, cluster, 16, Options(recompute=("none",)))
    assert all(candidate.stages > 1 for candidate in whole.best)
    assert "1 stage: needs 1.6 kB of 1.1 kB" in whole.losers
    sharded = plan(profile, cluster, 16, Options(recompute=("none",), sharded=True)).best[0]
    assert (sharded.stages, sharded.rank_bytes) == (1, 400 * (2 + 2 / 4))


def test_recompute_is_for_those_who_lack_memory():
    profile = even_layers(4, activation_bytes=100, output_bytes=1)
    free = plan(profile, Cluster(1, 1), 8, Options(micro_batches=(1,)))
    assert free.best[0].recompute == "none"
    assert any(line.startswith("recompute all: 128 s a step, 33.3% more") for line in free.losers)
    tight = plan(profile, Cluster(1, 1, memory_bytes=150), 8, Options(micro_batches=(1,)))
    assert tight.best[0].recompute == "all"
    assert "recompute none: needs 400 B of 150 B" in tight.losers


def test_narrow_wires_are_chosen_only_where_they_are_allowed_and_help():
    slow, fast = replace(SLOW, bandwidth=1e7), replace(SLOW, bandwidth=math.inf)
    replicas = replace(EVERY_WIRE, stages=(1,))
    assert plan(SMALL, slow, 32, replace(replicas, wires=(Wire.FP32,))).best[0].wire is Wire.FP32
    assert plan(SMALL, slow, 32, replicas).best[0].wire is Wire.INT8
    assert plan(SMALL, fast, 32, replicas).best[0].wire is Wire.FP32


def test_why_the_others_lose():
    planned = plan(SMALL, SLOW, 32, Options(best=1))
    winner = planned.best[0]
    titles = [line.split(":")[0] for line in planned.losers]
    assert len(titles) == len(set(titles))
    others = {"1 stage", "2 stages", "4 stages", "8 stages"} - {
        f"{winner.stages} stages",
        f"{winner.stages} stage",
    }
    assert others <= set(titles)
    assert all(" a step, " in line or "needs" in line or "just as fast" in line for line in planned.losers)
    assert planned.considered == len(list(choices(SLOW, 14, 32, Options())))


def test_settings_of_the_winner():
    options = Options(
        stages=(4,), schedules=("interleaved",), chunks=(2,), micro_batches=(2,), recompute=("none",)
    )
    candidate = plan(even_layers(8), Cluster(8, 4), 64, options).best[0]
    assert settings_of(candidate) == {
        "grid.stages": 4,
        "grid.fastest": "stage",
        "batch.micro_batch": 2,
        "pipeline.schedule": "interleaved",
        "pipeline.chunks": 2,
        "pipeline.split": [1] * 8,
        "pipeline.recompute": "none",
        "pipeline.wire": "fp32",
        "gradients.wire": "fp32",
    }


def test_choices_that_make_no_difference_are_one():
    one_host = list(choices(Cluster(4, 4), 4, 8, Options()))
    assert {choice.fastest for choice in one_host} == {"stage"}
    assert {choice.schedule for choice in one_host if choice.stages == 1} == {"1f1b"}
    assert len(one_host) == len(set(one_host))
    many = list(choices(Cluster(4, 2), 4, 8, EVERY_WIRE))
    assert {choice.fastest for choice in many if choice.stages == 2} == {"stage", "replica"}
    assert {choice.wire for choice in many if choice.replicas == 1} == {Wire.FP32}
    assert {choice.chunks for choice in many if choice.schedule == "interleaved"} == {2}  # 4 layers, 2 stages
    assert {choice.micro_batch for choice in many if choice.replicas == 1} == {1, 2, 4, 8}


def test_micro_batches_are_powers_of_two_and_divisors():
    sizes = {choice.micro_batch for choice in choices(Cluster(1, 1), 4, 24, Options())}
    assert sizes == {1, 2, 3, 4, 6, 8, 12, 16, 24}


def test_a_schedule_from_a_file_is_for_its_number_of_stages(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    options = Options(schedules=(str(path),))
    found = {(choice.stages, choice.schedule) for choice in choices(Cluster(4, 4), 8, 8, options)}
    assert (2, str(path)) in found
    assert all(stages == 1 or (stages, schedule) == (2, str(path)) for stages, schedule in found)
    assert plan(even_layers(8), Cluster(4, 4), 8, options).best


def test_what_cannot_be_planned():
    with pytest.raises(
        UserError, match=r"no grid of 8 ranks for 2 layers, 2 samples a step: .* \(at least 4\)"
    ):
        plan(even_layers(2), Cluster(8, 8), 2)
    with pytest.raises(UserError, match=r"no grid of 8 ranks for 9 layers, 64 samples a step, 3 stages"):
        plan(even_layers(9), Cluster(8, 8), 64, Options(stages=(3,)))
    with pytest.raises(
        UserError, match=r"none of \d+ ways fits into 10 B a rank: the least, 2 stages with micro"
    ):
        plan(even_layers(2, parameter_bytes=100), Cluster(2, 2, memory_bytes=10), 8)
    with pytest.raises(UserError, match=r"batch.size=0: set it to at least 1"):
        plan(even_layers(2), Cluster(2, 2), 0)
    with pytest.raises(UserError, match=r"4 layers on 4 ranks go with no schedule .* \(interleaved\)"):
        plan(even_layers(4), Cluster(4, 4), 1, Options(schedules=("interleaved",)))
    with pytest.raises(UserError, match=r"4 layers cut as \[1, 1, 2\] on 4 ranks go with no schedule"):
        plan(even_layers(4), Cluster(4, 4), 8, Options(split=(1, 1, 2)))
    with pytest.raises(UserError, match=r"pipeline.split=\[1, 4\] holds 5 layers, but the model has 4"):
        plan(even_layers(4), Cluster(4, 4), 8, Options(split=(1, 4)))
    assert possible_stages(8, 4, 4, Options()) == [2, 4]


def test_a_thousand_ranks_and_96_layers_take_few_simulations():
    """Counted, not timed: a simulation of a million actions takes about two seconds."""
    cluster = Cluster.read(1024, 8, "80GB", "300GB/s", "25GB/s", "2us", "1us")
    planned = plan(transformer(), cluster, 1536)
    assert planned.considered > 1000
    assert planned.simulated < 60
    assert planned.actions < 300_000
    best = planned.best[0]
    assert best.replicas * best.stages == 1024
    assert best.rank_bytes <= 80e9
    assert any(line.startswith("1 stage: needs 31") for line in planned.losers)

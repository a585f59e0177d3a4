"""The benchmark of the planner: its models, which candidates it measures, what its report says."""

import json

import pytest
import torch
from torch.utils.data import default_collate

from benchmarks.pipeline import waits
from benchmarks.planner import contestants, large, main
from benchmarks.planner.candidates import candidates, name_of
from benchmarks.planner.contestants import Runs
from benchmarks.planner.models import COMPUTING, WAITING, Model, Perceptron, Waits
from benchmarks.records import Results, record, with_ratios
from benchmarks.report import planner
from benchmarks.report.page import page
from hpc_train.comm.loopback import run_ranks
from hpc_train.config import Settings
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.options import Options
from hpc_train.planning.planner import plan
from hpc_train.planning.profile import Curve, LayerProfile, Profile

FACTS = {
    "command": ["python", "benchmarks/planner/main.py"],
    "hardware": {"processor": "a processor", "cores": 2, "memory_bytes": 8 * 2**30},
    "versions": {"torch": "2.0"},
}


def profile(parameter_bytes=0, output_bytes=0, layers=8):
    """Layers that take a millisecond a sample, three times, and 0.1 ms a call."""
    line = Curve.line(1e-4, 1e-3)
    layer = LayerProfile(
        forward=line, input=line, weight=line, output_bytes=output_bytes, parameter_bytes=parameter_bytes
    )
    return Profile(layers=(layer,) * layers)


def cluster(hosts=4, ranks_per_host=1):
    return Cluster(hosts * ranks_per_host, ranks_per_host, bandwidth=12.5e6, bandwidth_host=1e9)


def picked(model, where=None):
    return candidates(model, where or cluster(), 32, Options())


def test_the_planners_choice_comes_first_and_every_grid_is_among_them_at_its_best():
    model = profile(parameter_bytes=3_000_000, output_bytes=1000)
    found = picked(model)
    assert found[0] == plan(model, cluster(), 32).best[0]
    assert {(c.replicas, c.stages) for c in found} == {(4, 1), (2, 2), (1, 4)}
    for stages in (1, 2, 4):
        (best,) = plan(model, cluster(), 32, Options(stages=(stages,), best=1)).best
        assert best in found


def test_no_candidate_comes_twice_and_none_shares_its_name_with_another():
    for model in (profile(3_000_000, 1000), profile(1000, 100_000)):
        for where in (cluster(2, 1), cluster(4, 1), cluster(2, 2)):
            names = [name_of(c) for c in picked(model, where)]
            assert len(names) == len(set(names))
            assert 5 <= len(names) <= 13


def test_the_chosen_grid_is_tried_with_other_schedules_and_micro_batches():
    chosen, *others = picked(profile(3_000_000, 1000))
    assert chosen.stages == 4
    alike = [c for c in others if c.stages == chosen.stages]
    assert len({c.schedule for c in alike} | {chosen.schedule}) >= 3
    sizes = {c.micro_batch for c in alike if c.schedule == chosen.schedule}
    assert sizes & {chosen.micro_batch // 2, chosen.micro_batch * 2}


def test_ranks_are_tried_in_both_orders_where_hosts_have_several():
    found = picked(profile(300_000, 40_000), cluster(2, 2))
    chosen = found[0]
    assert chosen.stages == 2
    alike = {c.fastest for c in found if (c.schedule, c.stages) == (chosen.schedule, chosen.stages)}
    assert alike == {"stage", "replica"}


def test_a_name_says_all_that_candidates_differ_in():
    names = [name_of(c) for c in picked(profile(300_000, 40_000), cluster(2, 2))]
    assert "4x1 8" in names
    assert any(name.startswith("2x2r ") for name in names)


@pytest.fixture
def waited(monkeypatch):
    """The seconds that layers would have waited, by call."""
    calls = []
    monkeypatch.setattr(waits, "wait", calls.append)
    return calls


def test_a_layer_waits_for_each_sample(waited):
    task = Waits(sample_ms=2.0, width=6, parameters=100, depth=2)
    plain = task.plain_model()
    assert sum(p.numel() for p in plain.parameters()) == 200
    x, target = default_collate([task.dataset("train")[i] for i in range(3)])
    task.loss(plain(x), target).sum().backward()
    assert waited == pytest.approx([0.006] * 5)  # nobody asks for the gradient of the batch itself
    assert all(bool((p.grad != 0).any()) for p in plain.parameters())


@pytest.mark.parametrize("models", [COMPUTING, WAITING])
def test_models_differ_in_what_they_are_heavy_in(models, waited):
    weights, activations = {}, {}
    for name, model in models.items():
        task = model.make()
        plain = task.plain_model()
        x, target = default_collate([task.dataset("train")[0]])
        assert torch.isfinite(task.loss(plain(x), target)).all()
        weights[name] = sum(p.numel() for p in plain.parameters())
        activations[name] = plain.layers[1](plain.layers[0](x)).numel()
    ratio = {name: weights[name] / activations[name] for name in models}
    assert ratio["perceptron"] > 5 * ratio["transformer"]
    assert ratio["transformer"] > 5 * ratio["convolutions"]


def steps(world):
    """Every grid of two ranks, a step each, checked against each other."""
    task = Perceptron(width=8, depth=4)
    settings = Settings(
        task="perceptron", grid="auto", batch={"size": 8}, optimizer={"name": "adamw", "clip_norm": 1.0},
        train={"threads": 1, "device": "cpu"},
    )  # fmt: skip
    runs = Runs(settings, task, world)
    found = candidates(profile(1000, 1000, layers=4), cluster(2, 1), 8, Options())
    own = [runs.add(candidate) for candidate in found]
    for one in own:
        for _ in range(2):
            one.call()
            one.check()
    spent = runs.seconds(lambda worker: worker.stopwatch.compute_s)
    runs.close()
    return len(found), spent


def test_all_candidates_make_the_same_step():
    for number, spent in run_ranks(2, steps):
        assert len(spent) == number >= 4
        assert min(spent) > 0


def test_a_candidate_whose_step_is_another_one_is_found(monkeypatch):
    monkeypatch.setattr(contestants, "_TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="'s loss is"):
        run_ranks(2, steps)


def test_a_setting_becomes_records_with_what_was_foreseen_and_what_it_was_foreseen_from(monkeypatch):
    place = main.Place(2, 1)
    small = main.Setting("perceptron", Model(lambda: Perceptron(width=8, depth=4), 32), place)
    monkeypatch.setitem(main.SETTINGS, "small", small)
    monkeypatch.setattr(main, "_SECONDS", {True: 0.1})
    found, _ = run_ranks(2, lambda world: main.measure(main.Session(world, place, "small", short=True)))
    (chosen,) = [r for r in found if r.detail["chosen"]]
    assert min(r.detail["to_best"] for r in found) == 1
    assert chosen.ratio_to_limit == pytest.approx(chosen.median_s / chosen.detail["foreseen_s"])
    assert {(r.detail["replicas"], r.detail["stages"]) for r in found} == {(2, 1), (1, 2)}
    for r in found:
        assert len(r.raw_s) >= 3
        assert sum(r.detail["split"]) == 4
        assert len(r.detail["rank_s"]) == 2  # ranks
    planned = json.loads(json.dumps(chosen.detail))
    again = plan(Profile(**planned["profile"]), Cluster(**planned["cluster"]), planned["batch_size"])
    assert again.best[0].step_s == pytest.approx(chosen.detail["foreseen_s"])


def test_settings_are_three_models_at_several_rates_and_numbers_of_ranks():
    assert len(main.SETTINGS) >= 12
    for nouns in ({s.name for s in main.SETTINGS.values()}, {s.place for s in main.SETTINGS.values()}):
        assert len(nouns) >= 3
    assert set(main.SHORT_CASES) < set(main.CASES)


def setting(case, chosen_s, **others_s):
    """The choice, and others by name; foreseen a second each."""
    best_s = min(chosen_s, *others_s.values())
    return [
        record(
            case, name, "fp32", 4096, [0.99 * median_s, median_s, 1.01 * median_s], "ours", 1.0,
            chosen=name == "chosen", to_best=median_s / best_s, foreseen_s=1.0, stages=1 + (name != "chosen"),
        )
        for name, median_s in {"chosen": chosen_s, **others_s}.items()
    ]  # fmt: skip


def results(*parts):
    return Results("planner", False, with_ratios([r for part in parts for r in part]), [], dict(FACTS))


def bar(found):
    _, one = planner.bars(found)
    return one


def test_without_measurements_the_bar_has_no_value():
    assert bar(None).met is None


def test_one_choice_of_twelve_may_be_slower_than_the_best():
    near = [setting(f"near {n}", 1.04, a=1.0) for n in range(10)]
    best = setting("best", 0.9, a=1.0)
    far = setting("far", 1.3, a=1.0)
    one = bar(results(*near, best, far))
    assert one.met
    assert one.value == pytest.approx(11 / 12)
    assert one.remark == "11 of 12; the worst, 1.300 times: far"
    assert bar(results(*near, far, far_too := setting("far too", 1.06, a=1.0))).met is False
    assert far_too[0].detail["to_best"] == pytest.approx(1.06)


def test_the_page_tells_choice_and_best_of_each_setting_then_all_candidates():
    found = results(setting("slow links", 1.2, a=1.5, b=1.0), setting("fast links", 0.5, a=1.5))
    text = page({"planner": found}, {})
    assert "## The planner" in text
    assert (
        "| slow links | b | 1000 | chosen | **1200** | 1194 - 1206 | **1.200** | 1000 | 1.200 | 3 | 1.50 |"
        in text
    )
    assert "| fast links | chosen | 500 | chosen | **500** |" in text
    assert "| slow links | **chosen** | 1200 |" in text
    assert text.index("| slow links | b | 1000 | 995") < text.index("| slow links | **chosen**")


def test_it_is_drawn_however_far_off_a_candidate_is(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.report.charts import draw

    assert draw(results(setting("x", 1.0, a=40.0)), tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_planning_itself_is_one_record_that_is_no_setting():
    assert {large.CASE} <= set(main.SHORT_CASES) < set(main.CASES)
    made = large.measure(short=True)
    found = Results("planner", True, [made], [], FACTS)
    first, second = planner.bars(found)
    assert (first.value, first.met) == (made.median_s, made.median_s < 10)
    assert second.value is None
    assert list(planner.settings(found)) == []

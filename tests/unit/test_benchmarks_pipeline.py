"""The benchmark of pipelines: layers that wait, in their halves; what its report says."""

import pytest
import torch

from benchmarks.peers.torch_pipelining import in_halves
from benchmarks.pipeline import waits
from benchmarks.pipeline.alone import known
from benchmarks.pipeline.models import loss, waiting
from benchmarks.pipeline.waits import Seconds, Waiting, waiting_product
from benchmarks.records import OURS, Results, record, with_ratios
from benchmarks.report import pipelines
from benchmarks.report.page import page
from hpc_train.pipeline.actions import parse
from hpc_train.pipeline.later import Later
from hpc_train.pipeline.schedules import find

SECONDS = Seconds(forward=1.0, input=10.0, weight=100.0)
FACTS = {
    "command": ["python", "benchmarks/pipeline/main.py"],
    "hardware": {"processor": "a processor", "cores": 2, "memory_bytes": 8 * 2**30},
    "versions": {"torch": "2.0"},
}


@pytest.fixture
def waited(monkeypatch):
    """The seconds that layers would have waited, by call."""
    calls = []
    monkeypatch.setattr(waits, "wait", calls.append)
    return calls


def some_input():
    return torch.arange(8.0).view(2, 4).requires_grad_()


def test_a_layer_waits_in_forward_and_on_both_ways_back(waited):
    x, layer = some_input(), Waiting(4, SECONDS)
    y = layer(x)
    assert waited == [1.0]
    y.sum().backward()
    assert sorted(waited) == [1.0, 10.0, 100.0]
    assert torch.equal(x.grad, layer.weight.detach().expand(2, 4))
    assert torch.equal(layer.weight.grad, x.detach().sum(0))


def test_the_second_half_of_backward_waits_for_the_weight_alone(waited):
    x, layer = some_input(), Waiting(4, SECONDS)
    later = Later()
    with later:
        y = layer(x)
    later.backward_inputs([y.sum()], [x], [layer.weight])
    assert waited == [1.0, 10.0]
    assert layer.weight.grad is None
    later.backward_weights()
    assert waited == [1.0, 10.0, 100.0]
    assert torch.equal(layer.weight.grad, x.detach().sum(0))


def test_autograd_finds_both_ways_as_pytorchs_pipelining_needs(waited):
    """It asks for the gradient of the input first, and for that of the weight later."""
    x, weight = some_input(), torch.ones(4, requires_grad=True)
    y = waiting_product(x, weight, SECONDS).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    assert waited == [1.0, 10.0]
    torch.autograd.grad(y, weight)
    assert waited == [1.0, 10.0, 100.0]


def test_a_model_that_waits_takes_its_seconds_in_all(waited):
    model = waiting("", num_layers=8, seconds=SECONDS)
    ((x, target),) = model.cut(model.batch(1))
    for layer in model.layers:
        x = layer(x)
    loss(x, target).sum().backward()
    assert sum(waited) == pytest.approx(SECONDS.total)
    times = known(model, num_chunks=4)
    assert (times.forward[0], times.backward[0]) == (0.25, 27.5)


def test_times_are_played_in_halves_where_the_order_has_them():
    model = waiting("", num_layers=2, seconds=Seconds(2.0, 2.0, 2.0))
    times = known(model, num_chunks=2)
    played = {name: times.play(find(name).order(2, 4)) for name in ("1f1b", "zb-h1")}
    assert played["1f1b"].step_s == 4 * 3 + 3  # the bubble of (p - 1) (F + B)
    assert played["zb-h1"].step_s == 4 * 3 + 1


def test_a_backward_counts_as_its_halves():
    assert in_halves(parse("1F0 1B0 1I1")[0]) == ["1F0", "1I0", "1W0", "1I1"]


def test_a_wait_is_as_long_as_it_says():
    began = waits.time.perf_counter()
    waits.wait(0.002)
    assert waits.time.perf_counter() - began >= 0.002


def steps(schedule, ours_s, torch_s, place=pipelines.PINNED, model="512 wide", number=32, bubble=0.1):
    case = f"{place}, {model}, {schedule}, {number} micro-batches"
    detail = {
        **{"place": place, "model": model, "schedule": schedule, "micro_batches": number},
        **{"ideal": 1.94, "simulated_s": 1.0, "bubble": bubble, "bubble_simulated": 0.03},
    }
    made = [record(case, OURS, "fp32", 4096, [ours_s] * 3, "ours", 1.0, speed_up=1.9 / ours_s, **detail)]
    for impl, own_s in zip(pipelines.PEERS, (torch_s, 2 * torch_s), strict=True):
        made.append(
            record(case, impl, "fp32", 4096, [own_s] * 3, "peer", 1.0, speed_up=1.9 / own_s, **detail)
        )
    return made


def results(*parts):
    reference = record(
        "2 ranks pinned, 512 wide, one rank", "PyTorch, one rank", "fp32", 4096, [1.9] * 3, "reference",
        place=pipelines.PINNED, model="512 wide", micro_batches=32,
    )  # fmt: skip
    records = [reference, *(r for part in parts for r in part)]
    return Results("pipeline", False, with_ratios(records), [], dict(FACTS))


def bar(found, text):
    (one,) = [b for b in pipelines.bars(found) if text in b.what]
    return one


def test_without_measurements_no_bar_has_a_value():
    assert {b.met for b in pipelines.bars(None)} == {None}


def test_a_speed_up_is_judged_beside_the_ideal_by_the_worse_schedule():
    found = bar(results(steps("gpipe", 1.0, 1.1), steps("1f1b", 1.05, 1.1)), "speed-up")
    assert found.value == pytest.approx(1.9 / 1.05 / 1.94)
    assert found.met is False
    assert found.remark == "gpipe 1.900, 1f1b 1.810, of 1.940"


def test_each_schedule_is_judged_beside_the_faster_of_pytorchs_two_where_it_is_worst():
    small = {"model": pipelines.SMALL, "number": 8}
    found = results(
        steps("1f1b", 1.01, 1.0), steps("1f1b", 0.9, 1.0, number=8), steps("1f1b", 0.95, 1.0, **small)
    )
    assert bar(found, "1f1b: time beside").met
    assert bar(found, "1f1b: time beside").value == pytest.approx(1.01)
    few = bar(found, "1f1b, small micro-batches: time beside")
    assert (few.met, few.value) == (False, pytest.approx(0.95))
    assert bar(found, "zb-v: time beside").met is None


def test_bubbles_are_compared_where_there_are_enough_micro_batches_for_the_v():
    waiting_place = {"place": pipelines.WAITING, "model": ""}
    parts = [
        steps(schedule, 1.0, 1.0, number=number, bubble=bubble, **waiting_place)
        for number, bubbles in {4: (0.4, 0.2, 0.2), 8: (0.3, 0.11, 0.07)}.items()
        for schedule, bubble in zip(("1f1b", "zb-h1", "zb-v"), bubbles, strict=True)
    ]
    found = bar(results(*parts), "bubble")
    assert found.value == pytest.approx(0.07 / 0.3)
    assert found.met
    assert found.remark == "zb-h1 0.37, zb-v 0.23, the worst of [8]"


def test_a_step_may_be_neither_longer_nor_shorter_than_the_simulated_one():
    for ours_s, met in ((0.85, False), (0.95, True), (1.05, True), (1.15, False)):
        found = results(steps("gpipe", ours_s, 1.0, place=pipelines.WAITING, model=""))
        assert bar(found, "simulated").met is met


def test_the_page_has_a_table_for_each_model_with_a_row_for_each_schedule():
    found = results(
        steps("zb-v", 1.0, 2.0), steps("gpipe", 0.5, 1.0), steps("gpipe", 1.5, 1.0, model=pipelines.SMALL)
    )
    text = page({"pipeline": found}, {})
    assert "### 2 ranks pinned, 512 wide" in text
    assert "| gpipe | 32 | **500** | 500 - 500 | 1000 | 2000 | 0.500 | **3.80** | 1.90 |" in text
    assert text.index("| gpipe | 32 | **500**") < text.index("| zb-v | 32")
    assert (
        "| pipeline | 2 ranks pinned, small micro-batches, gpipe, 32 micro-batches, 4 KiB | fp32 | torch"
        in text
    )


def test_it_is_drawn_however_little_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.report.charts import draw

    for number, part in enumerate(
        (steps("1f1b", 1.0, 1.0), steps("zb-v", 1.0, 1.0, place=pipelines.WAITING, model=""))
    ):
        path = tmp_path / f"{number}.png"
        assert draw(results(part), path)
        assert path.stat().st_size > 10_000

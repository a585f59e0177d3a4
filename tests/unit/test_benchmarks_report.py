"""The report: bars that are met or missed, where we lose, and drawings, from recorded results."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.records import OURS, Results, Skipped, record, with_ratios, write
from benchmarks.report.bars import bars
from benchmarks.report.defeats import defeats
from benchmarks.report.page import page

TOP = Path(__file__).parents[2]
MIB = 2**20
FACTS = {
    "command": ["python", "benchmarks/x/main.py"],
    "hardware": {"processor": "a processor", "cores": 2, "memory_bytes": 8 * 2**30},
    "versions": {"torch": "2.0", "horovod": None},
    "worlds": {"4 hosts x 1 rank": {"library": "an MPI"}},
    "rates_mbit": {"4 hosts x 1 rank": 200},
}


def results(name, records, skipped=(), short=False):
    return Results(name, short, with_ratios(records), list(skipped), dict(FACTS))


def around(median_s):
    return [0.99 * median_s, median_s, 1.01 * median_s]


def sums(ours=None, peers=None, num_bytes=4 * MIB, case="4 hosts x 1 rank"):
    """Times by wire for us, by name and wire for peers, where the limit of fp32 is one second."""
    ours = {"fp32": 1.02, "fp16": 0.51, "bf16": 0.51, "int8": 0.27} | (ours or {})
    peers = {
        ("Open MPI", "fp32"): 2.1,
        ("Open MPI tuned", "fp32"): 1.06,
        ("Gloo", "fp32"): 1.01,
        ("Horovod", "fp32"): 1.07,
        ("Horovod", "fp16"): 0.62,
    } | (peers or {})
    limits = {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 0.25}
    made = [
        record(case, OURS, wire, num_bytes, around(median_s), "ours", limits[wire], sent_bytes=1000)
        for wire, median_s in ours.items()
    ]
    return made + [
        record(case, impl, wire, num_bytes, around(median_s), "peer", limits[wire])
        for (impl, wire), median_s in peers.items()
    ]


def bar(found, text):
    (one,) = [b for b in bars(found) if text in b.what]
    return one


def test_without_measurements_no_bar_is_met_and_none_is_missed():
    assert {b.met for b in bars({})} == {None}


def test_a_bar_that_is_met_says_at_which_size():
    found = {"allreduce": results("allreduce", sums() + sums({"fp32": 1.03}, num_bytes=16 * MIB))}
    share = bar(found, "share of the links' limit")
    assert share.met
    assert share.value == pytest.approx(1 / 1.03)
    assert share.remark == "at 16 MiB, the worst of 4, 16"


def test_a_bar_that_is_missed_says_by_how_much_and_what_would_be_possible():
    found = {"allreduce": results("allreduce", sums({"fp16": 0.60}))}
    missed = bar(found, "fp16: time beside the best fp32 peer")
    assert missed.met is False
    assert missed.missed_by == pytest.approx(0.60 / 1.01 / 0.54 - 1)
    assert missed.why == "the limit of memory or links would allow 0.50"


def test_a_bar_that_the_limit_forbids_says_that_nobody_could():
    twice = bar({"allreduce": results("allreduce", sums())}, "4 hosts, fp32: times as fast as Open MPI tuned")
    assert twice.met is False
    assert twice.why == "nobody could: at the limit of memory or links it would be 1.06"


def test_the_worst_size_counts_and_sizes_outside_of_the_bar_do_not():
    records = sums({"int8": 0.9}, num_bytes=MIB) + sums() + sums({"int8": 0.31}, num_bytes=64 * MIB)
    int8 = bar({"allreduce": results("allreduce", records)}, "int8: time beside the best fp32 peer")
    assert int8.value == pytest.approx(0.31 / 1.01)
    assert int8.met is False


def test_bytes_that_leave_a_host_may_be_neither_more_nor_less():
    def with_sent(sent_bytes):
        two = record(
            "4 hosts x 2 ranks", OURS, "fp32", 4 * MIB, [1.0, 1.0], "ours", 1.0, sent_bytes=sent_bytes
        )
        return bar({"allreduce": results("allreduce", [*sums(), two])}, "bytes that leave a host")

    assert [with_sent(n).met for n in (900, 960, 1040, 1100)] == [False, True, True, False]


def steps(ours_s=2.0, exposed_s=1.0, peers=(("Horovod", "fp32"), ("DDP Gloo", "fp32"))):
    detail = {"samples_per_s": 4.0}
    mine = record(
        "transformer", OURS, "fp16", 8 * MIB, around(ours_s), "ours", 1.0, exposed_s=exposed_s, **detail
    )
    return results(
        "train-step",
        [mine]
        + [
            record("transformer", *peer, 8 * MIB, around(4.0), "peer", 1.0, exposed_s=3.0, **detail)
            for peer in peers
        ],
    )


def test_a_step_is_judged_beside_the_better_peer_and_a_missing_peer_is_told():
    both = bar({"train-step": steps()}, "fp16: exposed communication less by")
    assert both.met
    assert both.value == pytest.approx(2 / 3)
    one = bar({"train-step": steps(peers=[("DDP Gloo", "fp32")])}, "fp16: throughput, beside Horovod and DDP")
    assert one.value == pytest.approx(2.0)
    assert one.remark == "beside DDP Gloo; the other was not measured"


def losses(ratios):
    detail = {"final_loss": [2.0] * len(ratios), "loss_ratio_in_time": [0.9] * len(ratios)}
    base = {**detail, "loss_ratio": [1.0] * len(ratios), "loss_ratio_in_time": [1.0] * len(ratios)}
    return results(
        "convergence",
        [
            record("bytelm", OURS, "fp32", MIB, [9.0, 9.0], "ours", **base),
            record("bytelm", OURS, "int8", MIB, [3.0, 3.0], "ours", loss_ratio=ratios, **detail),
            record("bytelm", "DDP Gloo", "fp32", MIB, [9.0, 9.0], "peer", loss_ratio=[0.99, 1.005], **detail),
        ],
    )


def test_a_loss_is_judged_by_its_mean_and_too_few_seeds_are_told():
    met = bar({"convergence": losses([1.02, 0.99, 1.0, 1.0, 1.0])}, "bytelm, int8")
    assert met.met
    chance = "DDP in fp32, which differs by rounding: 0.9900 to 1.0050"
    assert met.remark == f"5 seeds: 0.9900 to 1.0200; {chance}"
    missed = bar({"convergence": losses([1.02, 1.01])}, "bytelm, int8")
    assert missed.met is False
    assert "2 seeds, not 5" in missed.remark


def test_no_defeat_is_hidden():
    """Slower than a peer with the same wire is a defeat, also where the fp32 peers are slower still."""
    records = sums({"fp32": 0.9, "fp16": 0.63, "bf16": 0.502}, {("Horovod", "fp16"): 0.5})
    found = defeats({"allreduce": results("allreduce", records)})
    assert [(d.wire, d.by, round(d.ratio, 3), d.clear) for d in found] == [
        ("fp16", "Horovod fp16", 1.26, True),
        ("bf16", "Horovod fp16", 1.004, False),  # their quartiles overlap
    ]
    assert defeats({"allreduce": results("allreduce", sums({"fp32": 1.0}))}) == []


def test_a_loss_larger_than_fp32s_is_a_defeat():
    (found,) = defeats({"convergence": losses([1.001, 1.003])})
    assert found.by == "our fp32, in loss after the same samples"
    assert found.ratio == pytest.approx(1.002)


def everything():
    skipped = [Skipped("4 hosts x 1 rank", "Horovod", "not installed")]
    return {
        "allreduce": results("allreduce", sums({"fp32": 1.5}), skipped, short=True),
        "train-step": steps(),
        "convergence": losses([1.0, 1.001]),
        "one-replica": results(
            "one-replica",
            [
                record("1 host x 1 rank", OURS, "fp32", MIB, [1.0, 1.0], "ours"),
                record("1 host x 1 rank", "PyTorch", "fp32", MIB, [1.0, 1.0], "peer"),
            ],
        ),
    }


def test_the_page_has_bars_defeats_every_record_and_what_is_missing():
    text = page(everything(), {"allreduce": "allreduce.png"})
    assert "**missed by" in text
    assert "| allreduce | 4 hosts x 1 rank, 4 MiB | fp32 | Gloo fp32 | 1.485 |  |" in text
    assert "![Sums of gradients](allreduce.png)" in text
    assert "Not measured: 4 hosts x 1 rank, Horovod: not installed." in text
    assert "Short forms, which repeat little: allreduce." in text
    for part in everything().values():
        for r in part.records:
            assert re.search(rf"\| \**{r.impl}\** \| {r.wire} \| ", text), r.name


def test_every_table_row_has_as_many_cells_as_its_heading():
    cells = None
    for line in page(everything(), {}).splitlines():
        if not line.startswith("|"):
            cells = None
            continue
        count = line.count("|")
        assert cells in (None, count), line
        cells = count


def command(*args):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.report", *args],
        cwd=TOP,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_writes_the_report_and_its_drawings(tmp_path):
    pytest.importorskip("matplotlib")
    for name, part in everything().items():
        write(tmp_path / "json" / f"{name}.json", part)
    out = tmp_path / "out"
    done = command("--results", tmp_path / "json", "--out", out)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {
        "report.md",
        "allreduce.png",
        "train-step.png",
        "convergence.png",
    }
    assert all(path.stat().st_size > 10_000 for path in out.glob("*.png"))


def test_without_results_the_command_says_what_to_do(tmp_path):
    done = command("--results", tmp_path)
    assert done.returncode == 1
    assert "run make bench first" in done.stderr

"""Every benchmark from its command to its file, in a form that takes seconds, on this host alone."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.records import OURS, read
from hpc_train.errors import UserError
from hpc_train.launch.mpirun import find_mpirun

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# Stands for a main.py: the same module, with some of its values made small; its ranks run it too.
SMALL = """
import runpy, sys
from hpc_train.tasks.bytelm import ByteLM
sys.argv[0] = {itself!r}
names = runpy.run_path({path!r}, run_name="small")
task = ByteLM(context=16, hidden=16, blocks=1, heads=2)
names["measure"].__globals__.update({changes})
names["conductor"].main("", "small", {{{case!r}: names["Place"](1, {num_ranks})}}, names["measure"])
"""


def run(tmp_path, benchmark, case, num_ranks, changes):
    """The results of one case on `num_ranks` ranks, with `changes` to the benchmark's own values."""
    if num_ranks > 1:
        try:
            find_mpirun()
        except UserError as reason:
            pytest.skip(str(reason))
    script, out = tmp_path / "small.py", tmp_path / "out.json"
    path = str(BENCHMARKS / benchmark / "main.py")
    script.write_text(
        SMALL.format(itself=str(script), path=path, changes=changes, case=case, num_ranks=num_ranks)
    )
    command = [sys.executable, script, "--short", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"raw numbers: {out}" in done.stdout
    return read(out)


def test_sums(tmp_path):
    changes = "SHORT_SIZES={1: [4096, 65536]}, _SECONDS_A_SIZE={True: 0.2}"
    results = run(tmp_path, "allreduce", "1 host x 2 ranks", 2, changes)
    measured = {(r.impl, r.wire, r.bytes) for r in results.records}
    for num_bytes in (4096, 65536):
        assert {(OURS, wire, num_bytes) for wire in ("fp32", "fp16", "bf16", "int8")} <= measured
        assert {("Gloo", "fp32", num_bytes), ("memcpy", "fp32", num_bytes)} <= measured
    assert all(0 < r.median_s < 10 and len(r.raw_s) >= 3 for r in results.records)
    assert all(r.ratio_to_best_peer and r.ratio_to_limit for r in results.records if r.role == "ours")
    without = {item.impl for item in results.skipped}
    assert without == (set() if importlib.util.find_spec("horovod") else {"Horovod"})


def test_steps(tmp_path):
    changes = "_SECONDS={True: 0.1}, MODELS={'transformer': lambda: task}"
    results = run(tmp_path, "train-step", "transformer", 2, changes)
    assert {r.wire for r in results.records if r.impl == OURS} == {"fp32", "fp16", "int8", "powersgd"}
    (alone,) = [r for r in results.records if r.role == "reference"]
    for r in results.records:
        assert r.detail["exposed_s"] == pytest.approx(r.median_s - alone.median_s, abs=1e-5)
        assert r.detail["samples_per_s"] == pytest.approx(4 / r.median_s, rel=1e-4)
    assert results.of("transformer", "DDP Gloo", "fp32").ratio_to_best_peer >= 1


def test_losses(tmp_path):
    changes = "_SHORT_SIZES={'bytelm': names['Size'](4, 2)}, _EVALUATIONS=2, _task=lambda case: task"
    results = run(tmp_path, "convergence", "bytelm", 2, changes)
    fp32 = results.of("bytelm", OURS, "fp32")
    assert fp32.detail["loss_ratio"] == [1.0, 1.0]
    assert fp32.detail["steps"] == [0, 2, 4]
    assert len(fp32.raw_s) == 2  # seeds
    for r in results.records:
        assert r.detail["loss_ratio"] == pytest.approx([1.0, 1.0], abs=0.01), r.name


def test_pipelines(tmp_path):
    changes = (
        "MICRO_BATCHES={True: {'2 ranks pinned': [2]}}, _SECONDS={True: {'2 ranks pinned': 0.1}}, "
        "models=lambda session: [names['computing']('small', 4, 16, 4), "
        "names['waiting']('', 4, names['Seconds'](0.002, 0.002, 0.002))]"
    )
    results = run(tmp_path, "pipeline", "2 ranks pinned", 2, changes)
    if [item.impl for item in results.skipped] == ["all"]:
        pytest.skip(results.skipped[0].reason)
    ours = {(r.detail["model"], r.detail["schedule"]) for r in results.records if r.impl == OURS}
    assert ours == {(m, s) for m in ("small", "") for s in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")}
    assert all(r.detail["walks_the_same"] for r in results.records if r.impl == "torch")
    for r in results.records:
        if r.role != "reference" and not r.detail["model"]:
            assert r.median_s >= 0.99 * r.detail["simulated_s"], r.case  # a wait cannot be cut short
            assert 0 <= r.detail["bubble_simulated"] <= r.detail["bubble"] + 0.01 < 1, r.case
            assert r.detail["speed_up"] == pytest.approx(2 * 0.006 / r.median_s, rel=1e-4)


def test_one_replica_needs_no_mpi(tmp_path):
    changes = "_SECONDS={True: 0.1}, _ROUNDS=(3, 3), _WARM_UPS=1"
    results = run(tmp_path, "one-replica", "1 host x 1 rank", 1, changes)
    names = {r.name for r in results.records}
    assert names == {"PyTorch fp32", "hpc_train fp32", "hpc_train int8"}
    assert all(0.2 < r.ratio_to_best_peer < 5 for r in results.records)

"""The choice between ways to sum."""

from types import SimpleNamespace

import pytest
import torch

from hpc_train.comm import choice
from hpc_train.comm.choice import Choices, choose, describe, measure
from hpc_train.comm.interface import Wire


def test_the_fastest_is_chosen_and_noise_leaves_it_to_the_order():
    assert choose({"a": 1.2, "b": 1.0, "c": 1.01}) == "b"
    assert choose({"a": 1.01, "b": 1.0}) == "a"


def test_what_is_hopeless_is_not_repeated(monkeypatch):
    """Time is what the ways say that they take."""
    clock = [0.0]
    monkeypatch.setattr(choice, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    calls = {"quick": 0, "slow": 0}

    def way(name, takes):
        def call(buffer, wire, residual):
            calls[name] += 1
            clock[0] += takes

        return call

    ways = {"quick": way("quick", 1.0), "slow": way("slow", 4.0)}
    seconds = measure(ways, torch.zeros(1), Wire.FP32, slowest=lambda value: value)
    assert seconds == pytest.approx({"quick": 1.0, "slow": 4.0})
    assert calls == {"quick": 5, "slow": 2}


def test_the_line_tells_the_choice_and_all_times_the_fastest_first():
    assert describe({"a": 0.00101, "b": 0.001}, 2**20, Wire.INT8) == (
        "gradient sums, int8: a (measured with 1 MiB: b 1 ms, a 1.01 ms)"
    )


def test_a_size_goes_the_way_of_the_nearest_one_that_was_measured():
    choices = Choices()
    assert choices.get(Wire.FP32, 1) is None
    choices.put(Wire.FP32, 1000, "short")
    choices.put(Wire.FP32, 100_000, "long")
    assert choices.get(Wire.FP32, 9_000) == "short"
    assert choices.get(Wire.FP32, 11_000) == "long"
    assert choices.get(Wire.INT8, 1000) is None

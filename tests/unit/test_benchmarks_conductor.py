"""Places of benchmarks, and cases that cannot be run here."""

import os
import sys

import pytest

from benchmarks import conductor
from benchmarks.conductor import Place, main
from benchmarks.records import Skipped, read
from hpc_train.launch.mpirun import Mpirun


def test_a_place_knows_its_name_and_its_limit():
    assert Place(1, 2).name == "1 host x 2 ranks"
    place = Place(4, 2, rate_mbit=200)
    assert place.name == "4 hosts x 2 ranks"
    assert place.num_ranks == 8
    assert place.limit_s(2**24) == pytest.approx(1.00663296)  # 3/2 of 16 MiB at 25 MB/s, whatever the ranks


def test_a_case_that_needs_a_lab_is_left_out_with_a_reason(tmp_path, monkeypatch, capsys, signals_as_before):
    """As for a user who is not root: nothing fails, and the file says what is missing."""
    monkeypatch.setattr(conductor, "find_mpirun", lambda: Mpirun("mpirun", "Open MPI", "5"))
    out = tmp_path / "out.json"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["main.py", "--out", str(out)])
    main("", "x", {"far": Place(4, 1, 200)}, measure=lambda session: [])
    reason = "hosts with links of their own need root"
    assert read(out).skipped == [Skipped("far", "all", reason)]
    assert f"not measured: far, all: {reason}" in capsys.readouterr().out


def test_a_lab_needs_the_mpirun_that_knows_it(tmp_path, monkeypatch, signals_as_before):
    out = tmp_path / "out.json"
    monkeypatch.setattr(conductor, "find_mpirun", lambda: Mpirun("mpiexec", "MPICH", "4"))
    monkeypatch.setattr(sys, "argv", ["main.py", "--out", str(out)])
    main("", "x", {"far": Place(4, 1, 200)}, measure=lambda session: [])
    assert [s.reason for s in read(out).skipped] == [
        "hosts with links of their own need Open MPI's mpirun, not MPICH's"
    ]

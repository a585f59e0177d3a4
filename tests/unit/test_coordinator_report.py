"""Reports as records: what is packed comes back, all are of one size, another version is told."""

import math
import signal
import struct

import pytest

from hpc_train.coordinator.report import Report

FULL = Report(
    rank=4095,
    step=2**40,
    samples=17,
    compute_s=0.25,
    wait_s=1e-9,
    comm_s=3.5,
    grad_norm=1e30,
    finite=True,
    signal=signal.SIGUSR2,
)


@pytest.mark.parametrize("report", [FULL, Report(0, 1, 0), Report(3, 7, 5, finite=False, signal=64)])
def test_what_is_packed_comes_back(report):
    assert Report.unpack(report.pack()) == report


def test_a_norm_that_is_not_finite_comes_back_so():
    back = Report.unpack(Report(0, 1, 2, grad_norm=math.nan, finite=False).pack())
    assert math.isnan(back.grad_norm)
    assert back.finite is False
    assert Report.unpack(Report(0, 1, 2, grad_norm=math.inf).pack()).grad_norm == math.inf


def test_all_reports_are_of_one_size():
    assert len(FULL.pack()) == len(Report(0, 1, 0).pack())


def test_another_version_is_told():
    record = FULL.pack()
    with pytest.raises(ValueError, match=f"{len(record)} bytes, version 02.*different versions of hpc_train"):
        Report.unpack(b"\x02" + record[1:])


@pytest.mark.parametrize("cut", [0, 1, -1])
def test_a_record_of_another_size_is_told(cut):
    record = FULL.pack()[:cut]
    with pytest.raises(ValueError, match=f"a report of {len(record)} bytes.*sends {len(FULL.pack())} bytes"):
        Report.unpack(record)


def test_a_number_that_does_not_fit_is_no_report():
    with pytest.raises(struct.error):
        Report(0, 1, 2**63).pack()

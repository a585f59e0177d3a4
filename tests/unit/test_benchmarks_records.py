"""Records of benchmarks: ratios, limits, tables, and files that read back as they were written."""

import dataclasses

import pytest

from benchmarks.records import OURS, Results, Skipped, read, record, size, table, with_ratios, write


def some():
    return with_ratios(
        [
            record("a", OURS, "fp32", 4096, [2.0, 3.0, 4.0], "ours", limit_s=1.5, sent_bytes=6),
            record("a", OURS, "bf16", 4096, [1.0, 1.0], "ours"),
            record("a", "Gloo", "fp32", 4096, [2.0, 2.0], "peer"),
            record("a", "Open MPI", "fp32", 4096, [4.0, 4.0], "peer"),
            record("a", "Horovod", "fp16", 4096, [0.5, 0.5], "peer"),
            record("a", "memcpy", "fp32", 4096, [0.1, 0.1], "reference"),
            record("a", OURS, "fp32", 8192, [7.0, 7.0], "ours"),
            record("b", OURS, "fp32", 4096, [9.0, 9.0], "ours"),
            record("b", "Horovod", "fp16", 4096, [3.0, 3.0], "peer"),
        ]
    )


def test_a_record_has_median_quartiles_and_all_raw_times():
    one = record("a", "Gloo", "fp32", 4, [5.0, 1.0, 3.0, 2.0, 4.0], "peer", limit_s=1.5)
    assert (one.median_s, one.quartiles_s, one.raw_s) == (3.0, (2.0, 4.0), (5.0, 1.0, 3.0, 2.0, 4.0))
    assert one.ratio_to_limit == 2.0


def test_ratios_are_to_the_fastest_fp32_peer_of_the_case_and_to_the_fastest_with_as_many_bits():
    ratios = [(r.name, r.bytes, r.ratio_to_best_peer, r.ratio_to_same_wire) for r in some()]
    assert ratios == [
        ("hpc_train fp32", 4096, 1.5, 1.5),
        ("hpc_train bf16", 4096, 0.5, 2.0),  # Horovod's fp16 has 16 bits too, and is twice as fast
        ("Gloo fp32", 4096, 1.0, 1.0),
        ("Open MPI fp32", 4096, 2.0, 2.0),
        ("Horovod fp16", 4096, 0.25, 1.0),
        ("memcpy fp32", 4096, 0.05, 0.05),  # a reference is nobody's rival
        ("hpc_train fp32", 8192, None, None),
        ("hpc_train fp32", 4096, None, None),
        ("Horovod fp16", 4096, None, 1.0),
    ]


def test_a_file_reads_back_and_has_a_line_for_each_record(tmp_path):
    facts = {"command": ["python", "x.py"], "hardware": {"cores": 2}}
    results = Results("sums", True, some(), [Skipped("b", "Gloo", "no network")], facts)
    write(tmp_path / "new" / "x.json", results)
    assert read(tmp_path / "new" / "x.json") == results
    lines = (tmp_path / "new" / "x.json").read_text().splitlines()
    assert sum('"median_s"' in line for line in lines) == len(results.records)


def test_times_are_kept_with_six_digits(tmp_path):
    results = Results("sums", False, [record("a", "Gloo", "fp32", 4, [1.23456789e-5] * 2, "peer")], [], {})
    write(tmp_path / "x.json", results)
    assert read(tmp_path / "x.json").records[0].raw_s == (1.23457e-5, 1.23457e-5)


def test_a_record_is_found_by_its_names():
    results = Results("sums", False, some(), [], {})
    assert results.of("a", OURS, "fp32", 8192).median_s == 7.0
    assert results.of("a", OURS, "fp32").bytes == 4096
    assert results.of("a", OURS, "int8") is None


def test_the_table_has_a_heading_for_each_case_and_size():
    lines = table(some()).splitlines()
    assert [line for line in lines if line.startswith("#")] == ["# a, 4 KiB", "# a, 8 KiB", "# b, 4 KiB"]
    times, ratios = ["3000.000", "2500.000", "-", "3500.000"], ["1.50", "x", "2.00", "x"]
    assert lines[2].split() == ["hpc_train", "fp32", *times, *ratios]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(12, "12 B"), (1024, "1 KiB"), (2**28, "256 MiB"), (76_972_032, "73.41 MiB")]
)
def test_sizes_are_readable(num_bytes, text):
    assert size(num_bytes) == text


def test_records_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        some()[0].median_s = 0.0

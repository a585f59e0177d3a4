"""The time of gradient sums, computed by hand, and beside backward."""

import pytest

from hpc_train.comm.interface import Wire
from hpc_train.comm.wire import encoded_bytes
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.overlap import ChunkSum, Loan, Sums, buckets_of
from hpc_train.planning.placement import Summing
from hpc_train.planning.sums import WIRE_SHARE, half_seconds, sent_bytes, sum_seconds
from hpc_train.planning.timeline import Timeline

CLUSTER = Cluster(64, 8, bandwidth_host=1e9, bandwidth=1e8, latency_host_s=1e-6, latency_s=1e-3)


def test_bytes_on_the_wire_are_those_of_the_formats():
    numel = 1 << 20
    for wire in Wire:
        assert WIRE_SHARE[wire] == encoded_bytes(wire, numel) / (4 * numel)


def test_nothing_to_sum():
    assert sum_seconds(1e9, Wire.FP32, 1, Summing(1, 1, 1, 1), CLUSTER) == 0
    assert sum_seconds(0, Wire.FP32, 1, Summing(8, 8, 1, 1), CLUSTER) == 0


def test_within_a_host():
    """2 x 3/4 of the bytes at 1 GB/s, and 2 latencies for each of 5 buckets."""
    seconds = sum_seconds(1e8, Wire.INT8, 5, Summing(4, 1, 4, 1), CLUSTER)
    assert seconds == pytest.approx(2 * (0.075 + 5 * 1e-6))


def test_between_hosts():
    """2 x 3/4 of the bytes at 100 MB/s, of which 3 stages share; log2(4) rounds of 1 ms each way."""
    at = Summing(4, 4, 1, 3)
    assert sum_seconds(1e8, Wire.FP32, 1, at, CLUSTER) == pytest.approx(2 * (2.25 + 2e-3))
    assert sum_seconds(1e8, Wire.BF16, 1, at, CLUSTER) == pytest.approx(2 * (1.125 + 2e-3))
    assert half_seconds(1e8, Wire.BF16, 1, at, CLUSTER) == pytest.approx(1.125 + 2e-3)


def test_what_a_host_sends_does_not_depend_on_its_ranks():
    for together in (1, 4):
        at = Summing(4 * together, 4, together, 1)
        assert sent_bytes(1e6, Wire.FP32, at, False) == pytest.approx(1.5e6)
        assert sent_bytes(1e6, Wire.BF16, at, False) == pytest.approx(0.75e6)
        assert sent_bytes(1e6, Wire.BF16, at, True) == pytest.approx(0.375e6 + 0.75e6)
    assert sent_bytes(1e6, Wire.FP32, Summing(4, 1, 4, 1), False) == 0


def timeline(last_backward_s, ends_s):
    return Timeline(max(ends_s), 0.0, ends_s, last_backward_s, 0)


def ready_s(sums, *times):
    return Sums(*sums, True, 0.0, 0.0, 0.0, []).ready_s(timeline(*times))


def whole(chunk, seconds):
    """One bucket, which is complete when the chunk's backward is."""
    return ChunkSum(chunk, seconds, 1, 1.0, 1.0)


def test_a_sum_begins_with_the_first_bucket_and_ends_after_the_last():
    """Backward from 8 to 10 completes 4 buckets: the first at 8.5, the last at 10."""
    one = [[ChunkSum(0, 6.0, 4, 0.25, 1.0)]], []
    assert ready_s(one, [(8.0, 10.0)], [10.0]) == 14.5
    quick = [[ChunkSum(0, 0.4, 4, 0.25, 1.0)]], []
    assert ready_s(quick, [(8.0, 10.0)], [10.0]) == pytest.approx(10.1)
    late = Sums([[ChunkSum(0, 6.0, 4, 0.25, 1.0)]], [], False, 0.0, 0.0, 0.0, [])
    assert late.ready_s(timeline([(8.0, 10.0)], [10.0])) == 16


def test_sums_that_need_the_cores_of_backward_make_it_longer():
    """Of 6 s of sums 1.5 are beside backward, and cost it half as much."""
    sums = Sums([[ChunkSum(0, 6.0, 4, 0.25, 1.0)]], [], True, 0.5, 0.0, 0.0, [])
    assert sums.ready_s(timeline([(8.0, 10.0)], [10.0])) == pytest.approx(14.5 + 0.5 * 1.5)


def test_a_bucket_that_a_chunk_leaves_open_waits_for_the_next_chunk():
    """Buckets of 100 bytes; a stage holds chunks 2 and 0 of 60 bytes, or of 250 and 120."""
    found = [
        [sums_of_chunks([(2, 60.0), (0, 60.0)]), [(0, 120.0, 2, 40 / 60, 1.0)]],
        [sums_of_chunks([(2, 250.0), (0, 120.0)]), [(2, 200.0, 2, 0.4, 0.8), (0, 170.0, 2, 50 / 120, 1.0)]],
        [sums_of_chunks([(2, 20.0), (0, 30.0)]), [(0, 50.0, 1, 1.0, 1.0)]],
        [sums_of_chunks([(2, 100.0), (0, 0.0)]), [(2, 100.0, 1, 1.0, 1.0)]],
        [sums_of_chunks([(2, 0.0)]), []],
    ]
    for seen, expected in found:
        assert seen == expected


def sums_of_chunks(chunks):
    return list(buckets_of(chunks, 100))


def test_the_last_stage_sums_while_the_first_still_computes():
    stages = [[whole(0, 1.0)], [whole(1, 2.0)]], []
    assert ready_s(stages, [(8.0, 10.0), (5.0, 7.0)], [10.0, 7.0]) == 11
    assert ready_s(([stages[0][0], [whole(1, 5.0)]], []), [(8.0, 10.0), (5.0, 7.0)], [10.0, 7.0]) == 12


def test_a_stage_sums_its_later_layers_first():
    """Chunk 1 is complete at 9, and chunk 0, complete at 6, waits for its sum."""
    stage = [[whole(1, 2.0), whole(0, 3.0)]], []
    assert ready_s(stage, [(5.0, 6.0), (8.0, 9.0)], [9.0]) == 9 + 2 + 3


def test_a_borrowed_parameter_is_summed_when_all_its_gradients_are_there():
    sums = [[whole(0, 0.5)], []], [Loan(owner=0, others=(1,), pass_s=3.0, sum_s=2.0)]
    assert ready_s(sums, [(8.0, 10.0), (5.0, 7.0)], [10.0, 7.0]) == 10 + 3 + 2
    assert ready_s(sums, [(8.0, 10.0), (5.0, 12.0)], [10.0, 12.0]) == 12 + 3 + 2

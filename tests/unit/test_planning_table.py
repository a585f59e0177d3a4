"""A plan as text."""

from benchmarks.planner.large import transformer
from hpc_train.comm.interface import Wire
from hpc_train.planning.choice import Candidate
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.options import Options
from hpc_train.planning.planner import Planned, plan
from hpc_train.planning.table import WIDTH, table


def candidate(**other):
    fields = {
        "replicas": 16,
        "stages": 4,
        "fastest": "stage",
        "schedule": "zb-h1",
        "chunks": 1,
        "micro_batch": 4,
        "recompute": "none",
        "wire": Wire.INT8,
        "pipeline_wire": Wire.BF16,
        "split": (3, 2, 2, 1),
        "step_s": 1.238,
        "pipeline_s": 1.2,
        "bubble": 0.031,
        "exposed_sum_s": 0.012,
        "rank_bytes": 61.2e9,
        "host_bytes": 3e9,
        "samples_per_s": 413.6,
    }
    return Candidate(**fields | other)


def test_the_table():
    other = candidate(schedule="1f1b", stages=1, replicas=64, step_s=1.5)
    planned = Planned([candidate(), other], ["8 stages: needs 93 GB of 80 GB"], 1234, 7, 99)
    head, row, alone = table(planned).splitlines()[4:7]
    assert head == (
        "  grid fastest schedule micro recompute wires       step samples/s bubble exposed  memory a host"
    )
    assert row == (
        "1 16x4 stage   zb-h1    4     none      int8/bf16 1.24 s       414   3.1%   12 ms 61.2 GB   3 GB"
    )
    assert alone == (
        "2 64x1 stage   1f1b     4     none      int8       1.5 s       414   3.1%   12 ms 61.2 GB   3 GB"
    )
    assert table(planned).splitlines()[0] == "1,234 ways considered, 7 simulated"
    assert table(planned).splitlines()[7:] == [
        "",
        "layers of each chunk of the best: 3, 2 x 2, 1",
        "",
        "why others lose:",
        "  8 stages: needs 93 GB of 80 GB",
    ]


def test_large_plans_fit_the_width():
    cluster = Cluster.read(1024, 8, "80GB", "300GB/s", "25GB/s", "2us")
    options = Options(wires=(Wire.INT8, Wire.FP32), stages=(8, 16))
    text = table(plan(transformer(), cluster, 1536, options))
    assert max(map(len, text.splitlines())) <= WIDTH

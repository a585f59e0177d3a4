"""Every grid, schedule, wire and cut of the batch against plain PyTorch: loss, gradients, parameters.

The tolerances and the reasons for them stand in hpc_train.training.parity.tolerances.
"""

import json
from pathlib import Path

import pytest

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
EXAMPLES = Path(__file__).parents[2] / "examples"
CASES = Path(__file__).with_name("parity_cases.py")

SMALL_LM = [
    "task_options.context=16",
    "task_options.hidden=32",
    "task_options.blocks=6",
    "task_options.heads=2",
    "batch.size=12",
    "batch.micro_batch=2",
]
SMALL_TRANSLATE = [
    "task_options.vocabulary=300",
    "task_options.context=12",
    "task_options.hidden=32",
    "task_options.blocks=3",
    "task_options.heads=2",
    "batch.size=12",
    "batch.micro_batch=2",
]
SMALL = {"bytelm": SMALL_LM, "translate": SMALL_TRANSLATE}


def case(task, *overrides, **more):
    return {
        "config": str(EXAMPLES / f"{task}.toml"),
        "overrides": [*SMALL.get(task, []), *overrides],
        **more,
    }


def check(mpirun, num_ranks, cases, *backend):
    done = mpirun(num_ranks, [CASES, json.dumps(cases), *backend], timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")]
    assert len(lines) == len(cases), done.stdout
    for asked, differences in zip(cases, lines, strict=True):
        assert [d["quantity"] for d in differences] == ["loss", "gradients", "parameters"]
        for d in differences:
            assert d["holds"], f"{asked}: {d}"


@pytest.mark.parametrize(("replicas", "stages"), [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (3, 2)])
def test_schedules_and_wires(mpirun, replicas, stages):
    cases = [
        case("bytelm", f"grid.stages={stages}", f"pipeline.schedule={schedule}", f"gradients.wire={wire}")
        for schedule, wire in zip(SCHEDULES, ("fp32", "fp16", "fp32", "fp16", "fp32"), strict=True)
    ]
    check(mpirun, replicas * stages, cases)


@pytest.mark.parametrize(("replicas", "stages"), [(1, 1), (1, 4), (2, 2)])
def test_tied_embeddings_batch_norm_dropout_and_recomputation(mpirun, replicas, stages):
    # Before a BatchNorm the gradient of a bias is zero but for rounding, of which AdamW would make a step.
    sgd = ["optimizer.name=sgd"]
    cases = []
    for schedule in SCHEDULES:
        grid = [f"grid.stages={stages}", f"pipeline.schedule={schedule}", "gradients.wire=fp32"]
        cases += [
            case("bytelm", *grid, "task_options.tied=true", "optimizer.clip_norm=0.1"),
            case(
                "bytelm",
                *grid,
                "task_options.tied=true",
                "task_options.dropout=0.2",
                "pipeline.recompute=all",
            ),
            case(
                "digits",
                *grid,
                "task_options.norm=batch",
                "task_options.convolutions=7",
                "batch.size=30",
                *sgd,
            ),
        ]
    check(mpirun, replicas * stages, cases)


@pytest.mark.parametrize(("replicas", "stages"), [(1, 4), (2, 2)])
def test_an_encoder_and_a_decoder_that_pass_tuples_and_a_mask(mpirun, replicas, stages):
    """With a tied embedding and a loss whose weights are the tokens of a sentence."""
    pytest.importorskip("polib")
    cases = [
        case(
            "translate",
            f"grid.stages={stages}",
            f"pipeline.schedule={schedule}",
            f"task_options.dropout={rate}",
        )
        for schedule, rate in zip(SCHEDULES, (0.0, 0.1, 0.1, 0.1, 0.0), strict=True)
    ]
    check(mpirun, replicas * stages, cases)


def test_tied_embeddings_with_a_sharded_optimizer_and_powersgd(mpirun):
    tied = ["grid.stages=2", "task_options.tied=true", "pipeline.schedule=zb-h1"]
    cases = [
        case("bytelm", *tied, "optimizer.sharded=true"),
        case("bytelm", *tied, "gradients.compression=powersgd", "gradients.powersgd_warm_up_steps=5"),
        case("bytelm", *tied, shares=[0, 1]),
    ]
    check(mpirun, 4, cases)


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_activations_in_16_bits(mpirun, wire):
    check(mpirun, 4, [case("bytelm", "grid.stages=4", f"pipeline.wire={wire}", "pipeline.schedule=zb-h1")])


def test_a_schedule_from_a_file(mpirun, tmp_path):
    file = tmp_path / "order.csv"
    file.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    check(mpirun, 4, [case("bytelm", "grid.stages=2", f"pipeline.schedule={file}")])


@pytest.mark.parametrize("fastest", ["stage", "replica"])
def test_ragged_batches_and_a_zero_share(mpirun, fastest):
    grid = ["grid.stages=2", f"grid.fastest={fastest}", "gradients.wire=fp32"]
    cases = [
        # 13 samples in micro-batches of 3 over 2 replicas: 7 = 3 + 3 + 1 and 6 = 3 + 3
        case("bytelm", *grid, "batch.size=13", "batch.micro_batch=3"),
        case("bytelm", *grid, "batch.size=13", "batch.micro_batch=3", shares=[12, 1]),
        case("bytelm", *grid, "batch.size=12", shares=[0, 1]),
        case("bytelm", *grid, "batch.size=12", "pipeline.schedule=gpipe", shares=[1, 0]),
        # fewer micro-batches than stages
        case("bytelm", *grid, "batch.size=2", "batch.micro_batch=2", steps=2),
    ]
    check(mpirun, 4, cases)


def test_a_last_batch_of_the_epoch_that_is_short(mpirun):
    # 150 samples in batches of 64: the third step has 22
    cases = [
        case(
            "regression", "task_options.samples=150", "batch.size=64", "batch.micro_batch=8", "grid.stages=2"
        )
    ]
    check(mpirun, 4, cases)


def test_clipping_is_by_the_norm_of_all_stages(mpirun):
    clip = ["gradients.wire=fp32", "optimizer.name=sgd", "optimizer.clip_norm=0.05"]
    check(mpirun, 4, [case("bytelm", "grid.stages=4", *clip), case("bytelm", "grid.stages=2", *clip)])


def test_a_split_by_hand_small_buckets_and_sums_after_backward(mpirun):
    cases = [
        case("bytelm", "grid.stages=2", "pipeline.split=[1, 7]", "gradients.bucket_bytes=4KiB"),
        case("bytelm", "grid.stages=2", "gradients.overlap=false"),
    ]
    check(mpirun, 4, cases)


def test_convolutions_on_real_digits(mpirun):
    check(mpirun, 4, [case("digits", f"grid.stages={stages}", "gradients.wire=fp32") for stages in (1, 2, 4)])


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
def test_gradients_through_torch_distributed(mpirun, wire):
    check(mpirun, 4, [case("bytelm", "grid.stages=2", f"gradients.wire={wire}")], "gloo")


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
def test_gradients_through_horovod(mpirun_horovod, wire):
    check(mpirun_horovod, 4, [case("bytelm", "grid.stages=2", f"gradients.wire={wire}")], "horovod")

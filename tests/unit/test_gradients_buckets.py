"""Which gradient lies where."""

import pytest
import torch
from torch import nn

from hpc_train.comm.interface import Wire
from hpc_train.comm.loopback import run_ranks
from hpc_train.errors import UserError
from hpc_train.gradients.buckets import fingerprint, group_parameters, make_buckets, trained
from hpc_train.grid import Grid


@pytest.fixture
def collective():
    return run_ranks(1, lambda world: world.collective(Grid(1, 1), torch.device("cpu")))[0]


def parameters(**sizes):
    return [(name, nn.Parameter(torch.randn(size))) for name, size in sizes.items()]


def buckets_of(named, collective, bucket_bytes):
    return make_buckets(group_parameters(named, bucket_bytes), collective)


def layout(buckets):
    return [[slot.name for slot in bucket.slots] for bucket in buckets]


def test_order_is_that_of_backward(collective):
    buckets = buckets_of(parameters(first=16, second=16, third=16), collective, bucket_bytes=128)
    assert layout(buckets) == [["third", "second"], ["first"]]
    assert [bucket.index for bucket in buckets] == [0, 1]


def test_a_weight_that_fills_a_bucket_is_not_parted_from_its_bias(collective):
    buckets = buckets_of(parameters(a=16, weight=64, bias=16, large=1000), collective, bucket_bytes=256)
    assert layout(buckets) == [["large"], ["bias", "weight"], ["a"]]


def test_views_tile_the_buffer_and_start_aligned(collective):
    (bucket,) = buckets_of(parameters(a=(3, 5), b=7, c=()), collective, bucket_bytes=2**20)
    offsets = [slot.view.data_ptr() - bucket.buffer.data_ptr() for slot in bucket.slots]
    assert offsets == [0, 64, 128]  # c, b and a, each padded to 64 bytes
    for slot in bucket.slots:
        slot.view.fill_(1.0)
    assert bucket.buffer.sum() == 15 + 7 + 1


def test_tied_parameters_are_one_under_the_first_name(collective):
    embedding, head = parameters(embedding=4, head=4)
    buckets = buckets_of([embedding, head, ("tied", embedding[1])], collective, bucket_bytes=2**20)
    # The gradient of a tied parameter is complete where backward meets it last: at its first use.
    assert layout(buckets) == [["head", "embedding"]]


def test_frozen_parameters_are_left_out(collective):
    named = parameters(a=4, frozen=4)
    named[1][1].requires_grad_(False)
    assert trained(named) == named[:1]
    assert layout(buckets_of(named, collective, bucket_bytes=2**20)) == [["a"]]


@pytest.mark.parametrize("kernel", [1, 3])
def test_views_have_the_memory_format_of_the_parameter(collective, kernel):
    conv = nn.Conv2d(3, 4, kernel).to(memory_format=torch.channels_last)
    (bucket,) = buckets_of(list(conv.named_parameters()), collective, bucket_bytes=2**20)
    view = bucket.slots[-1].view
    assert view.shape == conv.weight.shape
    assert view.stride() == conv.weight.stride()
    assert view.is_contiguous(memory_format=torch.channels_last)


def test_a_parameter_with_gaps_gets_a_contiguous_view(collective):
    strided = nn.Parameter(torch.randn(4, 6)[:, ::2])
    (bucket,) = buckets_of([("strided", strided)], collective, bucket_bytes=2**20)
    assert bucket.slots[0].view.is_contiguous()
    assert bucket.slots[0].view.shape == (4, 3)


def test_scripts_that_move_the_gradients_memory_do_not_move_the_bucket(collective):
    """`p.grad.data = ...` swaps the memory under a tensor: a view kept by us must not follow."""
    ((_, parameter),) = named = parameters(a=3)
    (bucket,) = buckets_of(named, collective, bucket_bytes=2**20)
    (slot,) = bucket.slots
    slot.scatter()
    parameter.grad.data = torch.tensor([1.0, 2.0, 3.0])
    slot.gather()
    assert bucket.buffer[:3].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_converted_in_and_out(collective, dtype):
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    (bucket,) = buckets_of([("a", parameter)], collective, bucket_bytes=2**20)
    parameter.grad = torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
    bucket.gather()
    bucket.buffer *= 2
    bucket.scatter()
    assert parameter.grad.dtype == dtype
    assert parameter.grad.tolist() == [2.0, 4.0, 6.0]


def test_sparse_gradients_become_dense(collective):
    embedding = nn.Embedding(5, 2, sparse=True)
    (bucket,) = buckets_of(list(embedding.named_parameters()), collective, bucket_bytes=2**20)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    bucket.gather()
    assert bucket.slots[0].view[:, 0].tolist() == [0.0, 2.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (nn.Parameter(torch.zeros(3, dtype=torch.complex64)), "parameter a is torch.complex64"),
        (nn.UninitializedParameter(), "parameter a has no shape yet"),
        (nn.Parameter(torch.zeros(3, device="meta")), "parameter a is on meta, but .* on cpu"),
    ],
)
def test_parameters_that_cannot_be_summed_are_refused(collective, parameter, message):
    with pytest.raises(UserError, match=message):
        buckets_of([("a", parameter)], collective, bucket_bytes=2**20)


def test_fingerprints_tell_layouts_apart():
    def of(bucket_bytes=2**20, **sizes):
        return fingerprint(group_parameters(parameters(**sizes), bucket_bytes), Wire.FP32)

    same = of(a=4, b=5)
    assert same == of(a=4, b=5)
    assert len({same, of(a=4, c=5), of(a=4, b=6), of(b=5, a=4), of(bucket_bytes=64, a=4, b=5)}) == 5
    groups = group_parameters(parameters(a=4), 2**20)
    assert fingerprint(groups, Wire.FP32) != fingerprint(groups, Wire.FP16)

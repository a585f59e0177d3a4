"""Messages between stages: what goes in comes out, whatever shapes and dtypes."""

import pytest
import torch
from pipelines import RendezvousLinks

from hpc_train.comm.interface import TAG_LIMIT
from hpc_train.comm.loopback import run_ranks
from hpc_train.errors import UserError
from hpc_train.grid import Grid
from hpc_train.pipeline.messages import Outbox, receive_message, tag_of

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def transfer(value):
    """`value` as stage 1 gets it from stage 0, and which of its tensors need a gradient."""

    def body(world):
        link = world.peer_link(Grid(1, 2))
        if world.rank == 0:
            outbox = Outbox()
            outbox.send_message(link, value, 1, tag=5)
            return outbox.wait_all()
        return receive_message(link, 0, 5, torch.device("cpu"))

    return run_ranks(2, body)[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype):
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    received, needs_gradient = transfer(tensor)
    assert received.dtype == dtype
    torch.testing.assert_close(received, tensor)
    assert needs_gradient == (False,)


def test_a_tuple_of_other_shapes_with_none_of_their_memory_layouts():
    value = (
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(7),
        torch.empty(0, 4),
        torch.ones(1, 2, 1, 3, requires_grad=True),
        torch.arange(10)[::2],
    )
    received, needs_gradient = transfer(value)
    assert isinstance(received, tuple)
    for there, here in zip(received, value, strict=True):
        torch.testing.assert_close(there, here.detach())
        assert there.is_contiguous()
    assert needs_gradient == (False, False, False, True, False)


def test_a_tuple_of_one_stays_a_tuple():
    (received,), _ = transfer((torch.ones(2),))
    assert received.tolist() == [1.0, 1.0]


def test_tags_stay_below_the_least_that_mpi_promises():
    kinds = ("activations", "gradients", "answer")
    tags = {tag_of(kind, micro_batch) for kind in kinds for micro_batch in range(5000)}
    assert len(tags) == 15_000
    assert all(
        0 <= tag_of(kind, micro_batch) < TAG_LIMIT for kind in kinds for micro_batch in (0, 10**6, 10**9)
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.ones(1)], r"a layer gives a list to the next stage"),
        ((torch.ones(1), None), r"a layer gives a NoneType in a tuple to the next stage"),
        (torch.ones(1).to(torch.float8_e5m2), r"torch\.float8_e5m2 to the next stage, which cannot be sent"),
        (
            tuple(torch.ones(1, 1) for _ in range(60)),
            r"60 tensors to the next stage, more than a message holds",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused(value, message):
    with pytest.raises(UserError, match=message):
        Outbox().send_message(RendezvousLinks().link(0), value, 1, tag=0)

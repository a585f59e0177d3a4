"""Messages between stages: what goes in comes out, whatever shapes and dtypes."""

import pytest
import torch
from pipelines import RendezvousLinks

from hpc_train.comm.interface import TAG_LIMIT, Wire
from hpc_train.comm.loopback import run_ranks
from hpc_train.errors import UserError
from hpc_train.grid import Grid
from hpc_train.pipeline.messages import HEADER_BYTES, Expected, Outbox, receive_message, tag_of
from hpc_train.pipeline.values import put_together

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def transfer(value, wire=Wire.FP32):
    """`value` as stage 1 gets it from stage 0, and which of its tensors need a gradient."""

    def body(world):
        link = world.peer_link(Grid(1, 2))
        if world.rank == 0:
            outbox = Outbox(link, wire)
            outbox.send_message(value, 1, tag=5)
            return outbox.wait_all()
        structure, tensors, description = Expected(link, 0, 5, wire, torch.device("cpu")).take()
        return put_together(structure, tensors), tuple(form.needs_gradient for form in description.forms)

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


def test_values_of_other_kinds_come_as_what_they_were():
    """1, 1.0 and True are equal, and headers are remembered."""
    for value in ({"a": [1, None, "text"]}, {"a": [1.0, None, "text"]}, {"a": [True, None, "text"]}):
        received, _ = transfer((torch.ones(1), value))
        assert received[1] == value
        assert type(received[1]["a"][0]) is type(value["a"][0])


@pytest.mark.parametrize("wire", [Wire.FP16, Wire.BF16])
def test_fp32_is_rounded_to_the_wire_and_nothing_else_is(wire):
    value = (torch.tensor([1.0, 1e-9, -3.14159]), torch.tensor([3.14159]).double(), torch.empty(2, 0))
    (singles, doubles, empty), _ = transfer(value, wire)
    torch.testing.assert_close(singles, value[0], rtol=4e-3, atol=0.0 if wire is Wire.BF16 else 1e-10)
    assert not torch.equal(singles, value[0])
    assert torch.equal(doubles, value[1])
    assert empty.shape == (2, 0)


def test_a_message_as_a_whole():
    def body(world):
        link = world.peer_link(Grid(1, 2))
        if world.rank == 0:
            outbox = Outbox(link)
            outbox.send_message([torch.ones(2)], 1, tag=5)
            return outbox.wait_all()
        return receive_message(link, 0, 5, Wire.FP32, torch.device("cpu"))

    (received,) = run_ranks(2, body)[1]
    assert received.tolist() == [1.0, 1.0]


def test_tags_stay_below_the_least_that_mpi_promises():
    kinds = ("activations", "gradients", "answer", "tied gradient", "tied parameter")
    tags = {tag_of(kind, micro_batch) for kind in kinds for micro_batch in range(5000)}
    assert len(tags) == 25_000
    assert all(
        0 <= tag_of(kind, micro_batch) < TAG_LIMIT for kind in kinds for micro_batch in (0, 10**6, 10**9)
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((torch.ones(1), {1}), r"a layer gives a set to the next"),
        ({1: torch.ones(1)}, r"a layer gives a dict to the next"),
        (torch.ones(1).to(torch.float8_e5m2), r"torch\.float8_e5m2 to the next stage, which cannot be sent"),
        (
            tuple(torch.ones(1, 1) for _ in range(90)),
            r"90 tensors to the next stage, more than a message holds",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused(value, message):
    with pytest.raises(UserError, match=message):
        Outbox(RendezvousLinks().link(0)).send_message(value, 1, tag=0)


def test_the_tensors_of_an_announced_message_come_before_they_are_taken():
    links = RendezvousLinks()
    outbox = Outbox(links.link(0))
    expected = Expected(links.link(1), 0, 5, Wire.FP32, torch.device("cpu"))
    expected.look()  # nothing is there, and nobody waits
    assert not links.messages
    outbox.send_message(torch.ones(2, 3), 1, tag=5)
    assert len(links.messages) == 1
    expected.look()
    expected.look()
    assert [shape for *_, shape in links.messages] == [(HEADER_BYTES,), (2, 3)]
    _, (tensor,), _ = expected.take()
    outbox.wait_all()
    assert torch.equal(tensor, torch.ones(2, 3))
    links.check_all_is_over()

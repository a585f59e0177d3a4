"""Sums by every order, cut and wire, on ranks that are threads."""

import pytest
import torch

from hpc_train.comm.host_memory import PrivateMemory
from hpc_train.comm.interface import Wire
from hpc_train.comm.loopback import run_ranks
from hpc_train.comm.routed_sum import Way
from hpc_train.comm.routes import Hosts, direct, halving
from hpc_train.comm.wire import encoded_bytes
from hpc_train.grid import Grid

CPU = torch.device("cpu")


def sums(shape, make, whole, wire, numel, message_bytes=9000, in_flight=3):
    hosts = [int(host) for host in shape]

    def body(world):
        collective = world.collective(Grid(world.size, 1), CPU)
        way = Way(make(collective._hosts, world.rank), message_bytes, whole, in_flight)
        buffer = collective.allocate(numel)
        buffer.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(world.rank)))
        mine = buffer.clone()
        residual = torch.zeros(numel)
        collective._routed.sum_(buffer, way, wire, residual)
        return mine, buffer.clone(), residual

    return run_ranks(len(hosts), body, hosts=hosts)


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("shape", ["01", "012", "0123", "001122", "0123456"])
@pytest.mark.parametrize(("make", "whole"), [(direct, True), (direct, False), (halving, False)])
def test_all_ranks_get_the_same_bits_and_nothing_is_lost(make, whole, shape, wire):
    done = sums(shape, make, whole, wire, numel=20_011)
    exact = sum(mine.double() for mine, _, _ in done)
    first = done[0][1]
    assert all(torch.equal(total, first) for _, total, _ in done)
    held_back = sum(residual.double() for _, _, residual in done)
    torch.testing.assert_close(first.double() + held_back, exact, rtol=0, atol=1e-5)
    assert bool(held_back.any()) == wire.lossy
    levels = {Wire.FP32: 1e-5, Wire.FP16: 0.01, Wire.BF16: 0.1, Wire.INT8: 0.5}[wire]
    torch.testing.assert_close(first.double(), exact, rtol=0, atol=levels)


class OnDevice(torch.Tensor):
    """Plays a tensor on a GPU that MPI cannot reach: copied to host memory and back, never mixed with it."""

    is_cuda = True
    device = torch.device("cuda")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.to:
            return args[0].as_subclass(torch.Tensor).clone()
        mixed = any(type(arg) is torch.Tensor for arg in args)
        if mixed and function is not torch.Tensor.copy_:
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(function, types, args, kwargs)


class StagingMemory(PrivateMemory):
    """Without a GPU there is no pinned memory."""

    def scratch(self, numel):
        return torch.empty(numel)


@pytest.mark.parametrize("wire", Wire)
def test_error_feedback_on_a_device_goes_through_the_host_with_the_values(wire):
    """The residual stayed on the device while the values were added up on the host, which torch refuses."""

    def body(world, on_device):
        collective = world.collective(Grid(world.size, 1), CPU)
        buffer, residual = torch.zeros(5003), torch.zeros(5003)
        if on_device:
            collective._routed._host = StagingMemory(staged=True)
            buffer, residual = buffer.as_subclass(OnDevice), residual.as_subclass(OnDevice)
        totals = []
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + world.rank)
            buffer.copy_(torch.randn(buffer.numel(), generator=generator))
            collective.sum_(buffer, wire, residual)
            totals.append(buffer.as_subclass(torch.Tensor).clone())
        return [*totals, residual.as_subclass(torch.Tensor)]

    usual = run_ranks(2, lambda world: body(world, on_device=False))
    staged = run_ranks(2, lambda world: body(world, on_device=True))
    for expected, found in zip(usual, staged, strict=True):
        assert all(torch.equal(e, f) for e, f in zip(expected, found, strict=True))
        assert bool(found[-1].any()) == wire.lossy


@pytest.mark.parametrize("wire", Wire)
def test_a_total_just_below_a_power_of_two_is_handed_on_as_it_came(wire):
    """The first of 3 hosts hands the second's total on to the third, in words that it makes anew."""
    one_block = torch.zeros(1024)
    one_block[0] = 2 - 2.0**-20  # fp16 makes it 2, and then had one bit less for the small ones
    one_block[1:] = 3 * 2.0**-38

    def body(world):
        collective = world.collective(Grid(world.size, 1), CPU)
        buffer = one_block.repeat(16) if world.rank == 1 else torch.zeros(16 * 1024)
        way = Way(halving(collective._hosts, world.rank), 9000, whole=False)
        collective._routed.sum_(buffer, way, wire)
        return buffer

    first, *others = run_ranks(3, body)
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("in_flight", [1, 2, 8])
@pytest.mark.parametrize("message_bytes", [1, 50_000, 10**9])
def test_the_cut_changes_no_bit(message_bytes, in_flight):
    """Blocks begin at fixed places, so how messages are cut is a matter of speed alone."""
    (_, usual, _), *_ = sums("012", direct, True, Wire.INT8, 20_011)
    for _, total, _ in sums("012", direct, True, Wire.INT8, 20_011, message_bytes, in_flight):
        assert torch.equal(total, usual)


@pytest.mark.parametrize("num_hosts", [2, 3, 4, 6, 8])
@pytest.mark.parametrize(("make", "whole"), [(direct, True), (halving, False)])
def test_all_ranks_cut_alike_and_no_message_is_longer_than_it_may_be(make, whole, num_hosts):
    hosts = Hosts(tuple(range(num_hosts)))
    orders = [make(hosts, rank) for rank in range(num_hosts)]
    for numel in (50_000, 1_000_000):
        cuts = [Way(order, 60 * 1024, whole, segments=8).cut(numel, Wire.FP16) for order in orders]
        assert len(set(cuts)) == 1
        assert cuts[0].segments >= min(8, numel // num_hosts // 4096)
        for order, cut in zip(orders, cuts, strict=True):
            for transfer in (t for each in order.reduce + order.spread for t in each.sends):
                span = cut.span(0, transfer.first, transfer.last)
                assert encoded_bytes(Wire.FP16, span.stop - span.start) <= 60 * 1024

"""What every backend must do where it sums: functions `check_...(world)`, as in cases.py."""

import threading

import torch

from hpc_train.comm.interface import Wire, World
from hpc_train.grid import Grid

CPU = torch.device("cpu")
SIZES = (0, 1, 7, 100_003)  # nothing; fewer values than ranks; pieces that are not even
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def contributions(num_ranks: int, numel: int) -> list[torch.Tensor]:
    """Gradient-like values of every rank, known to every rank."""
    return [
        torch.randn(numel, generator=torch.Generator().manual_seed(1000 + rank)) for rank in range(num_ranks)
    ]


def assert_sum(got: torch.Tensor, parts: list[torch.Tensor], wire: Wire) -> None:
    """`got` is the sum of `parts` as exactly as the wire's format allows."""
    exact = sum(part.double() for part in parts)
    magnitude = sum(part.double().abs() for part in parts)
    largest = sum(part.double().abs().max() for part in parts) if exact.numel() else 0.0
    # fp32 additions: each rounds its partial sum, which is at most the sum of magnitudes, to 24 bits.
    tolerance = len(parts) * 2.0**-24 * magnitude
    # Each contribution is rounded once, or in partial sums log2(ranks) times, and the sum once more; see
    # the table in comm/wire.py.
    times = 1 + max(1, (len(parts) - 1).bit_length())
    if wire is Wire.FP16:
        tolerance = tolerance + 1.001 * times * (2.0**-11 * magnitude + 2.0**-39 * largest)
    elif wire is Wire.BF16:
        tolerance = tolerance + 1.004 * times * 2.0**-8 * magnitude
    elif wire is Wire.INT8:
        tolerance = tolerance + 1.01 * times * 2.0**-7 * largest
    assert bool((torch.abs(got.double() - exact) <= tolerance).all())


def assert_same_bits(world: World, tensor: torch.Tensor) -> None:
    everywhere = world.control.all_gather(tensor.view(torch.uint8).numpy().tobytes())
    assert len(set(everywhere)) == 1


def check_sum_of_every_size(world: World) -> None:
    collective = world.collective(Grid(world.size, 1), CPU)
    assert (collective.rank, collective.size) == (world.rank, world.size)
    for wire in Wire:
        for numel in (*SIZES, *reversed(SIZES)):
            parts = contributions(world.size, numel)
            buffer = collective.allocate(numel)
            assert buffer.dtype is torch.float32
            assert not buffer.any()
            buffer.copy_(parts[world.rank])
            collective.sum_(buffer, wire)
            assert_sum(buffer, parts, wire)
            assert_same_bits(world, buffer)
    collective.close()


def check_sum_of_a_part_leaves_the_rest(world: World) -> None:
    collective = world.collective(Grid(world.size, 1), CPU)
    for wire in Wire:
        parts = contributions(world.size, 1000)
        memory = collective.allocate(1010)
        memory[5:1005] = parts[world.rank]
        collective.sum_(memory[5:1005], wire)
        assert_sum(memory[5:1005].clone(), parts, wire)
        assert not memory[:5].any()
        assert not memory[1005:].any()
    collective.close()


def check_sum_neither_overflows_nor_underflows(world: World) -> None:
    """fp16 alone ends at 65,504 and at 6e-8: sums near and far beyond both must hold."""
    collective = world.collective(Grid(world.size, 1), CPU)
    for wire in Wire:
        for scale in (6.0e4, 1.0e30, 1.0e-30, 1.0e-7):
            parts = [scale * (1 + part.abs().clamp(max=1)) for part in contributions(world.size, 4099)]
            buffer = parts[world.rank].clone()
            collective.sum_(buffer, wire)
            assert bool(buffer.isfinite().all())
            assert bool(buffer.all())
            assert_sum(buffer, parts, wire)
            assert_same_bits(world, buffer)
        parts = contributions(world.size, 4099)
        for rank, part in enumerate(
            parts
        ):  # each rank in a range of its own, and one value far above the rest
            part *= 10.0 ** (20 * (rank % 3) - 20)
            part[17 * rank] *= 1e6
        buffer = parts[world.rank].clone()
        collective.sum_(buffer, wire)
        assert_sum(buffer, parts, wire)
    collective.close()


def check_sum_keeps_what_is_not_finite(world: World) -> None:
    collective = world.collective(Grid(world.size, 1), CPU)
    for wire in Wire:
        for bad in (float("inf"), float("-inf"), float("nan")):
            buffer = torch.ones(1001)
            if world.rank == world.size - 1:
                buffer[3] = buffer[900] = bad
            collective.sum_(buffer, wire)
            wrong = ~buffer.isfinite()
            assert wrong.nonzero().flatten().tolist() == [3, 900]
            assert buffer[4].item() == world.size
            assert_same_bits(world, wrong)
    collective.close()


def check_sum_counts_what_it_loses(world: World) -> None:
    collective = world.collective(Grid(world.size, 1), CPU)
    buffer = torch.ones(5000)
    buffer[7] = 1e-30
    for wire in Wire:
        collective.sum_(buffer.clone(), wire)
    lost = world.control.total([collective.losses.overflows, collective.losses.underflows])
    buffer[9] = float("inf")
    collective.sum_(buffer.clone(), Wire.FP16)
    more = world.control.total([collective.losses.overflows, collective.losses.underflows])
    travels = lost[1] > 0
    assert travels == (more[0] > 0)
    assert lost[0] == 0
    collective.close()


def check_a_residual_carries_on_what_was_rounded_off(world: World) -> None:
    """Over some sums, what came out and what is still held back make up what went in."""
    collective = world.collective(Grid(world.size, 1), CPU)
    numel = 5003
    for wire in Wire:
        residual = torch.zeros(numel)
        came = torch.zeros(numel, dtype=torch.float64)
        went = torch.zeros(numel, dtype=torch.float64)
        for step in range(4):
            parts = [part * (step + 1) for part in contributions(world.size, numel)]
            buffer = collective.allocate(numel)
            buffer.copy_(parts[world.rank])
            collective.sum_(buffer, wire, residual)
            assert_same_bits(world, buffer)
            came += buffer
            went += sum(part.double() for part in parts)
        collective.sum_(residual, Wire.FP32)
        torch.testing.assert_close(came + residual, went, rtol=0, atol=1e-4)
        worst = float((came - went).abs().max())
        assert bool(residual.any()) == (worst > 1e-4)
        if wire is Wire.INT8:
            assert worst < 4 * world.size * 2.0**-6 * 5  # of the last step alone, not of four
    collective.close()


def check_shards_are_the_buffer_once(world: World) -> None:
    collective = world.collective(Grid(world.size, 1), CPU)
    for numel in SIZES:
        mine = collective.shard(numel)
        spans = [
            tuple(map(int, text.decode().split()))
            for text in world.control.all_gather(f"{mine.start} {mine.stop}".encode())
        ]
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == numel
    collective.close()


def check_reduce_scatter_and_all_gather_make_a_sum(world: World) -> None:
    collective = world.collective(Grid(world.size, 1), CPU)
    for wire in Wire:
        for numel in SIZES:
            for own_memory in (False, True):
                parts = contributions(world.size, numel)
                buffer = collective.allocate(numel) if own_memory else torch.empty(numel)
                buffer.copy_(parts[world.rank])
                collective.reduce_scatter_(buffer, wire)
                mine = collective.shard(numel)
                assert_sum(buffer[mine], [part[mine] for part in parts], wire)
                for part in parts:
                    part *= 4.0  # exact
                kept = buffer[mine] * 4.0
                buffer.fill_(-1.0)
                buffer[mine] = kept
                collective.all_gather_(buffer)
                assert torch.equal(buffer[mine], kept)
                assert_sum(buffer, parts, wire)
                assert_same_bits(world, buffer)
    collective.close()


def check_prepare_keeps_sums_right(world: World) -> None:
    collective = world.collective(Grid(world.size, 1), CPU)
    for wire in Wire:
        for numel in (100, 50_000):
            told = collective.prepare(numel, wire)
            assert len(set(world.control.all_gather(told.encode()))) == 1
            parts = contributions(world.size, numel)
            buffer = collective.allocate(numel)
            buffer.copy_(parts[world.rank])
            collective.sum_(buffer, wire)
            assert_sum(buffer, parts, wire)
            assert_same_bits(world, buffer)
    collective.close()


def check_sum_in_a_thread_beside_messages(world: World) -> None:
    """The reducer's thread sums while the main thread passes activations and talks to rank 0."""
    grid = Grid(world.size // 2, 2) if world.size % 2 == 0 else Grid(world.size, 1)
    collective = world.collective(grid, CPU)
    link = world.peer_link(grid)
    place = grid.place(world.rank)
    rounds, numel = 12, 50_000
    sums: list[torch.Tensor] = []
    errors: list[BaseException] = []

    def reduce() -> None:
        try:
            for i in range(rounds):
                buffer = torch.full((numel,), float(place.replica + i))
                collective.sum_(buffer, Wire.FP16 if i % 2 else Wire.FP32)
                sums.append(buffer)
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=reduce)
    if collective.threaded:
        thread.start()
    for i in range(rounds):
        gathered = world.control.gather(bytes([world.rank, i]))
        if grid.stages == 2:
            other = 1 - place.stage
            arrived = torch.empty(numel)
            receive = link.irecv(arrived, other, tag=i)
            send = link.isend(torch.full((numel,), float(world.rank)), other, tag=i)
            receive.wait()
            send.wait()
            assert bool((arrived == grid.rank(place.replica, other)).all())
        told = world.control.broadcast(bytes([i]) if world.rank == 0 else None, 1)
        records = gathered.result()
        assert records == ([bytes([rank, i]) for rank in range(world.size)] if world.rank == 0 else None)
        assert told.result() == bytes([i])
    if collective.threaded:
        thread.join()
    else:
        reduce()
    assert not errors
    for i, buffer in enumerate(sums):
        assert bool((buffer == sum(replica + i for replica in range(grid.replicas))).all())
    assert len(sums) == rounds
    collective.close()


def check_max_broadcast_and_barrier(world: World) -> None:
    collective = world.collective(Grid(world.size, 1), CPU)
    assert collective.max(float(-world.rank)) == 0.0
    assert collective.max(1.0 + world.rank) == float(world.size)
    for root in range(world.size):
        for dtype in DTYPES:
            for shape in ((), (0,), (3, 5)):
                tensor = torch.full(shape, world.rank + 1).to(dtype)
                collective.broadcast_(tensor, root)
                assert torch.equal(tensor, torch.full(shape, root + 1).to(dtype))
        transposed = torch.full((4, 3), float(world.rank)).t()
        collective.broadcast_(transposed, root)
        assert bool((transposed == root).all())
        parameter = torch.nn.Parameter(torch.full((3,), float(world.rank)))
        collective.broadcast_(parameter, root)
        assert parameter.tolist() == [root] * 3
    collective.barrier()
    collective.close()

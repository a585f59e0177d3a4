"""Who takes part in a contest of sums of one size, each with the settings that suit it best."""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.gloo import Gloo
from benchmarks.peers.horovod import Horovod, Setting, why_not
from benchmarks.peers.openmpi import DEFAULT, Algorithm, OpenMpi
from benchmarks.records import OURS, size
from hpc_train.bench.allreduce import tolerance
from hpc_train.bench.turns import Contestant, take_turns
from hpc_train.comm.interface import Wire, World
from hpc_train.grid import Grid

MEMCPY = "memcpy"  # a reference: each rank copies the buffer once

_CYCLES_MS = (0.1, 0.5, 1.0)  # of Horovod, whose default is 1
_LARGEST_SEARCHED_BYTES = 2**24  # what is best at this size is used for larger ones, too
_LARGEST_SEARCHED_SHORT_BYTES = 2**22
_HOPELESS = 3.0  # times the best: not tried at larger sizes
_SHIFT = 7919  # a prime: ranks' values are the same ones, moved by so many places each
_LEAD_IN_BELOW_BYTES = 2**22  # Horovod agrees anew on each tensor after its start; larger ones do not mind


class Field:
    """All contestants of one case.  Making one is collective, and so are its methods."""

    def __init__(self, world: World, short: bool, note: Callable[[str], None]) -> None:
        self._world = world
        self._note = note
        self._searched_bytes = _LARGEST_SEARCHED_SHORT_BYTES if short else _LARGEST_SEARCHED_BYTES
        self._one_host = world.local_size == world.size
        self._collective = world.collective(Grid(world.size, 1), torch.device("cpu"))
        self._mpi = OpenMpi()
        self._gloo = Gloo(world)
        self.no_horovod = why_not()
        self._horovod = None if self.no_horovod else Horovod(world.control, self._mpi)
        self._hopeful: Sequence[Algorithm] = self._mpi.algorithms
        self._algorithm = DEFAULT
        self._setting = Setting(_CYCLES_MS[0])

    def contestants(self, num_bytes: int) -> list[tuple[Contestant, dict[str, Any]]]:
        """Each with what was chosen for it."""
        sums = Sums(self._world, num_bytes // 4, self._collective.allocate(num_bytes // 4))
        found: list[tuple[Contestant, dict[str, Any]]] = []
        for wire in Wire:
            chosen = self._collective.prepare(num_bytes // 4, wire)
            call = functools.partial(self._collective.sum_, sums.ours, wire)
            found.append((sums.contestant(OURS, wire, sums.ours, call), {"chosen": chosen}))
        default = self._mpi_contestant(sums, self._mpi.name, DEFAULT)
        found.append((default, {"algorithm": DEFAULT.name}))
        search = num_bytes <= self._searched_bytes
        if len(self._mpi.algorithms) > 1:
            if search:
                self._search_algorithm(sums)
            best = self._mpi_contestant(sums, f"{self._mpi.name} tuned", self._algorithm)
            found.append((best, {"algorithm": self._algorithm.name}))
        gloo = functools.partial(self._gloo.sum_, sums.plain)
        found.append((sums.contestant("Gloo", Wire.FP32, sums.plain, gloo), {}))
        if self._horovod is not None:
            if search:
                self._search_setting(sums, self._horovod)
            chosen = {"cycle_ms": self._setting.cycle_ms, "algorithm": self._setting.algorithm.name}
            for wire in (Wire.FP32, Wire.FP16):
                one = self._horovod_contestant(sums, self._horovod, wire, self._setting)
                found.append((one, dict(chosen)))
        if self._one_host:
            copy = functools.partial(sums.plain.copy_, sums.source)
            found.append((Contestant(MEMCPY, "fp32", copy), {}))
        return found

    def close(self) -> None:
        """Free what the libraries hold."""
        self._mpi.close()
        self._collective.close()

    def _mpi_contestant(self, sums: "Sums", impl: str, algorithm: Algorithm) -> Contestant:
        call = functools.partial(self._mpi.sum(algorithm).sum_, sums.plain)
        return sums.contestant(impl, Wire.FP32, sums.plain, call)

    def _horovod_contestant(self, sums: "Sums", horovod: Horovod, wire: Wire, setting: Setting) -> Contestant:
        def call() -> None:
            sums.result = horovod.sum_(sums.plain, fp16=wire is Wire.FP16)

        around = functools.partial(horovod.running, setting)
        lead_in = int(sums.plain.nbytes < _LEAD_IN_BELOW_BYTES)
        return sums.contestant("Horovod", wire, None, call, around=around, lead_in=lead_in)

    def _search_algorithm(self, sums: "Sums") -> None:
        """Try Open MPI's algorithms; those far from the best are not tried again."""
        tried = [self._mpi_contestant(sums, algorithm.name, algorithm) for algorithm in self._hopeful]
        times = self._try(tried)
        best = min(times)
        self._algorithm = self._hopeful[times.index(best)]
        pairs = list(zip(self._hopeful, times, strict=True))
        self._hopeful = [algorithm for algorithm, took in pairs if took < _HOPELESS * best]
        text = ", ".join(f"{algorithm.name} {took * 1e3:.2f}" for algorithm, took in pairs)
        self._note(f"{size(sums.plain.nbytes)}: {self._mpi.name}'s algorithms in ms: {text}")

    def _search_setting(self, sums: "Sums", horovod: Horovod) -> None:
        """Try Horovod's cycle times above the best algorithm for this size, and its and MPI's defaults."""
        settings = [*(Setting(cycle_ms, self._algorithm) for cycle_ms in _CYCLES_MS), Setting(_CYCLES_MS[-1])]
        tried = [self._horovod_contestant(sums, horovod, Wire.FP32, setting) for setting in settings]
        times = self._try(tried)
        self._setting = settings[times.index(min(times))]
        text = ", ".join(
            f"{setting.cycle_ms} {setting.algorithm.name} {took * 1e3:.2f}"
            for setting, took in zip(settings, times, strict=True)
        )
        self._note(f"{size(sums.plain.nbytes)}: Horovod's cycles and algorithms in ms: {text}")

    def _try(self, contestants: Sequence[Contestant]) -> list[float]:
        """The least time of each in a few turns; slow ones get one turn."""
        control = self._world.control
        times = [min(own) for own in take_turns(control, contestants, rounds=1)]
        if sum(times) < 1.0:
            more = take_turns(control, contestants, rounds=5)
            times = [min(own) for own in more]
        return times


class Sums:
    """The memory of a size: a source, what its sum must be, and the two buffers that are summed in place.

    `plain` is any memory, `ours` what hpc_train gives; `result` is where Horovod's sum is.
    """

    def __init__(self, world: World, numel: int, ours: Tensor) -> None:
        base = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        self.source = base.roll(_SHIFT * world.rank)
        self.expected = self.source.clone()
        for rank in range(world.size):
            if rank != world.rank:
                self.expected += base.roll(_SHIFT * rank)
        self._largest = max(float(base.abs().max()), float(self.expected.abs().max()))
        self._num_ranks = world.size
        self.ours = ours
        self.plain = torch.zeros(numel)
        self.result = self.plain

    def contestant(
        self,
        impl: str,
        wire: Wire,
        buffer: Tensor | None,
        call: Callable[[], None],
        around: Callable[[], Any] = nullcontext,
        lead_in: int = 0,
    ) -> Contestant:
        """A sum that is checked; `buffer` None: in `plain`, with its result in `result`."""
        filled = self.plain if buffer is None else buffer

        def ready() -> None:
            filled.copy_(self.source)

        def check() -> None:
            summed = self.result if buffer is None else buffer
            off = float((summed - self.expected).abs().max())
            # A peer may round to 16 bits at each of its additions.
            allowed = tolerance(wire, self._num_ranks, self._largest) * (1 if impl == OURS else 2)
            if not off <= allowed:
                raise RuntimeError(f"{impl}'s {wire.value} sum of {size(filled.nbytes)} is off by {off:.3g}")

        return Contestant(impl, wire.value, call, ready, check, around, lead_in)

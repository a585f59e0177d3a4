"""Horovod over MPI, started for its turn only: its thread looks for work a thousand times a second.

Not everybody has it: `why_not` says so, and how to get it.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.peers.openmpi import DEFAULT, Algorithm, OpenMpi
from hpc_train.comm.interface import ControlPlane


@dataclass(frozen=True)
class Setting:
    """`cycle_ms`: between two looks for tensors to sum; `algorithm`: of Open MPI's Allreduce below it."""

    cycle_ms: float
    algorithm: Algorithm = DEFAULT


def why_not() -> str | None:
    """Why there is no Horovod, or None."""
    if importlib.util.find_spec("horovod") is None:
        return "not installed: make horovod"
    try:
        import horovod.torch  # noqa: F401
    except ImportError as error:
        return f"cannot be loaded ({error}): make horovod"
    return None


class Horovod:
    """MPI runs already, and stays when Horovod ends."""

    def __init__(self, control: ControlPlane, mpi: OpenMpi) -> None:
        import horovod.torch as hvd

        self.hvd: Any = hvd
        self._control = control
        self._mpi = mpi

    @contextlib.contextmanager
    def running(self, setting: Setting) -> Iterator[None]:
        """Horovod works inside.  Collective."""
        os.environ["HOROVOD_CYCLE_TIME"] = str(setting.cycle_ms)
        with self._mpi.chosen(setting.algorithm):
            self.hvd.init()
        try:
            yield
        finally:
            self._control.barrier()  # nobody ends it while others wait for an answer
            self.hvd.shutdown()

    def sum_(self, buffer: torch.Tensor, fp16: bool) -> torch.Tensor:
        """The sum, as its DistributedOptimizer makes it: in place for fp32, else in new memory."""
        compression = self.hvd.Compression.fp16 if fp16 else self.hvd.Compression.none
        compressed, context = compression.compress(buffer)
        summed = self.hvd.allreduce_(compressed, name="buffer", op=self.hvd.Sum)
        result: torch.Tensor = compression.decompress(summed, context)
        return result

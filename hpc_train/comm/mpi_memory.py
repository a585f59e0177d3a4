"""Tensors as MPI sees them: bytes at an address, in pinned host memory where MPI cannot reach a GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mpi4py import MPI
from torch import Tensor

EAGER_BYTES = 60 * 2**10  # MPI over TCP sends up to 64 KiB at once, and negotiates about more
CHUNK_BYTES = 2**30  # counts in MPI are 32-bit numbers: a longer message goes in pieces


def gpu_aware() -> bool:
    """True when the user says that this MPI takes device memory: HPC_TRAIN_GPU_AWARE_MPI=1."""
    return os.environ.get("HPC_TRAIN_GPU_AWARE_MPI", "") == "1"


def reachable(tensor: Tensor, filled: bool = True) -> Tensor:
    """`tensor` flat, where MPI can reach it: itself, or else a copy in pinned host memory.

    `filled=False`: its content does not matter, for receives.
    """
    flat = tensor.detach().view(-1)
    if flat.is_cuda and not gpu_aware():
        host = torch.empty_like(flat, device="cpu", pin_memory=True)
        return host.copy_(flat) if filled else host
    if flat.is_cuda:
        torch.cuda.current_stream(flat.device).synchronize()  # MPI knows nothing of streams
    return flat


@contextmanager
def staged(tensor: Tensor, filled: bool = True) -> Iterator[Tensor]:
    """`reachable`, and what MPI leaves there is in `tensor` afterwards."""
    flat = reachable(tensor, filled)
    yield flat
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().view(-1).copy_(flat)


def as_buffer(flat: Tensor) -> MPI.buffer:
    """The bytes of a contiguous tensor, of any dtype; the tensor must outlive it."""
    return MPI.buffer.fromaddress(flat.data_ptr(), flat.numel() * flat.element_size())


def chunks(flat: Tensor, most_bytes: int = CHUNK_BYTES) -> list[MPI.buffer]:
    """The bytes of a contiguous tensor in pieces, as long as MPI can count; at least one, maybe empty."""
    whole = as_buffer(flat)
    return [whole[start : start + most_bytes] for start in range(0, max(1, whole.nbytes), most_bytes)]

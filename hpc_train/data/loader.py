"""Micro-batches of the samples that the sampler chose, on the rank's device.

    loader = Loader(dataset, workers=2, micro_batch=8, device=device, seed=0)
    micro_batches = loader.load(batch.indices[replica], epoch)     # [(input, target), ...]
    loader.prefetch(next_batch.indices[replica], next_epoch)       # workers begin while the step runs

Worker processes are never forked from a rank: a copy of a process that has started MPI, with its
threads and its network, may corrupt or abort either.  They are forked from a *fork server*, a clean
process that holds torch and neither MPI nor threads; unlike "spawn", which is as safe, it reads
torch from disk once a rank and not once a worker.
"""

import atexit
import os
import pickle
import random
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context, parent_process, resource_tracker
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from hpc_train.errors import UserError

# What a worker may have ready before it is asked again; a step's micro-batches all fit, mostly.
_MICRO_BATCHES_AHEAD = 16

_one_start = threading.Lock()  # of workers at a time: it changes the process's environment


class Samples(Protocol):
    """What is loaded from: the part of torch's map-style dataset that is needed here."""

    def __getitem__(self, index: int) -> Any:
        """A pair (input, target)."""


class Request(NamedTuple):
    """One micro-batch that is wanted."""

    epoch: int
    indices: list[int]


class Loader:
    """Loads samples, in the rank itself or in worker processes.

    A sample's draws from the default generators of torch (CPU), numpy and random depend on the seed,
    the epoch and its index alone.  So a random crop is the same on the first stage, which takes the
    input, and on the last, which takes the target; on every grid; after every resume; and for any
    number of workers.  The rank's own random numbers stay untouched.

    Args:
        dataset: samples are pairs (input, target), which torch's default collate joins; with workers
            it must be possible to pickle it.
        workers: processes of this rank, started at the first use; 0 loads in the rank itself.
        micro_batch: samples that flow together; the last micro-batch of a load may be smaller.
        device: where the micro-batches go; to a GPU through pinned memory, without waiting.
        seed: the same on all ranks.
    """

    def __init__(
        self, dataset: Samples, workers: int, micro_batch: int, device: torch.device, seed: int
    ) -> None:
        self._source = _MicroBatches(dataset, seed)
        self._num_workers = workers
        self._micro_batch = micro_batch
        self._device = device
        self._wanted = _Wanted()
        self._begun: list[Request] = []  # what the workers have been asked for and load() has not
        self._iterator: Any = None
        self._data_loader: DataLoader[Any] | None = None
        if workers:
            fork_server = get_context("forkserver")
            fork_server.set_forkserver_preload([__name__])
            self._data_loader = DataLoader(
                self._source,
                sampler=self._wanted,
                batch_size=None,  # a request is a micro-batch already
                num_workers=workers,
                prefetch_factor=_MICRO_BATCHES_AHEAD,
                persistent_workers=True,
                multiprocessing_context=fork_server,
                worker_init_fn=_end_with_the_rank,
                pin_memory=device.type == "cuda",
                generator=torch.Generator().manual_seed(seed),  # or else it draws from the rank's own
            )

    def load(self, indices: Iterable[int], epoch: int = 0) -> list[tuple[Any, Any]]:
        """The micro-batches (input, target) of these samples, in their order.

        Raises:
            UserError: a sample is not a pair.
            Exception: whatever the dataset raised; from a worker with that worker's traceback.
        """
        requests = self._cut(indices, epoch)
        if not self._num_workers:
            batches = [self._source[request] for request in requests]
        elif requests:
            if requests != self._begun:
                self._begin(requests)
            self._begun = []
            batches = list(self._iterator)
        else:
            batches = []
        return [self._pair(batch) for batch in batches]

    def prefetch(self, indices: Iterable[int], epoch: int = 0) -> None:
        """Let the workers begin with what the next load will most likely ask for.

        A hint only: a load of other samples drops it, and so does the next hint.
        """
        requests = self._cut(indices, epoch)
        if self._num_workers and requests and requests != self._begun:
            self._begin(requests)

    def close(self) -> None:
        """End the workers.  They end too when the rank exits without this, or dies."""
        iterator, self._iterator, self._data_loader = self._iterator, None, None
        if iterator is None:
            return
        atexit.unregister(self.close)
        iterator._shutdown_workers()  # as its __del__ does, but now
        for worker in iterator._workers:
            if worker.is_alive():  # busy with a sample, and deaf to SIGTERM
                worker.kill()
                worker.join()

    def _cut(self, indices: Iterable[int], epoch: int) -> list[Request]:
        numbers = [int(index) for index in indices]
        size = self._micro_batch
        return [Request(epoch, numbers[begin : begin + size]) for begin in range(0, len(numbers), size)]

    def _begin(self, requests: list[Request]) -> None:
        """Hand requests to the workers; what they had under way for older ones is dropped."""
        if self._data_loader is None:
            raise ValueError("the loader is closed")
        self._wanted.requests = self._begun = requests
        if self._iterator is None:
            with _one_start, _no_rank():
                try:
                    self._iterator = iter(self._data_loader)
                except (pickle.PicklingError, AttributeError, TypeError) as error:  # pickle raises all three
                    raise UserError(
                        f"data.workers={self._num_workers}: the dataset "
                        f"{type(self._source.dataset).__name__} cannot be sent to a worker ({error}): "
                        "make it of what pickle knows, or set data.workers=0"
                    ) from error
            atexit.register(self.close)  # before multiprocessing's own, which would wait for ever
        else:
            iter(self._data_loader)  # the workers persist, and so it is the same iterator, reset

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise UserError(
                f"a sample of {type(self._source.dataset).__name__} gives {type(batch).__name__}"
                f"{f' of {len(batch)}' if isinstance(batch, list | tuple) else ''}: "
                "return a pair (input, target) from its __getitem__"
            )
        return to_device(batch[0], self._device), to_device(batch[1], self._device)


class _MicroBatches(Dataset[Any]):
    """A dataset seen as micro-batches; what is pickled for the workers."""

    def __init__(self, dataset: Samples, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, request: Request) -> Any:
        with _random_state_kept():
            return default_collate([self._sample(request.epoch, index) for index in request.indices])

    def _sample(self, epoch: int, index: int) -> Any:
        state = int(np.random.SeedSequence([self.seed, epoch, index]).generate_state(1)[0])
        torch.default_generator.manual_seed(state)
        np.random.seed(state)
        random.seed(state)
        return self.dataset[index]


class _Wanted(Sampler[Request]):
    """Where a DataLoader reads what to load next: the requests of the load under way."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


def _end_with_the_rank(worker: int) -> None:
    """Let this worker end at once when its rank does, in whatever way.

    torch's own watch looks at the parent process, which here is the fork server; and that lives for as
    long as a worker does.
    """
    rank = parent_process()  # for multiprocessing the rank, though the fork server made the process
    assert rank is not None

    def watch() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=watch, name="end with the rank", daemon=True).start()


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Leave the default generators as they were."""
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


@contextmanager
def _no_rank() -> Iterator[None]:
    """Processes started inside inherit that they are not ranks.

    Launchers and schedulers signal whole process groups ("save and stop"), which a rank answers and a
    worker must survive until the rank is done with it: signals stay blocked in workers.  And user code
    that imports mpi4py there must not start MPI a second time under this rank's name.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    initialize = os.environ.get("MPI4PY_RC_INITIALIZE")
    try:
        resource_tracker.ensure_running()  # unblocks the next two as it starts, so it comes before
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        os.environ["MPI4PY_RC_INITIALIZE"] = "0"
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        del os.environ["MPI4PY_RC_INITIALIZE"]
        if initialize is not None:
            os.environ["MPI4PY_RC_INITIALIZE"] = initialize


def to_device(value: Any, device: torch.device) -> Any:
    """Move tensors; lists, which collate makes of tuples, become tuples again, as layers take them."""
    if isinstance(value, Tensor):
        if device.type == "cuda" and not value.is_pinned():
            value = value.pin_memory()
        return value.to(device, non_blocking=True)
    if isinstance(value, list | tuple):
        return tuple(to_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    return value

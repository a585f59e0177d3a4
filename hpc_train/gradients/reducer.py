"""Sums gradients over the replicas while backward still runs.

    main thread   begin | backward:  head   weight   embedding | finish()
                                        |      |          |
    summing thread                    [sum 0][sum 1]    [sum 2]        sleeps in between

A bucket is handed over when each of its parameters has had all its gradients.  The thread sums in
the order of the buckets, which all replicas share, even where backward makes them in another one.
"""

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpc_train.comm.interface import Collective
from hpc_train.errors import UserError
from hpc_train.gradients.bucket_sum import BucketSum, Method, Whole, prepare
from hpc_train.gradients.buckets import (
    Bucket,
    Group,
    Slot,
    fingerprint,
    group_parameters,
    make_buckets,
    trained,
)
from hpc_train.gradients.residual import Owed
from hpc_train.gradients.streams import SideStream

DEFAULT_BUCKET_BYTES = 4 * 2**20


class Count(NamedTuple):
    """How many gradients a parameter gets: in each pass, and beside the passes in each step."""

    a_pass: int = 1
    a_step: int = 0

    def of(self, passes: int) -> int:
        """In a step."""
        return self.a_pass * passes + self.a_step


_ONE = Count()


class Reducer:
    """Gradient sums of these parameters.  Making one is collective: all replicas do it together.

    reducer.begin(passes=4)       # this replica runs 4 backward passes in this step
    ...                           # the passes; until finish(), gradients are the reducer's own
    reducer.finish()              # every p.grad is the sum over replicas

    Args:
        named_parameters: in the order of forward; frozen ones are left out, tied ones count once.
        collective: the replicas; None where gradients stay this replica's own, and nothing is summed.
        method: how a bucket is summed.
        overlap: sum during backward; else, or where the collective allows no thread, in `finish`.
        counts: how many gradients a parameter gets, by name, where it is not one a pass: a tied weight has
            several, and some from other stages.
        average: divide each sum by the number of replicas.

    `exposed_s`: time that `finish` held up the last step.  `summed_s`: time that its sums took.
    `measured`: which ways to sum were tried, and chosen, a line each.
    `steps`: finished so far with this method, before `resume` too.
    `named`: the trained parameters.
    Raises UserError where replicas have different parameters or options.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        collective: Collective | None,
        method: Method = Whole(),  # noqa: B008  (frozen)
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        overlap: bool = True,
        counts: Mapping[str, Count] | None = None,
        average: bool = False,
    ) -> None:
        self.named = dict(trained(named_parameters))
        self.parameters = list(self.named.values())
        self.exposed_s = 0.0
        self.summed_s = 0.0
        self.buckets: list[Bucket] = []
        self.measured: list[str] = []
        self.steps = 0
        self._sums: list[BucketSum] = []
        self._owed = Owed()
        self._replica = 0
        self._divisor = 1
        if collective is not None and collective.size > 1:  # alone, p.grad is what backward makes it
            groups = group_parameters(named_parameters, bucket_bytes)
            _check_same(groups, method, collective)  # before memory is shared: that takes all of a host
            self.buckets = make_buckets(groups, collective)
            self._sums = [method.of(bucket, collective) for bucket in self.buckets]
            self.measured = prepare(self._sums, method, collective)
            self._replica = collective.rank
            self._divisor = collective.size if average else 1

        self._counts = counts or {}
        self._passes = 0
        self._waiting_for: list[int] = []  # by bucket: parameters that lack gradients
        self._handed_over: list[bool] = []
        self._moments: list[torch.cuda.Event | None] = []
        self._summed = 0  # buckets done, so also the index of the next
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()  # guards the five above, where both threads use them
        self._told: set[str] = set()
        self.expect(0)

        self._hooks: list[RemovableHandle] = [
            slot.parameter.register_post_accumulate_grad_hook(self._hook(bucket, slot))  # type: ignore[no-untyped-call]
            for bucket in self.buckets
            for slot in bucket.slots
        ]
        self._thread: threading.Thread | None = None
        if self.buckets and overlap and collective is not None and collective.threaded:
            self._side = SideStream(self.buckets[0].buffer.device)
            self._thread = threading.Thread(target=self._sum_all, name="gradient sums", daemon=True)
            self._thread.start()

    @property
    def slots(self) -> list[Slot]:
        """The places of all parameters, in the order they are summed."""
        return [slot for bucket in self.buckets for slot in bucket.slots]

    @property
    def under_way(self) -> bool:
        """Whether a bucket was handed over that `finish` has not brought back."""
        return any(self._handed_over)

    @property
    def hidden_share(self) -> float | None:
        """The part of the last step's sums that ran while backward did; None when nothing was summed."""
        return max(0.0, 1 - self.exposed_s / self.summed_s) if self.summed_s else None

    @property
    def error_feedback(self) -> bool:
        """Whether what one sum leaves out is added to the next."""
        return any(each.residual is not None for each in self._sums)

    @property
    def owes(self) -> bool:
        """Whether the next gradient gets what earlier sums have left out, as these keep no residual."""
        return bool(self._owed.values)

    def begin(self, passes: int) -> None:
        """Forget all gradients and expect `passes` backward passes; 0 for a replica without samples."""
        self.expect(passes)
        for parameter in self.parameters:
            parameter.grad = None
        if passes == 0 and self._thread is not None:
            for bucket in self.buckets:
                self._hand_over(bucket)

    def expect(self, passes: int) -> None:
        """Expect `passes` backward passes, on top of the gradients that are there."""
        if self.under_way:
            raise RuntimeError("gradients are being summed: call finish() before the next step begins")
        self._passes = passes
        self.summed_s = 0.0
        for slot in self.slots:
            slot.fired = 0
        self._waiting_for = [len(bucket.slots) for bucket in self.buckets]
        with self._changed:
            self._moments = [None] * len(self.buckets)
            self._handed_over = [False] * len(self.buckets)
            self._summed = 0

    def finish(self) -> None:
        """Wait for all sums; afterwards every `p.grad` is the sum over replicas.

        A parameter without a gradient counts as zero, and is named once in a warning.

        Raises:
            RuntimeError: there were more passes than expected, and `take_late` was not called.
            BaseException: whatever a sum raised, PeerLost for instance.
        """
        began = time.perf_counter()
        if late := self.take_late():
            names = ", ".join(slot.name for slot, _ in late)
            raise RuntimeError(
                f"{names} had more gradients than the {self._passes} passes that were expected, after being "
                f"summed; under activation checkpointing, set use_reentrant=False"
            )
        for parameter in self.parameters if not self.buckets else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._tell_missing()
        for bucket in self.buckets:
            if self._thread is None:
                bucket.gather()
                self._sum(bucket)
            elif not self._handed_over[bucket.index]:
                self._hand_over(bucket)
        if self._thread is not None:
            self._wait_for_thread()
        for bucket in self.buckets:
            bucket.scatter()
        self._owed.pay(self.named, self._divisor)
        self._handed_over = [False] * len(self.buckets)
        self.steps += 1
        self._passes = 0  # a backward pass between steps, should there be one, starts no sum
        self.exposed_s = time.perf_counter() - began

    def take_late(self) -> list[tuple[Slot, Tensor]]:
        """Gradients of more passes than expected, made after their bucket was handed over."""
        late = []
        for bucket in self.buckets:
            if self._handed_over[bucket.index]:
                for slot in bucket.slots:
                    if slot.parameter.grad is not None:
                        late.append((slot, slot.parameter.grad))
                        slot.parameter.grad = None
        return late

    def add_late(self, late: Sequence[tuple[Slot, Tensor]]) -> None:
        """Sum what `take_late` gave, after `finish`, and add it to the gradients.  All replicas together."""
        gradients = dict(late)
        for bucket in self.buckets:
            total = bucket.buffer.clone()
            bucket.buffer.zero_()
            for slot in bucket.slots:
                if slot in gradients:
                    slot.place(gradients[slot])
            self._sum(bucket)
            bucket.buffer += total
            bucket.scatter()

    def skip(self) -> None:
        """After `finish`: nobody uses these gradients.  All replicas together.

        What is left of them must not be in the sums of later steps.
        """
        for each in self._sums:
            each.skip()
        self._owed.take_back()

    def settle(self) -> dict[str, Tensor]:
        """The residuals' sums over the replicas, by parameter; none where nothing is owed.

        Between two steps, all replicas together; each then holds an equal part of them, as after `resume`.
        """
        totals = dict(self._owed.values)
        for bucket, bucket_sum in zip(self.buckets, self._sums, strict=True):
            if bucket_sum.residual is not None:
                total = bucket_sum.residual.settle()
                totals.update({slot.name: slot.within(total) for slot in bucket.slots})
        return totals

    def bases(self) -> dict[str, Tensor]:
        """By parameter, what all replicas alike remember from sum to sum: the Q's of PowerSGD."""
        return {name: basis for each in self._sums for name, basis in each.bases().items()}

    def resume(self, totals: Mapping[str, Tensor], bases: Mapping[str, Tensor], steps: int) -> None:
        """Go on after `steps` such steps with what `settle` and `bases` gave, from any number of replicas.

        Parameters that are not among them begin anew.  Where these sums keep no residual, `totals` are added
        to the next gradient.
        """
        self.steps = steps
        if not self.error_feedback:
            self._owed.take(totals, self.named)
        for bucket, bucket_sum in zip(self.buckets, self._sums, strict=True):
            bucket_sum.resume(bases, steps)
            if bucket_sum.residual is not None:
                whole = torch.zeros_like(bucket.buffer)
                for slot in bucket.slots:
                    if slot.name in totals:
                        slot.within(whole).copy_(totals[slot.name])
                bucket_sum.residual.deal(whole)

    def close(self) -> None:
        """End the thread and leave the parameters alone; not collective.

        In the middle of a sum, which may wait for replicas that are gone, the thread is not waited
        for: it ends when the sum does.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            idle = self._error is not None or not self._is_next_handed_over()
        if self._thread is not None and idle:
            self._thread.join()

    def _hook(self, bucket: Bucket, slot: Slot) -> Callable[[Tensor], None]:
        """What autograd calls when a backward pass has added to the parameter's gradient."""

        def on_gradient(parameter: Tensor) -> None:
            slot.fired += 1
            if self._handed_over[bucket.index]:
                return  # a late one: it stays apart, in a p.grad of its own
            slot.keep()
            if slot.fired == self._counts.get(slot.name, _ONE).of(self._passes):
                self._waiting_for[bucket.index] -= 1
                if self._waiting_for[bucket.index] == 0 and self._thread is not None:
                    self._hand_over(bucket)

        return on_gradient

    def _hand_over(self, bucket: Bucket) -> None:
        """Give a bucket to the thread; from here on new gradients start in a p.grad of their own."""
        bucket.gather()
        for slot in bucket.slots:
            slot.parameter.grad = None
        moment = self._side.mark()
        with self._changed:
            self._moments[bucket.index] = moment
            self._handed_over[bucket.index] = True
            self._changed.notify_all()

    def _is_next_handed_over(self) -> bool:
        return self._summed < len(self.buckets) and self._handed_over[self._summed]

    def _sum_all(self) -> None:
        """The thread: one bucket after the other, until close()."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._is_next_handed_over())
                if self._closed:
                    return
                bucket = self.buckets[self._summed]
                moment = self._moments[self._summed]
            try:
                with self._side.after(moment):
                    self._sum(bucket)
            except BaseException as error:  # noqa: BLE001  raised again by finish()
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._summed += 1
                self._changed.notify_all()

    def _wait_for_thread(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._summed == len(self.buckets))
            if self._error is not None:
                raise self._error
        self._side.join()

    def _sum(self, bucket: Bucket) -> None:
        began = time.perf_counter()
        self._sums[bucket.index].sum_()
        if self._divisor > 1:
            bucket.buffer /= self._divisor
        self.summed_s += time.perf_counter() - began

    def _tell_missing(self) -> None:
        """Name parameters that no pass reached, where passes reached others: often a mistake in the model."""
        slots = self.slots
        if not any(slot.fired for slot in slots):
            return
        missing = [slot.name for slot in slots if slot.fired == 0 and slot.name not in self._told]
        if missing:
            self._told.update(missing)
            names = ", ".join(reversed(missing))
            warnings.warn(
                f"no gradient for {names} in a step of replica {self._replica}: counts as zero (told once)",
                stacklevel=3,
            )


def _check_same(groups: Sequence[Group], method: Method, collective: Collective) -> None:
    """Raise UserError where replicas would sum things that do not belong together."""
    mine = float(fingerprint(groups, method))
    if collective.max(mine) != -collective.max(-mine):
        numels = [parameter.numel() for group in groups for _, parameter in group]
        raise UserError(
            f"replicas train different parameters, wires or bucket sizes (here {len(numels)} parameters of "
            f"{sum(numels)} elements, {method}, {len(groups)} buckets): "
            f"use the same model and options on every rank"
        )

"""An optimizer that steps with gradients averaged over all ranks, for scripts with their own loop.

    optimizer = hpc_train.DistributedOptimizer(optimizer, model.named_parameters())
    loss.backward()                            # sums begin meanwhile
    optimizer.step()                           # ends them, and updates

The names and habits are Horovod's (horovod.torch.DistributedOptimizer).
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.comm.interface import Collective, Wire
from hpc_train.errors import UserError
from hpc_train.gradients import session
from hpc_train.gradients.bucket_sum import Method, Whole
from hpc_train.gradients.buckets import Slot, trained
from hpc_train.gradients.powersgd import PowerSGD
from hpc_train.gradients.reducer import DEFAULT_BUCKET_BYTES, Reducer


class Compression:
    """What travels in place of fp32 gradients; sums are always made in fp32."""

    none = Wire.FP32
    fp16 = Wire.FP16
    bf16 = Wire.BF16
    int8 = Wire.INT8

    @staticmethod
    def powersgd(rank: int = 16, warm_up_steps: int = 100) -> PowerSGD:
        """Products of thin matrices, for slow networks: see gradients/powersgd.py.

        The first `warm_up_steps` steps send whole gradients.
        """
        if rank < 1 or warm_up_steps < 0:
            raise UserError(
                f"Compression.powersgd(rank={rank}, warm_up_steps={warm_up_steps}): "
                f"rank must be 1 or more, and warm_up_steps 0 or more"
            )
        return PowerSGD(rank, warm_up_steps)


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps any torch optimizer; `step` first averages the gradients of all ranks.

    Making one is collective, and so are `step`, `synchronize`, `add_param_group` and `close`: all
    ranks call them, equally often.  How many backward passes a rank makes in between is its own
    affair, none is fine: the average is exact, each rank's gradient being the sum of its passes.
    A parameter that no rank used keeps `grad` None, as it does in one process.

    Between `backward` and `step` the gradients are under way.  To look at them, clip or unscale:

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    Args:
        optimizer: is used from now on through this one only.
        named_parameters: `model.named_parameters()`, in the order of forward; by default the
            optimizer's own order, with numbers for names.
        compression: `Compression.none`; `.fp16` or `.bf16` for half the bytes, `.int8` for a quarter;
            `.powersgd(rank)` for a small part of them.
        backward_passes_per_step: gradients of so many passes add up here and are sent once, beside the
            last of them.  Fewer or more passes are exact too, only less hidden.
        error_feedback: add what one step's rounding left out to the next; by default with int8 and
            PowerSGD.  It belongs to this rank and run: `state_dict` has none of it.
        bucket_bytes: gradients that travel together; by default HOROVOD_FUSION_THRESHOLD, or else 4 MiB.
        collective: the ranks that average, by default all; belongs to this optimizer.

    Raises:
        UserError: `named_parameters` does not fit the optimizer, or ranks have different parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        compression: Wire | PowerSGD = Compression.none,
        backward_passes_per_step: int = 1,
        *,
        error_feedback: bool | None = None,
        bucket_bytes: int | None = None,
        overlap: bool = True,
        collective: Collective | None = None,
    ) -> None:
        # No super().__init__(): groups, state and hooks stay the wrapped optimizer's, see __getattr__.
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise UserError(f"DistributedOptimizer wraps a torch optimizer, not {type(optimizer).__name__}")
        if backward_passes_per_step < 1:
            raise UserError(f"backward_passes_per_step={backward_passes_per_step} must be 1 or more")
        self._inner = optimizer
        self._passes = backward_passes_per_step
        self._method = _method(compression, error_feedback)
        self._bucket_bytes = bucket_bytes or session.bucket_bytes() or DEFAULT_BUCKET_BYTES
        self._overlap = overlap
        self._names = _names(optimizer, named_parameters)
        self._device = next(iter(self._names)).device
        self._collective = collective or session.current().new_collective(self._device)
        self._skip = False
        self._synchronized = False
        self._closed = False
        self._reducer = self._make_reducer()
        self._session = session.current() if collective is None else None
        if self._session is not None:
            self._session.closed_at_shutdown.append(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's, so that learning-rate schedulers act on it."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self._inner.state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False: a GradScaler shall unscale the averaged gradients itself, after `synchronize`."""
        return False

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not there yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer over {self._collective.size} ranks of {self._inner!r}"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients and update.

        The gradients and the loss of a closure are averaged too, at each call of it, so that an
        optimizer which decides by the loss (LBFGS) decides alike on all ranks.
        """
        if self._skip:
            if closure is not None or self._reducer.under_way:
                raise RuntimeError(
                    "skip_synchronize() is for a step without closure, after optimizer.synchronize()"
                )
            return self._inner.step()
        if closure is not None:
            return self._inner.step(lambda: self._evaluate(closure))
        if self._synchronized and not any(slot.fired for slot in self._reducer.slots):
            warnings.warn(
                "optimizer.step() averages again after optimizer.synchronize(): "
                "put it into `with optimizer.skip_synchronize():`",
                stacklevel=2,
            )
        self.synchronize()
        self._synchronized = False
        return self._inner.step()

    def synchronize(self) -> None:
        """Make every `p.grad` the average over ranks, of all backward passes since `zero_grad`.

        Averaging twice changes nothing, so gradients that are not zeroed go on adding up exactly.
        """
        if self._collective.size == 1:
            return
        reducer = self._reducer
        late = reducer.take_late()
        reducer.finish()
        changed = {id(p) for p in reducer.parameters} != {id(p) for _, p in self._trained()}
        unused = not all(slot.used for slot in reducer.slots)
        if self._collective.max(float(bool(late) or changed or unused)):
            self._settle(late, changed)
        self._reducer.expect(self._passes)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` takes the gradients as they are: after `synchronize`, and clipping for instance."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False
            self._synchronized = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's.  To drop gradients of a backward pass, call `synchronize` before."""
        if self._reducer.under_way:
            raise RuntimeError(
                "optimizer.zero_grad() between loss.backward() and optimizer.step(): other ranks are summing "
                "these gradients already; call optimizer.synchronize() first to drop them everywhere"
            )
        self._synchronized = False
        self._inner.zero_grad(set_to_none)
        self._reducer.expect(self._passes)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's: it loads with or without this wrapper."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it into the wrapped optimizer, of this rank."""
        self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, between two steps.  All ranks together."""
        if self._reducer.under_way:
            raise RuntimeError("optimizer.add_param_group() between loss.backward() and optimizer.step()")
        self._inner.add_param_group(param_group)
        group = len(self._inner.param_groups) - 1
        for index, parameter in enumerate(self._inner.param_groups[group]["params"]):
            self._names[parameter] = _number(group, index)
        self._replace_reducer()

    def close(self) -> None:
        """End the sums and free what the backend holds.  All ranks together; shutdown() does it too."""
        if self._closed:
            return
        self._closed = True
        if self._session is not None:  # which would keep the model and its optimizer alive
            self._session.closed_at_shutdown.remove(self)
        if self._collective.size > 1:
            self._reducer.take_late()
            self._reducer.finish()  # a bucket may be under way on some rank
        self._reducer.close()
        self._collective.close()

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return trained([(name, parameter) for parameter, name in self._names.items()])

    def _make_reducer(self) -> Reducer:
        reducer = Reducer(
            self._trained(), self._collective, self._method, self._bucket_bytes, self._overlap, average=True
        )
        reducer.expect(self._passes)
        return reducer

    def _replace_reducer(self) -> None:
        old = self._reducer
        totals = old.settle()
        old.close()
        self._reducer = self._make_reducer()
        self._reducer.resume(totals, old.bases(), old.steps)

    def _settle(self, late: list[tuple[Slot, Tensor]], changed: bool) -> None:
        """What is rare, and so agreed upon only where some rank has it: all ranks learn who has what."""
        slots = self._reducer.slots
        facts = [float(bool(late)), float(changed), *(float(slot.used) for slot in slots)]
        counts = torch.tensor(facts, device=self._device)
        self._collective.sum_(counts, Wire.FP32)
        any_late, any_changed, *users = counts.tolist()
        if any_late:
            self._reducer.add_late(late)
        for slot, num_users in zip(slots, users, strict=True):
            if num_users == 0:
                slot.parameter.grad = None
        if any_changed:  # requires_grad was set on some parameters: those that joined are not averaged yet
            for parameter in self._names:
                if not parameter.requires_grad:
                    parameter.grad = None
            self._replace_reducer()
            self.synchronize()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """A closure's loss, averaged over ranks; and its gradients too."""
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        self._synchronized = False
        if self._collective.size == 1:
            return loss
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        mean = torch.tensor([value], device=self._device)
        self._collective.sum_(mean, Wire.FP32)
        mean /= self._collective.size
        return mean[0] if isinstance(loss, Tensor) else float(mean)


def _method(compression: Wire | PowerSGD, error_feedback: bool | None) -> Method:
    """How buckets are summed."""
    if isinstance(compression, PowerSGD):
        return compression if error_feedback is None else replace(compression, feedback=error_feedback)
    if not isinstance(compression, Wire):
        raise UserError(f"compression={compression!r} is not known: use one of hpc_train.Compression")
    return Whole(compression, compression is Wire.INT8 if error_feedback is None else error_feedback)


def _number(group: int, index: int) -> str:
    return f"group {group} parameter {index}"


def _names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None
) -> dict[nn.Parameter, str]:
    """The optimizer's parameters with their names, in the order given."""
    own = {
        parameter: _number(group, index)
        for group, settings in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(settings["params"])
    }
    if named_parameters is None:
        return own
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise UserError("named_parameters must be pairs (name, parameter): give model.named_parameters()")
    name, times = Counter(name for name, _ in pairs).most_common(1)[0] if pairs else ("", 0)
    if times > 1:
        raise UserError(f"named_parameters has {name!r} {times} times: put the model's name before it")
    given: dict[nn.Parameter, str] = {}
    for name, parameter in pairs:
        given.setdefault(parameter, name)  # tied parameters are one, under its first name
    if missing := own.keys() - given.keys():
        raise UserError(
            f"{len(missing)} of the optimizer's {len(own)} parameters are not in named_parameters: "
            f"give those of every model that it trains"
        )
    return {parameter: name for parameter, name in given.items() if parameter in own}

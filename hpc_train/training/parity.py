"""`hpc-train parity`: the same steps on the grid and in one plain PyTorch process, compared.

Rank 0 also runs the plain side: the whole model in one process, torch's own clipping and optimizer, and
nothing of schedules, buckets or wires.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

from hpc_train.comm.interface import ControlPlane, World
from hpc_train.config import Settings
from hpc_train.data.loader import to_device
from hpc_train.data.sampler import Cursor, take
from hpc_train.errors import UserError
from hpc_train.grid import Grid
from hpc_train.pipeline.draws import Draws
from hpc_train.pipeline.layers import PlainModel, apply_layer
from hpc_train.tasks.task import Task
from hpc_train.training.compression import sum_method
from hpc_train.training.layout import Layout
from hpc_train.training.optimizer import learning_rate, make_optimizer, set_learning_rate
from hpc_train.training.worker import Worker

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class Tolerance:
    """How far apart a quantity may be, and why that far."""

    limit: float
    reason: str


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of a quantity over all steps, and where it was."""

    quantity: str
    largest: float
    where: str
    tolerance: Tolerance

    @property
    def holds(self) -> bool:
        """Within tolerance; NaN is not."""
        return self.largest <= self.tolerance.limit

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no word for a number that is not finite: it becomes None."""
        largest = self.largest if math.isfinite(self.largest) else None
        return {**asdict(self), "largest": largest, "holds": self.holds}


_ADAPTIVE = (
    "AdamW moves an element by about the learning rate whatever the size of its gradient, so that a rounded "
    "small gradient moves it elsewhere"
)
_PROPORTIONAL = "updates are in proportion to gradients and differ as those do"


_MOVED = "loss itself is fp32, of parameters that rounded gradients have moved"
_SUMMED = "; the next step makes up for that, so gradients are added up over the steps and compared together"

_COARSE = ("bf16", "int8")
_ACTIVATIONS = {  # limits of loss, gradients, parameters with AdamW and with SGD, by pipeline.wire
    "fp16": (
        *(1e-3, 1e-2, 5e-2, 1e-2),
        "fp16 rounds activations and their gradients at every boundary by 4.9e-4",
    ),
    "bf16": (
        *(1e-2, 1e-1, 3e-1, 1e-1),
        "bf16 rounds activations and their gradients at every boundary by 3.9e-3",
    ),
}
# By wire: limits of loss, gradients, parameters with AdamW and with SGD; why the first two.
_LIMITS: dict[str, tuple[float, float, float, float, str, str]] = {
    "fp32": (
        *(1e-5, 1e-4, 1e-3, 1e-4),
        "fp32 sums in another order",
        "fp32 sums in another order, 1e-6 a step, growing from step to step",
    ),
    "fp16": (
        *(1e-4, 2e-3, 2e-2, 2e-3),
        _MOVED,
        "fp16 keeps 11 bits: each contribution and the sum are rounded by up to 2^-11 = 4.9e-4",
    ),
    "bf16": (
        *(1e-3, 5e-2, 1e-1, 1e-2),
        _MOVED,
        "bf16 keeps 8 bits: each contribution and the sum are rounded by up to 2^-8 = 3.9e-3; together, as "
        "small ones of later steps differ by more where AdamW has moved parameters",
    ),
    "int8": (
        *(2e-3, 1e-1, 4e-1, 1e-1),
        _MOVED,
        "int8 rounds by up to 2^-7 of the largest of 128 neighbours, and what is small beside it to zero",
    ),
}


def tolerances(settings: Settings) -> dict[str, Tolerance]:
    """What `loss`, `gradients` and `parameters` must meet with these settings.

    Inside one host no wire rounds anything: there fp32's tolerances would do.
    """
    adaptive = settings.optimizer.name == "adamw"
    loss, gradients, adamw, sgd, why_loss, why_gradients = _LIMITS[settings.gradients.wire]
    if settings.pipeline.wire != "fp32" and settings.grid.stages > 1:
        *limits, why = _ACTIVATIONS[settings.pipeline.wire]
        loss, gradients, adamw, sgd = map(max, (loss, gradients, adamw, sgd), limits)
        why_loss, why_gradients = why, why
    fed_back = sum_method(settings).error_feedback and settings.gradients.wire != "fp32"
    return {
        "loss": Tolerance(loss, why_loss),
        "gradients": Tolerance(gradients, why_gradients + (_SUMMED if fed_back else "")),
        "parameters": Tolerance(adamw if adaptive else sgd, _ADAPTIVE if adaptive else _PROPORTIONAL),
    }


def check_comparable(settings: Settings, steps: int) -> None:
    """Raise UserError where one step's gradient is not meant to be that of plain PyTorch."""
    gradients = settings.gradients
    if gradients.local_steps > 1:
        raise UserError(
            f"parity compares every step with one model's, but with gradients.local_steps="
            f"{gradients.local_steps} each replica has its own in between: set it to 1"
        )
    if gradients.compression == "powersgd" and steps > gradients.powersgd_warm_up_steps:
        raise UserError(
            f"parity compares the gradients of {steps} steps, but PowerSGD sends approximations after "
            f"gradients.powersgd_warm_up_steps={gradients.powersgd_warm_up_steps}: set that to {steps}, or "
            f"compare fewer steps"
        )


class PlainSide:
    """One process, plain PyTorch, and the whole batch at once wherever its cut cannot be seen.

    Where layers normalise over micro-batches (BatchNorm) or draw random numbers (dropout), the plain model
    takes the same micro-batches one after the other, and draws the same numbers.
    """

    def __init__(self, settings: Settings, task: Task, device: torch.device) -> None:
        self._settings = settings
        self._task = task
        self._draws = Draws(device)
        self.model: PlainModel = task.plain_model(settings.seed).to(device)
        self.optimizer = make_optimizer(settings.optimizer, self.model.parameters())
        self._cut_matters: bool | None = None

    def step(
        self, parts: Sequence[tuple[int, tuple[Any, Any]]], whole: tuple[Any, Any], rate: float, seed: int
    ) -> tuple[float, dict[str, Tensor]]:
        """One update; returns the loss and the gradients before clipping, by name.

        Args:
            parts: the micro-batches, with the number of each one's first sample in the batch.
            whole: all of them as one batch.
            rate: the learning rate.
            seed: of what layers draw.
        """
        self._draws.step_seed = seed
        self.model.zero_grad()
        if self._cut_matters is None:
            self._cut_matters = self._sees_the_cut(whole[0])
        total = weight = torch.zeros((), dtype=torch.float64)
        for first, (inputs, target) in parts if self._cut_matters else [(0, whole)]:
            figures = self._task.loss(self._forward(inputs, first), target)
            losses, weights = figures if isinstance(figures, tuple) else (figures, torch.ones_like(figures))
            total = total + losses.sum(dtype=torch.float64).cpu()
            weight = weight + weights.sum(dtype=torch.float64).cpu()
        loss = total / weight
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        if self._settings.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.optimizer.clip_norm)
        if self.optimizer is not None:
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
        return float(loss.detach()), gradients

    def _forward(self, inputs: Any, first: int) -> Any:
        for number, layer in enumerate(self.model.layers):
            self._draws.start(first, number)
            inputs = apply_layer(layer, inputs)
        return inputs

    @torch.no_grad()
    def _sees_the_cut(self, inputs: Any) -> bool:
        """Whether a layer normalises over the batch, or draws random numbers."""
        if any(isinstance(module, _BatchNorm) for module in self.model.modules()):
            return True
        before = self._draws.state()
        self.model(inputs)
        return not torch.equal(before, self._draws.state())


def compare(
    settings: Settings,
    task: Task,
    world: World,
    layout: Layout,
    steps: int,
    shares: tuple[int, ...] | None = None,
    progress: Callable[[int], None] = lambda step: None,
) -> list[Difference] | None:
    """Run `steps` steps both ways.  All ranks take part; rank 0 gets the differences, others None.

    `shares` gives each replica's samples of a batch; by default they are equal.

    Raises:
        UserError: the settings send approximations of gradients.
    """
    check_comparable(settings, steps)
    dataset = task.dataset("train")
    worker = Worker(settings, task, world, layout)
    plain = PlainSide(settings, task, layout.device) if world.rank == 0 else None
    judge = _Judge(tolerances(settings))
    sums = _Sums()
    start = _whole(worker.control, worker, lambda p: p)
    cursor = Cursor(0, 0)
    size = settings.batch.micro_batch
    for step in range(steps):
        batch = take(
            len(dataset), settings.seed, cursor, settings.batch.size, shares or (1,) * layout.grid.replicas
        )
        cursor = batch.next
        firsts = [sum(map(len, batch.indices[:replica])) for replica in range(layout.grid.replicas)]
        mine, first = batch.indices[layout.place.replica], firsts[layout.place.replica]
        micro_batches = [_load(dataset, mine[i : i + size], layout) for i in range(0, len(mine), size)]
        outcome = worker.backward(micro_batches, batch.size, len(mine), step, first)
        worker.complete_gradients()
        gradients = _whole(worker.control, worker, lambda p: p.grad)
        rate = learning_rate(settings.optimizer, step, settings.train.steps)
        worker.update(outcome, rate)
        parameters = _whole(worker.control, worker, lambda p: p)
        if plain is not None:
            whole = _load(dataset, [i for part in batch.indices for i in part], layout)
            parts = [
                (first + i, _load(dataset, part[i : i + size], layout))
                for first, part in zip(firsts, batch.indices, strict=True)
                for i in range(0, len(part), size)
            ]
            loss, expected = plain.step(parts, whole, rate, step)
            where = f"step {step + 1}"
            judge.see("loss", relative(abs(outcome.loss - loss), abs(loss)), where)
            if worker.method.error_feedback:
                sums.add(gradients, expected)
                judge.see_together("gradients", sums.got, sums.expected, where)
            elif settings.gradients.wire in _COARSE:
                judge.see_together("gradients", gradients, expected, where)
            else:
                judge.see_tensors("gradients", gradients, expected, where)
            updates = {name: p.cpu() - start[name] for name, p in parameters.items()}
            names = dict(plain.model.named_parameters())
            judge.see_together(
                "parameters", updates, {n: names[n].detach().cpu() - start[n] for n in updates}, where
            )
        progress(step + 1)
    worker.close()
    return judge.differences if plain is not None else None


def _load(dataset: Any, indices: Any, layout: Layout) -> tuple[Any, Any]:
    inputs, target = default_collate([dataset[int(i)] for i in indices])
    return to_device(inputs, layout.device), to_device(target, layout.device)


def _whole(
    control: ControlPlane, worker: Worker, part: Callable[[Tensor], Tensor | None]
) -> dict[str, Tensor]:
    """That part of every trained parameter of all stages, as replica 0 holds it; all ranks together."""
    mine: dict[str, Tensor] = {}
    if worker.place.replica == 0:
        for name, parameter in worker.parameters.items():
            value = part(parameter)
            if parameter.requires_grad and value is not None:
                mine[name] = value.detach().cpu().contiguous()
    whole: dict[str, Tensor] = {}
    for data in control.all_gather(save(mine) if mine else b""):
        if data:
            whole.update(load(data))
    return whole


def relative(distance: float, size: float) -> float:
    """`distance` as a share of `size`; two zeros are equal, and nothing else is near zero."""
    if size == 0:
        return 0.0 if distance == 0 else math.inf
    return distance / size


class _Sums:
    """Gradients of both sides, added up over the steps, in fp64."""

    def __init__(self) -> None:
        self.got: dict[str, Tensor] = {}
        self.expected: dict[str, Tensor] = {}

    def add(self, got: Named, expected: Named) -> None:
        """Add a step's."""
        for total, step in ((self.got, got), (self.expected, expected)):
            for name, tensor in step.items():
                value = tensor.cpu().double()
                total[name] = total[name] + value if name in total else value


class _Judge:
    """Keeps the largest difference of each quantity."""

    def __init__(self, limits: Mapping[str, Tolerance]) -> None:
        self._limits = limits
        self._largest: dict[str, tuple[float, str]] = {}

    def see(self, quantity: str, difference: float, where: str) -> None:
        """Take note of one relative difference."""
        known = self._largest.get(quantity)
        # NaN counts as the largest, and the first one stays
        if known is None or not (difference <= known[0] or math.isnan(known[0])):
            self._largest[quantity] = (difference, where)

    def see_tensors(self, quantity: str, got: Named, expected: Named, where: str) -> None:
        """Each tensor's distance, relative to its norm.

        Where a gradient is zero but for rounding (a bias before a softmax), its own norm says nothing:
        a thousandth of the whole gradient's norm is the least that it is measured by.
        """
        if missing := set(expected) ^ set(got):
            self.see(quantity, float("nan"), f"{where}: only one side has {sorted(missing)[0]}")
        whole = float(torch.stack([e.double().norm() for e in expected.values()]).norm())
        for name in expected.keys() & got.keys():
            reference = expected[name].cpu().double()
            distance = float((got[name].double() - reference).norm())
            size = max(float(reference.norm()), 1e-3 * whole)
            self.see(quantity, relative(distance, size), f"{where}, {name}")

    def see_together(self, quantity: str, got: Named, expected: Named, where: str) -> None:
        """The distance of all tensors as one vector, relative to its norm."""
        flat = torch.cat([expected[name].cpu().flatten().double() for name in sorted(expected)])
        mine = torch.cat([got[name].flatten().double() for name in sorted(expected)])
        self.see(quantity, relative(float((mine - flat).norm()), float(flat.norm())), where)

    @property
    def differences(self) -> list[Difference]:
        """By quantity, in the order of the limits."""
        return [
            Difference(name, *self._largest.get(name, (float("nan"), "never seen")), limit)
            for name, limit in self._limits.items()
        ]


def render(settings: Settings, grid: Grid, steps: int, differences: Sequence[Difference]) -> str:
    """A table of the differences with their tolerances and the reasons for these."""
    lines = [
        f"{grid.replicas} replicas x {grid.stages} stages against plain PyTorch: {steps} steps of "
        f"{settings.batch.size} samples, {sum_method(settings)}, {settings.pipeline.schedule}",
        f"{'largest relative difference of':<32}{'is':>9}{'allowed':>10}",
    ]
    for d in differences:
        verdict = "holds" if d.holds else "FAILS"
        lines.append(f"{d.quantity:<32}{d.largest:>9.1e}{d.tolerance.limit:>10.1e}  {verdict}, at {d.where}")
        lines.append(f"    allowed because: {d.tolerance.reason}")
    return "\n".join(lines)

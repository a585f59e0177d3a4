"""How the settings want gradients summed, and what such sums remember, by the names of a checkpoint."""

from collections.abc import Mapping

from torch import Tensor

from hpc_train.checkpoint.names import basis_name, residual_name, split_sum_name
from hpc_train.checkpoint.snapshot import Shape
from hpc_train.comm.interface import Wire
from hpc_train.config import Settings
from hpc_train.gradients.bucket_sum import Method, Whole
from hpc_train.gradients.powersgd import PowerSGD
from hpc_train.gradients.reducer import Reducer


def sum_method(settings: Settings) -> Method:
    """How a bucket is summed."""
    gradients = settings.gradients
    wire = Wire(gradients.wire)
    lossy = gradients.compression == "powersgd" or wire is Wire.INT8
    feedback = lossy if gradients.error_feedback == "auto" else gradients.error_feedback
    if gradients.compression == "powersgd":
        return PowerSGD(
            gradients.powersgd_rank, gradients.powersgd_warm_up_steps, wire, feedback, settings.seed
        )
    return Whole(wire, feedback, settings.optimizer.sharded)


def shapes(reducer: Reducer) -> dict[str, Shape]:
    """Names and shapes of what `restore` wants of a checkpoint."""
    wanted = {basis_name(name): tuple(basis.shape) for name, basis in reducer.bases().items()}
    # Wanted even where sums keep no residual: the next gradient gets what earlier ones have left out.
    return wanted | {residual_name(name): tuple(p.shape) for name, p in reducer.named.items()}


def take(reducer: Reducer, writer: bool) -> dict[str, Tensor]:
    """What `writer` puts into a checkpoint, nothing on others.  All replicas together, between two steps.

    Residuals are summed over the replicas; each then goes on with an equal part, as after `restore`.
    """
    totals = reducer.settle()
    if not writer:
        return {}
    taken = {residual_name(name): total for name, total in totals.items()}
    return taken | {basis_name(name): basis for name, basis in reducer.bases().items()}


def restore(reducer: Reducer, tensors: Mapping[str, Tensor], steps: int) -> None:
    """Go on after `steps` steps of such sums from what a checkpoint has; what it lacks begins anew."""
    totals: dict[str, Tensor] = {}
    bases: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if parts := split_sum_name(name):
            parameter, is_residual = parts
            (totals if is_residual else bases)[parameter] = tensor
    reducer.resume(totals, bases, steps)

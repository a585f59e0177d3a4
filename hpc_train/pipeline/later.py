"""A backward pass in two halves: gradients of inputs now (I), those of weights later (W).

    forward     y = linear(x, weight)
    I           the gradient of x, which the chunk before waits for; (x, gradient of y) are kept
    W           the gradient of weight from what was kept, added to `weight.grad`

While a forward runs inside `Later`, the operations that most time is spent in (linear layers and
convolutions) are recorded so that they can be cut in two. Gradients of all other parameters are
made in I, kept, and added in W: so each `p.grad` is added to once for each micro-batch, with the
same sums as in a backward pass at once. After Qi et al., arXiv 2401.10241; what torch's
`nn.MultiheadAttention` does inside stays in I, and so does what autocast converts.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _Kept(NamedTuple):
    """One operation that awaits its second half."""

    operation: "_Operation"
    x: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None
    gradient: Tensor  # of its output
    options: Mapping[str, Any]


class Later(TorchFunctionMode):
    """The second halves of one micro-batch's backward through a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[_Kept] = []
        self._made: list[tuple[Tensor, Tensor]] = []  # parameters and their gradients, from I

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Called in place of every torch function while a forward runs inside."""
        kwargs = kwargs or {}
        operation = _OPERATIONS.get(func)
        if operation is not None:
            x, weight, bias, options = operation.bind(*args, **kwargs)
            trained = _trained(weight) and (bias is None or _trained(bias))
            plain = not torch.is_autocast_enabled(x.device.type)
            if trained and plain and x.requires_grad and options.get("padding") not in ("same", "valid"):
                return _Halved.apply(x, operation, [weight, bias], options, self._kept)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)

    def backward_inputs(
        self, roots: Sequence[Tensor], gates: Sequence[Tensor], others: Sequence[Tensor]
    ) -> None:
        """I: backward from the roots to the gates of the chunk's inputs (see boundary.py).

        `others` are the trained parameters of the chunk.
        """
        gradients = torch.autograd.grad(roots, [*gates, *others], allow_unused=True)
        made = zip(others, gradients[len(gates) :], strict=True)
        self._made = [(parameter, gradient) for parameter, gradient in made if gradient is not None]

    def backward_weights(self) -> None:
        """W: add the gradients of all weights to their `grad`, each as soon as it is whole."""
        total: dict[Tensor, Tensor] = dict(self._made)
        self._made.clear()
        to_come: Counter[Tensor] = Counter(
            p for kept in self._kept for p in (kept.weight, kept.bias) if p is not None
        )
        while self._kept:
            kept = self._kept.pop(0)
            for parameter, gradient in kept.operation.weight_gradients(kept):
                total[parameter] = total[parameter] + gradient if parameter in total else gradient
                to_come[parameter] -= 1
                if not to_come[parameter]:  # while it is in the cache, and its memory serves the next one
                    torch.autograd.backward(parameter, total.pop(parameter))
                del gradient
        if total:
            torch.autograd.backward(list(total), list(total.values()))


def _trained(weight: Any) -> bool:
    """Whether its gradient is not part of another one's."""
    return isinstance(weight, Tensor) and weight.is_leaf and weight.requires_grad


_Bound = tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]  # input, weight, bias, options


class _Operation:
    """A function of (input, weight, bias), and the halves of its backward."""

    def __init__(
        self,
        call: Callable[..., Tensor],
        bind: Callable[..., "_Bound"],
        input_gradient: Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor],
        weight_gradients: Callable[[_Kept], list[tuple[Tensor, Tensor]]],
    ) -> None:
        self.call = call
        self.bind = bind
        self.input_gradient = input_gradient
        self.weight_gradients = weight_gradients


class _Halved(torch.autograd.Function):
    """Weight and bias come in a list, so that autograd does not see them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        operation: _Operation,
        parameters: list[Any],
        options: Mapping[str, Any],
        kept: list[_Kept],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.operation, ctx.parameters, ctx.options, ctx.kept = operation, parameters, options, kept
        return operation.call(x, *parameters, **options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.parameters
        ctx.kept.append(_Kept(ctx.operation, x, weight, bias, gradients[0], ctx.options))
        return ctx.operation.input_gradient(gradients[0], x, weight, ctx.options), None, None, None, None


def _bind_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Bound:
    return input, weight, bias, {}


def _linear_input_gradient(gradient: Tensor, x: Tensor, weight: Tensor, options: Mapping[str, Any]) -> Tensor:
    return gradient @ weight


def _linear_weight_gradients(kept: _Kept) -> list[tuple[Tensor, Tensor]]:
    gradient = kept.gradient.reshape(-1, kept.gradient.shape[-1])
    gradients: list[tuple[Tensor, Tensor]] = [
        (kept.weight, gradient.T @ kept.x.reshape(-1, kept.x.shape[-1]))
    ]
    if kept.bias is not None:
        gradients.append((kept.bias, gradient.sum(0)))
    return gradients


def _bind_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> _Bound:
    return input, weight, bias, {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: bool, options: Mapping[str, Any], mask: list[bool]
) -> Sequence[Tensor]:
    dims = weight.dim() - 2
    stride, padding, dilation = (
        [options[key]] * dims if isinstance(options[key], int) else list(options[key])
        for key in ("stride", "padding", "dilation")
    )
    made: Sequence[Tensor] = torch.ops.aten.convolution_backward(
        gradient, x, weight, [weight.shape[0]] if bias else None,
        stride, padding, dilation, False, [0] * dims, options["groups"], mask,
    )  # fmt: skip
    return made


def _convolution_input_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, options: Mapping[str, Any]
) -> Tensor:
    return _convolution_backward(gradient, x, weight, False, options, [True, False, False])[0]


def _convolution_weight_gradients(kept: _Kept) -> list[tuple[Tensor, Tensor]]:
    has_bias = kept.bias is not None
    made = _convolution_backward(
        kept.gradient, kept.x, kept.weight, has_bias, kept.options, [False, True, has_bias]
    )
    gradients: list[tuple[Tensor, Tensor]] = [(kept.weight, made[1])]
    if kept.bias is not None:
        gradients.append((kept.bias, made[2]))
    return gradients


_OPERATIONS: dict[Any, _Operation] = {
    F.linear: _Operation(F.linear, _bind_linear, _linear_input_gradient, _linear_weight_gradients),
    **{
        call: _Operation(call, _bind_convolution, _convolution_input_gradient, _convolution_weight_gradients)
        for call in (F.conv1d, F.conv2d, F.conv3d)
    },
}

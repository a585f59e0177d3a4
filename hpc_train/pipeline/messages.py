"""A message between stages: a header of fixed size says what comes, then come the tensors.

    header   int64 [256]: 1 for a tuple or 0 for a tensor | number of tensors |
             for each: dtype, needs a gradient or not, number of dimensions, dimensions | 0 ...
    tensors  contiguous, in order, under the header's tag; empty ones are not sent

So every micro-batch may have other shapes. Gradients go back without a header: their sender was
told the shapes, and which tensors need one, by the message that brought the activations.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hpc_train.comm.interface import TAG_LIMIT, PeerLink, Work
from hpc_train.errors import UserError

Value = Tensor | tuple[Tensor, ...]  # what a layer hands to the next

_HEADER_WORDS = 256  # 2 KiB: every MPI sends that at once, without asking the receiver first
_DTYPES = (  # numbers on the wire: append only
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_MESSAGES = ("activations", "gradients", "answer")


def tag_of(message: str, micro_batch: int = 0) -> int:
    """The tag of one of the messages "activations", "gradients" and "answer" (a whole model's output)."""
    span = TAG_LIMIT // len(_MESSAGES)
    return _MESSAGES.index(message) * span + micro_batch % span


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """The tensors of what a layer gives.

    Raises:
        UserError: it is neither a tensor nor a tuple of tensors.
    """
    tensors = value if isinstance(value, tuple) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            inside = " in a tuple" if isinstance(value, tuple) else ""
            raise UserError(
                f"a layer gives a {type(tensor).__name__}{inside} to the next stage: only a tensor or a "
                "tuple of tensors can go there; change the layer, or cut the stages elsewhere"
            )
    return tensors


class Outbox:
    """Messages under way; keeps their tensors alive until they are sent."""

    def __init__(self) -> None:
        self._sent: dict[int, list[tuple[Work, Tensor]]] = {}  # by tag

    def send(self, link: PeerLink, tensors: Sequence[Tensor], stage: int, tag: int) -> None:
        """Start to send tensors, none of which may change before they are waited for."""
        sent = self._sent.setdefault(tag, [])
        for tensor in tensors:
            if tensor.numel():
                tensor = tensor.detach().contiguous()
                sent.append((link.isend(tensor, stage, tag), tensor))

    def send_message(self, link: PeerLink, value: Value, stage: int, tag: int) -> None:
        """Start to send a header and then the tensors of `value`."""
        self.send(link, [_header(value), *tensors_of(value)], stage, tag)

    def wait(self, tag: int) -> None:
        """Return when all that was sent under `tag` has gone."""
        for work, _ in self._sent.pop(tag, ()):
            work.wait()

    def wait_all(self) -> None:
        """Return when everything has gone."""
        for tag in list(self._sent):
            self.wait(tag)


def receive(link: PeerLink, tensors: Sequence[Tensor], stage: int, tag: int) -> list[Work]:
    """Start to receive into tensors what `Outbox.send` sends."""
    return [link.irecv(tensor, stage, tag) for tensor in tensors if tensor.numel()]


def receive_message(
    link: PeerLink, stage: int, tag: int, device: torch.device
) -> tuple[Value, tuple[bool, ...]]:
    """Wait for what `Outbox.send_message` sends: the value, and which of its tensors need a gradient."""
    header = torch.empty(_HEADER_WORDS, dtype=torch.int64)
    link.irecv(header, stage, tag).wait()
    is_tuple, num_tensors, *words = header.tolist()
    tensors, needs_gradient = [], []
    for _ in range(num_tensors):
        dtype, needs, num_dims, *words = words
        shape, words = words[:num_dims], words[num_dims:]
        tensors.append(torch.empty(shape, dtype=_DTYPES[dtype], device=device))
        needs_gradient.append(bool(needs))
    for work in receive(link, tensors, stage, tag):
        work.wait()
    return tuple(tensors) if is_tuple else tensors[0], tuple(needs_gradient)


def _header(value: Value) -> Tensor:
    """What the receiver must know before the tensors of `value` come."""
    tensors = tensors_of(value)
    words = [int(isinstance(value, tuple)), len(tensors)]
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise UserError(
                f"a layer gives {tensor.dtype} to the next stage, which cannot be sent: convert it"
            )
        words += [_DTYPES.index(tensor.dtype), int(tensor.requires_grad), tensor.dim(), *tensor.shape]
    if len(words) > _HEADER_WORDS:
        raise UserError(
            f"a layer gives {len(tensors)} tensors to the next stage, more than a message holds "
            f"(their shapes need {len(words)} numbers, of {_HEADER_WORDS}): join some, or cut elsewhere"
        )
    return torch.tensor(words + [0] * (_HEADER_WORDS - len(words)), dtype=torch.int64)

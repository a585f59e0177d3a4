"""A message between stages: a header of fixed size says what comes, then come the tensors.

    header   2 KiB of JSON: the value's structure; dtype, shape and need of a gradient of each tensor
    tensors  contiguous, in order, under the header's tag; empty ones are not sent; fp32 may be encoded

So every micro-batch may have other shapes. Gradients go back without a header: their sender was
told the shapes, and which tensors need one, by the message that brought the activations.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpc_train.comm.interface import TAG_LIMIT, Losses, PeerLink, Transfer, Wire
from hpc_train.comm.wire import decode, encode, encoded_bytes
from hpc_train.errors import UserError
from hpc_train.pipeline.values import put_together, take_apart

HEADER_BYTES = 2048  # every MPI sends that at once, without asking the receiver first
_DTYPES = {str(getattr(torch, name)): getattr(torch, name) for name in (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64", "complex128",
)}  # fmt: skip
_MESSAGES = ("activations", "gradients", "answer", "tied gradient", "tied parameter")


def tag_of(message: str, number: int = 0) -> int:
    """The tag of a message of one of the kinds "activations", "gradients", "answer" (a whole model's output),
    "tied gradient" and "tied parameter"; `number` tells those of a kind apart.
    """
    span = TAG_LIMIT // len(_MESSAGES)
    return _MESSAGES.index(message) * span + number % span


class Form(NamedTuple):
    """What the receiver of a tensor must know before it comes."""

    dtype: str
    shape: tuple[int, ...]
    needs_gradient: bool


class Description(NamedTuple):
    """What the receiver of a value must know before it comes."""

    structure: Any
    forms: tuple[Form, ...]


def describe(value: Any) -> tuple[Description, list[Tensor]]:
    """What a value is, and its tensors.

    Raises:
        UserError: it cannot be sent.
    """
    structure, tensors = take_apart(value)
    recording = torch.is_grad_enabled()  # where nothing is recorded, a parameter that is handed on needs none
    forms = tuple(Form(str(t.dtype), tuple(t.shape), recording and t.requires_grad) for t in tensors)
    return Description(structure, forms), tensors


class Room:
    """Memory for a tensor that comes as it is or encoded."""

    def __init__(self, form: Form, wire: Wire, device: torch.device) -> None:
        self._dtype, self._shape = _DTYPES[form.dtype], form.shape
        self._wire = _wire_of(self._dtype, wire)
        if self._wire is None:
            self.memory = torch.empty(form.shape, dtype=self._dtype, device=device)
        else:
            numel = torch.Size(form.shape).numel()
            self.memory = torch.empty(encoded_bytes(self._wire, numel), dtype=torch.uint8, device=device)

    def tensor(self) -> Tensor:
        """What came; `memory` belongs to it or is used up."""
        if self._wire is None:
            return self.memory
        values = torch.empty(self._shape, dtype=self._dtype, device=self.memory.device)
        if values.numel():
            decode(self.memory, values.view(-1), self._wire)
        return values


def _wire_of(dtype: torch.dtype, wire: Wire) -> Wire | None:
    """The wire of a tensor; None: it travels as it is."""
    return wire if wire.lossy and dtype is torch.float32 else None


class Outbox:
    """Messages under way; keeps their tensors alive until they are sent, and lets go when it sends others.

    Args:
        link: what carries them.
        wire: the number format in which fp32 travels.
    """

    def __init__(self, link: PeerLink, wire: Wire = Wire.FP32) -> None:
        self.losses = Losses()
        self._link = link
        self._wire = wire
        self._sent: dict[tuple[int, int], list[tuple[Transfer, Tensor]]] = {}  # by stage and tag

    def send(self, tensors: Sequence[Tensor], stage: int, tag: int) -> None:
        """Start to send tensors, none of which may change before they are waited for."""
        self._let_go()
        sent = self._sent.setdefault((stage, tag), [])
        for tensor in tensors:
            if tensor.numel():
                tensor = self._packed(tensor.detach())
                sent.append((self._link.isend(tensor, stage, tag), tensor))

    def send_message(self, value: Any, stage: int, tag: int) -> Description:
        """Start to send a header and then the tensors of `value`; returns what the header says."""
        description, tensors = describe(value)
        header = _header(description)
        self._sent.setdefault((stage, tag), []).append((self._link.isend(header, stage, tag), header))
        self.send(tensors, stage, tag)
        return description

    def wait(self, stage: int, tag: int) -> None:
        """Return when all that was sent to `stage` under `tag` has gone."""
        for work, _ in self._sent.pop((stage, tag), ()):
            work.wait()

    def wait_all(self, stage: int | None = None) -> None:
        """Return when everything has gone, or all that goes to `stage`."""
        for at, tag in list(self._sent):
            if stage in (None, at):
                self.wait(at, tag)

    def _let_go(self) -> None:
        """Forget the oldest messages, as far as they have gone."""
        for key, works in list(self._sent.items()):
            if not all(work.is_complete() for work, _ in works):
                break
            del self._sent[key]

    def _packed(self, tensor: Tensor) -> Tensor:
        wire = _wire_of(tensor.dtype, self._wire)
        if wire is None:
            return tensor.contiguous()
        words = torch.empty(encoded_bytes(wire, tensor.numel()), dtype=torch.uint8, device=tensor.device)
        encode(tensor.reshape(-1), words, wire, self.losses)
        return words


def receive(link: PeerLink, rooms: Sequence[Room], stage: int, tag: int) -> list[Transfer]:
    """Start to receive into rooms what `Outbox.send` sends."""
    return [link.irecv(room.memory, stage, tag) for room in rooms if room.memory.numel()]


class Expected:
    """A message that `Outbox.send_message` sends: the receive of its header is posted at once.

    What comes is not copied: the memory that it arrives in is the layers' input.
    """

    def __init__(self, link: PeerLink, stage: int, tag: int, wire: Wire, device: torch.device) -> None:
        self._link, self._stage, self._tag = link, stage, tag
        self._wire, self._device = wire, device
        self._header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._header_work = link.irecv(self._header, stage, tag)
        self._announced: tuple[Description, list[Room], list[Transfer]] | None = None

    def look(self) -> None:
        """Post the receives of the tensors if the header is there: they then come beside what is computed."""
        if self._announced is None and self._header_work.is_complete():
            self._post()

    def take(self) -> tuple[Any, list[Tensor], Description]:
        """Wait for it: what `put_together` makes the value of, and what the header says."""
        description, rooms, works = self._announced or self._post()
        for work in works:
            work.wait()
        return description.structure, [room.tensor() for room in rooms], description

    def _post(self) -> tuple[Description, list[Room], list[Transfer]]:
        self._header_work.wait()
        description = _description(self._header.numpy().tobytes())
        rooms = [Room(form, self._wire, self._device) for form in description.forms]
        self._announced = description, rooms, receive(self._link, rooms, self._stage, self._tag)
        return self._announced


def receive_message(link: PeerLink, stage: int, tag: int, wire: Wire, device: torch.device) -> Any:
    """Wait for what `Outbox.send_message` sends."""
    structure, tensors, _ = Expected(link, stage, tag, wire, device).take()
    return put_together(structure, tensors)


@lru_cache(maxsize=256)
def _header(description: Description) -> Tensor:
    """The header of a message; nobody changes it."""
    for form in description.forms:
        if form.dtype not in _DTYPES:
            raise UserError(f"a layer gives {form.dtype} to the next stage, which cannot be sent: convert it")
    data = json.dumps(description).encode()
    if len(data) > HEADER_BYTES:
        raise UserError(
            f"a layer gives {len(description.forms)} tensors to the next stage, more than a message holds "
            f"(they need {len(data)} bytes to be described, of {HEADER_BYTES}): join some, or cut elsewhere"
        )
    return torch.frombuffer(bytearray(data.ljust(HEADER_BYTES)), dtype=torch.uint8)


@lru_cache(maxsize=256)
def _description(data: bytes) -> Description:
    structure, forms = json.loads(data)
    return Description(structure, tuple(Form(dtype, tuple(shape), needs) for dtype, shape, needs in forms))

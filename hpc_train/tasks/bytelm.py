"""A GPT-style Transformer that learns text byte by byte: the demo's task.

layer        0        1 .. blocks        blocks + 1
           embed  ->  block 1 .. n   ->     head            bytes [micro-batch, context] in,
                                                            logits [micro-batch, context, 256] out
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_train.errors import UserError
from hpc_train.pipeline.layers import LayerSpec
from hpc_train.tasks.task import SizedDataset, Task

NUM_BYTES = 256  # the vocabulary


class Embed(nn.Module):
    """Bytes [micro-batch, time] to vectors [micro-batch, time, hidden], with learned positions."""

    def __init__(self, context: int, hidden: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(NUM_BYTES, hidden)
        self.position = nn.Embedding(context, hidden)
        nn.init.normal_(self.byte.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Any time up to `context`."""
        output: Tensor = self.byte(text) + self.position.weight[: text.shape[1]]
        return output


class Block(nn.Module):
    """Causal attention and a GELU MLP, each behind a LayerNorm and added to its input (GPT-2).

    The two projections that add to the residual stream start smaller, by sqrt(2 * blocks), so that
    its variance does not grow with the depth (Radford et al. 2019, section 2.3).
    """

    def __init__(self, hidden: int, heads: int, blocks: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden)
        self.mlp_out = nn.Linear(4 * hidden, hidden)
        for linear in (self.query_key_value, self.attention_out, self.mlp_in, self.mlp_out):
            adds = linear in (self.attention_out, self.mlp_out)
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * blocks) if adds else 0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[micro-batch, time, hidden] to the same shape."""
        x = x + self._drop(self.attention_out(self._attend(self.attention_norm(x))))
        return x + self._drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, self.heads, x.shape[2] // self.heads)
        query, key, value = self.query_key_value(x).view(shape).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)  # heads side by side again

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Head(nn.Module):
    """Vectors [micro-batch, time, hidden] to logits of the next byte [micro-batch, time, 256]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.logits = nn.Linear(hidden, NUM_BYTES, bias=False)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        output: Tensor = self.logits(self.norm(x))
        return output


class ByteWindows:
    """A text cut into samples: `context` bytes, and the same moved on by one as their target.

    Windows follow each other without overlap, so that an epoch asks for every byte once.
    """

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text  # uint8, [num_bytes]
        self.context = context

    def __len__(self) -> int:
        return max(0, len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(input, target), int64 [context] each."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        begin = index * self.context
        window = self.text[begin : begin + self.context + 1].long()
        return window[:-1], window[1:]


@dataclass
class ByteLM(Task):
    """Predict the next byte of a text.

    Args:
        text: a file, or a folder whose text files are joined in the order of their names; by default
            the help texts that come with Python, about half a megabyte of English.
        context: bytes that the model sees.
        hidden, blocks, heads, dropout: the size of the Transformer.
        tied: the head's matrix is the embedding of bytes.
        prompt, sample_bytes, temperature: the text that `sample` continues, by how much, how boldly.
    """

    text: str = ""
    context: PositiveInt = 128
    hidden: PositiveInt = 128
    blocks: PositiveInt = 4
    heads: PositiveInt = 4
    dropout: NonNegativeFloat = 0.0
    tied: bool = False
    prompt: str = "The "
    sample_bytes: NonNegativeInt = 200
    temperature: PositiveFloat = 0.7

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            heads = max(n for n in range(1, self.heads) if self.hidden % n == 0)
            raise UserError(
                f"task_options.hidden={self.hidden} cannot be divided among heads={self.heads}: "
                f"set heads={heads}, or hidden={self.hidden // self.heads * self.heads + self.heads}"
            )
        if self.dropout >= 1:
            raise UserError(f"task_options.dropout={self.dropout} drops everything: set it below 1")

    def layers(self) -> list[LayerSpec]:
        """Embedding, blocks and head; a cost is the multiplications of one sample's forward."""
        matrices = 12 * self.hidden**2 * self.context  # 3 + 1 + 4 + 4 of hidden × hidden
        attention = 2 * self.hidden * self.context**2  # scores and mixing
        block = partial(Block, self.hidden, self.heads, self.blocks, self.dropout)
        embed, head = partial(Embed, self.context, self.hidden), partial(Head, self.hidden)
        values = self.context * self.hidden
        return [
            LayerSpec(embed, "embed", values, {"byte.weight": "bytes"} if self.tied else ""),
            *(LayerSpec(block, f"block {i + 1}", matrices + attention) for i in range(self.blocks)),
            LayerSpec(head, "head", values * NUM_BYTES, {"logits.weight": "bytes"} if self.tied else ""),
        ]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Nats a byte, the mean over each sample's bytes: [micro-batch]."""
        nats = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
        return nats.view_as(target).mean(dim=1)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Bits a byte, and the share of bytes guessed right."""
        return {
            "bits_per_byte": self.loss(output, target) / math.log(2),
            "accuracy": (output.argmax(dim=2) == target).float().mean(dim=1),
        }

    def dataset(self, split: str) -> SizedDataset:
        """The first nine tenths of the text to train on, the last tenth to evaluate on."""
        end = len(self._bytes) * 9 // 10
        part = self._bytes[:end] if split == "train" else self._bytes[end:]
        windows = ByteWindows(part, self.context)
        if len(windows) == 0:
            raise UserError(
                f"the text has {len(self._bytes)} bytes, too few for context={self.context}: "
                f"bring {10 * self.context + 10}, or set task_options.context to at most "
                f"{max(1, len(self._bytes) // 10 - 1)}"
            )
        return windows

    @cached_property
    def _bytes(self) -> Tensor:
        data = read_text(Path(self.text)) if self.text else python_help()
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)

    def sample(self, forward: Callable[[Tensor], Tensor]) -> str:
        """The prompt, continued; drawn byte by byte with a generator of its own."""
        generator = torch.Generator().manual_seed(0)
        text = list(self.prompt.encode() or b"\n")
        for _ in range(self.sample_bytes):
            logits = forward(torch.tensor([text[-self.context :]]))[0, -1]
            chances = torch.softmax(logits.float().cpu() / self.temperature, dim=0)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
        return bytes(text).decode(errors="replace")


def read_text(path: Path) -> bytes:
    """A file, or a folder's files joined by blank lines; hidden and binary files are passed over.

    Raises:
        UserError: nothing to read there.
    """
    if path.is_file():
        return path.read_bytes()
    if not path.is_dir():
        raise UserError(f"task_options.text={path}: no such file or folder (looked in {Path.cwd()})")
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    texts = [data for data in map(Path.read_bytes, files) if b"\0" not in data]
    if not texts:
        raise UserError(f"task_options.text={path}: no text among the {len(files)} files of this folder")
    return b"\n\n".join(texts)


def python_help() -> bytes:
    """The texts of Python's `help()`, which every CPython carries, in the order of their names."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("this Python lacks pydoc_data: set task_options.text to a file or folder") from None
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()

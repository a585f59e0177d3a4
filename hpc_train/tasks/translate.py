"""An encoder-decoder Transformer that translates from English, learned from the messages of Django.

layer      0          1 .. blocks       .. 2 blocks       2 blocks + 1
         embed  ->  encoder 1 .. n -> decoder 1 .. n  ->     head
source     o           attends            o asked
target     o              |             attends, asks        logits [micro-batch, context, vocabulary]

Every layer but the head passes on (source, mask, target): what it does not use goes along untouched.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_train.errors import UserError
from hpc_train.pipeline.layers import LayerSpec
from hpc_train.tasks.subwords import NUM_BYTES
from hpc_train.tasks.task import Figures, SizedDataset, Task
from hpc_train.tasks.translate_data import BEGIN, END, PAD, Corpus

# Vectors of the source [micro-batch, context, hidden], which of its tokens are not PAD (bool [micro-batch,
# context]), and vectors of the target [micro-batch, context, hidden].
Passed = tuple[Tensor, Tensor, Tensor]


class Embed(nn.Module):
    """Tokens of source and target, int64 [micro-batch, time], to vectors, with learned positions."""

    def __init__(self, vocabulary: int, context: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.source_position = nn.Embedding(context, hidden)
        self.target_position = nn.Embedding(context, hidden)
        self.drop = nn.Dropout(dropout)
        for embedding in (self.token, self.source_position, self.target_position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, source: Tensor, target: Tensor) -> Passed:
        """Any times up to `context`."""
        source_vectors = self.token(source) + self.source_position.weight[: source.shape[1]]
        target_vectors = self.token(target) + self.target_position.weight[: target.shape[1]]
        return self.drop(source_vectors), source != PAD, self.drop(target_vectors)


class Attention(nn.Module):
    """Each vector of x asks the vectors of `asked`, which may be x itself."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(hidden, hidden)
        self.key_value = nn.Linear(hidden, 2 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, asked: Tensor, mask: Tensor | None) -> Tensor:
        """To the shape of x; asked are those where the mask is true, or without one, those not after it."""
        query = self._by_head(self.query(x))
        key, value = map(self._by_head, self.key_value(asked).chunk(2, dim=2))
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if mask is None else mask[:, None, None, :],  # for all heads and queries
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
        )
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))  # heads side by side again
        return output

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class EncoderBlock(nn.Module):
    """The source attends to itself, then an MLP; each behind a LayerNorm and added to its input."""

    def __init__(self, hidden: int, heads: int, blocks: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = _mlp(hidden)
        self.drop = nn.Dropout(dropout)
        _init(self, adding=(self.attention.out, self.mlp[2]), blocks=blocks)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Passed:
        """The target goes along."""
        x = self.attention_norm(source)
        source = source + self.drop(self.attention(x, x, mask))
        source = source + self.drop(self.mlp(self.mlp_norm(source)))
        return source, mask, target


class DecoderBlock(nn.Module):
    """The target attends to what comes before, asks the source, then an MLP; built as EncoderBlock.

    The last one gives the target alone: nobody needs the source any more, and it need not travel.
    """

    def __init__(self, hidden: int, heads: int, blocks: int, dropout: float, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.source_norm = nn.LayerNorm(hidden)
        self.asking_norm = nn.LayerNorm(hidden)
        self.asking = Attention(hidden, heads, dropout)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = _mlp(hidden)
        self.drop = nn.Dropout(dropout)
        _init(self, adding=(self.attention.out, self.asking.out, self.mlp[2]), blocks=blocks)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Passed | Tensor:
        """The source goes along."""
        x = self.attention_norm(target)
        target = target + self.drop(self.attention(x, x, None))
        target = target + self.drop(self.asking(self.asking_norm(target), self.source_norm(source), mask))
        target = target + self.drop(self.mlp(self.mlp_norm(target)))
        return target if self.is_last else (source, mask, target)


class Head(nn.Module):
    """Vectors [micro-batch, time, hidden] to logits of the next token [micro-batch, time, vocabulary]."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.logits = nn.Linear(hidden, vocabulary, bias=False)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, target: Tensor) -> Tensor:
        """The logits."""
        output: Tensor = self.logits(self.norm(target))
        return output


def _mlp(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))


def _init(block: nn.Module, adding: tuple[nn.Module, ...], blocks: int) -> None:
    """What adds to a residual stream starts smaller, as in `bytelm.Block`."""
    for module in block.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(
                module.weight, std=0.02 / math.sqrt(len(adding) * blocks) if module in adding else 0.02
            )
            nn.init.zeros_(module.bias)


@dataclass
class Translate(Task):
    """Translate English messages of a web framework: real sentences, about 700 in each of its languages.

    Args:
        language: the one to translate to, by Django's name of it.
        also: further languages to learn from; held-out sentences are in none of them.
        vocabulary, context: tokens that exist, and tokens of the longest sentence.
        hidden, blocks, heads, dropout: the size of the Transformer; as many blocks in the encoder as in the
            decoder. The embedding of the tokens is also the matrix that gives their logits.
        samples: held-out sentences that are translated after training.
    """

    language: str = "de"
    also: tuple[str, ...] = ()
    vocabulary: PositiveInt = 768
    context: PositiveInt = 32
    hidden: PositiveInt = 128
    blocks: PositiveInt = 2
    heads: PositiveInt = 4
    dropout: NonNegativeFloat = 0.1
    samples: NonNegativeInt = 6

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise UserError(
                f"task_options.hidden={self.hidden} cannot be divided among heads={self.heads}: "
                f"set hidden={self.hidden // self.heads * self.heads + self.heads}"
            )
        if self.dropout >= 1:
            raise UserError(f"task_options.dropout={self.dropout} drops everything: set it below 1")
        own = BEGIN + 1 + len(self.also)
        if self.vocabulary < own + NUM_BYTES:
            raise UserError(
                f"task_options.vocabulary={self.vocabulary} has no room for {NUM_BYTES} bytes and {own} "
                f"tokens that begin, end and fill: set at least {own + NUM_BYTES}"
            )

    def layers(self) -> list[LayerSpec]:
        """Embedding, blocks and head; a cost is the multiplications of one sample's forward."""
        vectors = self.context * self.hidden
        attention = 4 * vectors * self.hidden + 2 * vectors * self.context
        mlp = 8 * vectors * self.hidden
        size = (self.hidden, self.heads, self.blocks, self.dropout)
        embed = partial(Embed, self.vocabulary, self.context, self.hidden, self.dropout)
        head = partial(Head, self.vocabulary, self.hidden)
        numbers = range(1, self.blocks + 1)
        return [
            LayerSpec(embed, "embed", 2 * vectors, tied={"token.weight": "embedding"}),
            *(LayerSpec(partial(EncoderBlock, *size), f"encoder {i}", attention + mlp) for i in numbers),
            *(
                LayerSpec(partial(DecoderBlock, *size, i == self.blocks), f"decoder {i}", 2 * attention + mlp)
                for i in numbers
            ),
            LayerSpec(head, "head", vectors * self.vocabulary, tied={"logits.weight": "embedding"}),
        ]

    def loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Nats of each sample's tokens, and the number of those tokens: [micro-batch] each."""
        nats = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="none")
        return nats.view_as(target).sum(dim=1), (target != PAD).sum(dim=1).to(output.dtype)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Figures]:
        """The share of tokens guessed right, from the true ones before them."""
        real = target != PAD
        right = (output.argmax(dim=2) == target) & real
        return {"accuracy": (right.sum(dim=1).to(output.dtype), real.sum(dim=1).to(output.dtype))}

    def dataset(self, split: str) -> SizedDataset:
        """Nine tenths of the sentences to train on, the others to evaluate on; see `Corpus`."""
        return self._corpus.train if split == "train" else self._corpus.held_out

    @cached_property
    def _corpus(self) -> Corpus:
        return Corpus((self.language, *self.also), self.vocabulary, self.context)

    def sample(self, forward: Callable[[Any], Tensor]) -> str:
        """Held-out sentences, translated by the likeliest token each time, beside the true translations."""
        held_out = self._corpus.held_out
        count = min(self.samples, len(held_out))
        chosen = [index * len(held_out) // count for index in range(count)]
        rows = self._translate(forward, held_out.sources[chosen]) if chosen else []
        return "\n\n".join(
            f"English      {self._corpus.decode(held_out.sources[index].tolist())}\n"
            f"translation  {self._corpus.decode(row)}\n"
            f"reference    {self._corpus.decode(held_out.targets[index].tolist())}"
            for index, row in zip(chosen, rows, strict=True)
        )

    def _translate(self, forward: Callable[[Any], Tensor], sources: Tensor) -> list[list[int]]:
        """Tokens of the translations, as many for each source; all sources go together through `forward`."""
        so_far = torch.full((len(sources), 1), BEGIN)
        while so_far.shape[1] < self.context and not (so_far == END).any(dim=1).all():
            following = forward((sources, so_far))[:, -1].argmax(dim=1).cpu()
            so_far = torch.cat([so_far, following[:, None]], dim=1)
        return so_far[:, 1:].tolist()

"""A small vocabulary of pieces of words, learned from text: byte-pair encoding.

Sennrich et al. 2016 (arXiv 1508.07909), over bytes, so that every text can be written with it. A word keeps
the blank before it, and no piece crosses the border of a word.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

NUM_BYTES = 256  # numbers below are bytes, numbers from here on are merges

_WORD = re.compile(r" ?[^\W\d_]+| ?\d+| ?[^\w\s]|[\s\S]")  # letters, digits, or one of anything else

Pair = tuple[int, int]


class Subwords:
    """From text to numbers 0 .. size - 1 and back.

    Args:
        texts: what to learn from; the pair of neighbours that is found most often becomes one piece, again
            and again. Ties go to the greater numbers, so that all ranks learn the same.
        size: bytes and merges; fewer are used where no pair is left that is found twice.
    """

    def __init__(self, texts: Iterable[str], size: int) -> None:
        self._rank: dict[Pair, int] = {}  # a pair and the piece that it becomes
        self._bytes = [bytes([number]) for number in range(NUM_BYTES)]
        self._known: dict[str, list[int]] = {}  # words already encoded
        self._learn(Counter(word for text in texts for word in _WORD.findall(text)), size)

    def __len__(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """The pieces of a text."""
        return [piece for word in _WORD.findall(text) for piece in self._pieces(word)]

    def decode(self, pieces: Iterable[int]) -> str:
        """The text of these pieces; bytes that are no UTF-8, as an untrained model makes, become �."""
        return b"".join(self._bytes[piece] for piece in pieces if piece < len(self)).decode(errors="replace")

    def _learn(self, times: Counter[str], size: int) -> None:
        spelled = {word: list(word.encode()) for word in times}
        found: Counter[Pair] = Counter()
        where: defaultdict[Pair, set[str]] = defaultdict(set)  # words that hold the pair, or once did

        def count(word: str, sign: int) -> None:
            for pair in pairwise(spelled[word]):
                found[pair] += sign * times[word]
                where[pair].add(word)

        for word in times:
            count(word, 1)
        while len(self) < size and found:
            pair = max(found, key=lambda pair: (found[pair], pair))
            if found[pair] < 2:
                break
            piece = self._rank[pair] = len(self)
            self._bytes.append(self._bytes[pair[0]] + self._bytes[pair[1]])
            for word in where.pop(pair):
                count(word, -1)
                spelled[word] = _merge(spelled[word], pair, piece)
                count(word, 1)
            del found[pair]

    def _pieces(self, word: str) -> list[int]:
        """Its merges in the order in which they were learned."""
        if word not in self._known:
            pieces = list(word.encode())
            while pairs := [pair for pair in pairwise(pieces) if pair in self._rank]:
                first = min(pairs, key=self._rank.__getitem__)
                pieces = _merge(pieces, first, self._rank[first])
            self._known[word] = pieces
        return self._known[word]


def _merge(pieces: Sequence[int], pair: Pair, piece: int) -> list[int]:
    """The same pieces, with one in the place of each such pair."""
    merged: list[int] = []
    for number in pieces:
        if merged and (merged[-1], number) == pair:
            merged[-1] = piece
        else:
            merged.append(number)
    return merged

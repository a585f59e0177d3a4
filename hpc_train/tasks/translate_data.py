"""Sentence pairs from the message catalogues that Django ships, as samples of the task `translate`."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hpc_train.errors import UserError
from hpc_train.tasks.subwords import NUM_BYTES, Subwords

PAD, END, BEGIN = 0, 1, 2  # what fills a row, ends a translation, and begins that of the first language


class SentencePairs:
    """Samples ((source, target so far), target), int64 [context] each, filled up with PAD.

    Where the target is `a b c END`, the target so far is `begin a b c`: what is known before each token.

    Args:
        rows: the tokens of a source, the token that begins its translation, and the tokens of that.
        context: fits the longest source, and the longest translation with its END.
    """

    def __init__(self, rows: Sequence[tuple[list[int], int, list[int]]], context: int) -> None:
        self.sources = _fill((source for source, _, _ in rows), context)
        self.so_far = _fill(([begin, *target] for _, begin, target in rows), context)
        self.targets = _fill(([*target, END] for _, _, target in rows), context)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The same at every call."""
        return (self.sources[index], self.so_far[index]), self.targets[index]


class Corpus:
    """The sentences of some languages, split, and the tokens in which they are written.

    Args:
        languages: Django's names of them, such as "de" or "pt_BR"; all are trained on, and the first is
            evaluated.
        vocabulary: tokens in all: PAD, END, one that begins each language, the bytes, and pieces of words.
            Those are learned from what is trained on; English and its translations share them.
        context: tokens of a row; a pair that needs more on either side is left out.

    Raises:
        UserError: as `read_pairs` does; or no pair fits the context.
    """

    def __init__(self, languages: Sequence[str], vocabulary: int, context: int) -> None:
        self._first = BEGIN + len(languages)  # the token of byte 0
        assert vocabulary >= self._first + NUM_BYTES
        catalogues = [read_pairs(language) for language in languages]
        train = [(s, t) for pairs in catalogues for s, t in pairs.items() if not is_held_out(s)]
        self._subwords = Subwords((text for pair in train for text in pair), vocabulary - self._first)
        fitting = [
            (source, row)
            for index, pairs in enumerate(catalogues)
            for source, target in pairs.items()
            for row in [(self.encode(source), BEGIN + index, self.encode(target))]
            if len(row[0]) <= context and len(row[2]) < context
        ]
        self.train = SentencePairs([row for source, row in fitting if not is_held_out(source)], context)
        self.held_out = SentencePairs(
            [row for source, row in fitting if is_held_out(source) and row[1] == BEGIN], context
        )
        if not len(self.train) or not len(self.held_out):
            raise UserError(
                f"of the {sum(map(len, catalogues))} sentences in {', '.join(languages)} too few fit "
                f"task_options.context={context}: set 32"
            )

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without those that begin and end it."""
        return [self._first + piece for piece in self._subwords.encode(text)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text that tokens stand for, up to the first PAD or END; line breaks are shown as blanks."""
        pieces = []
        for token in tokens:
            if token in (PAD, END):
                break
            pieces.append(token - self._first)
        return " ".join(self._subwords.decode(piece for piece in pieces if piece >= 0).split())


def read_pairs(language: str) -> dict[str, str]:
    """English messages and their translations, of Django itself and the applications that come with it.

    Left out are messages whose translation is missing, is marked as doubtful, or depends on a number. Where
    one is translated several times, the first counts, in the order of the files' names.

    Raises:
        UserError: Django or polib is not installed, or there is no such language.
    """
    try:
        import django
        import polib
    except ImportError as error:
        raise UserError(f"the translate task needs {error.name}: pip install 'hpc_train[examples]'") from None
    root = Path(django.__file__).parent
    known = sorted(path.parent.parent.name for path in root.glob("conf/locale/*/LC_MESSAGES/django.po"))
    if language not in known:
        raise UserError(
            f"Django {django.__version__} has no language {language!r}: it has {', '.join(known)}"
        )
    name = f"locale/{language}/LC_MESSAGES/django.po"
    pairs: dict[str, str] = {}
    for catalogue in [root / "conf" / name, *sorted(root.glob(f"contrib/*/{name}"))]:
        for entry in polib.pofile(str(catalogue)).translated_entries():  # not doubtful ("fuzzy") ones
            source, target = entry.msgid.strip(), entry.msgstr.strip()
            if source and target:  # a plural has its translations elsewhere
                pairs.setdefault(source, target)
    return pairs


def is_held_out(source: str) -> bool:
    """Whether a sentence is for evaluation, a tenth of all; the same for every language and release.

    Other capitals, blanks and punctuation make no other sentence.
    """
    words = " ".join(re.findall(r"\w+", source.casefold()))
    return hashlib.sha256(words.encode()).digest()[0] < 26  # of 256


def _fill(rows: Iterable[Sequence[int]], context: int) -> Tensor:
    filled = [[*row, *[PAD] * (context - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64).view(-1, context)

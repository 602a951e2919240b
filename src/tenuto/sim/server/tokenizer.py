"""Tokenizers, and the words that the simulated model answers with.

Without a real tokenizer, `PieceTokenizer` is used. Its pieces are about as long as real tokens, and a piece's
id is a fixed function of its text. So it has exactly what a prefix cache needs: equal text has equal ids, and
an answer that a client sends back has the same tokens as when it was generated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

from tenuto.core.errors import ConfigError
from tenuto.sim.server.content import TokenIds, make_token_ids

NUM_WORDS = 1024
"""Number of different words in answers, if the vocabulary has that many."""
MIN_WORDS = 64

_PIECES = re.compile(
    r"<\|[a-z_]{1,12}\|>"  # markers of the chat template
    r"| ?[A-Za-z]{1,8}"
    r"| ?[0-9]{1,3}"
    r"| ?[!-/:-@\[-`{-~]{1,4}"
    r"|\s{1,15}(?!\S)"  # all blanks except the last, which belongs to the next word
    r"|[\s\S]"
)


class Tokenizer(Protocol):
    """The interface that the server needs from a tokenizer."""

    vocab_size: int
    """All ids are smaller than this."""
    max_chars: int | None
    """Length of the longest text that one token can represent, in characters. None if unknown."""
    words: Words

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a text, without added special tokens."""


class Words:
    """Words that are one token each, both after a blank and at the beginning of a text."""

    def __init__(self, tokenizer: Tokenizer, candidates: Iterable[str]) -> None:
        """Keep the candidates that are one token. Raises ConfigError if there are too few."""
        self.first: list[int] = []
        self.other: list[int] = []
        self._spelled: dict[int, str] = {}
        for word in candidates:
            token_ids = tokenizer.encode(f"{word} {word}")
            known = [self._spelled.setdefault(token_id, word) for token_id in token_ids]
            if known == [word, word]:
                self.first.append(token_ids[0])
                self.other.append(token_ids[1])
                if len(self.first) == NUM_WORDS:
                    return
        if len(self.first) < MIN_WORDS:
            raise ConfigError(f"the tokenizer has too few whole words to answer in: {len(self.first)}")

    def spell(self, token_ids: Sequence[int], *, begins: bool) -> str:
        """Return the text of these words. With `begins`, there is no blank before the first one."""
        text = " ".join(map(self._spelled.__getitem__, token_ids))
        return text if begins or not text else f" {text}"


class PieceTokenizer:
    """Splits text into short words, up to three digits, or up to four punctuation marks.

    An id is a checksum.
    """

    max_chars: int | None = 16

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.words = Words(self, _make_up_words())

    def encode(self, text: str) -> TokenIds:
        """The ids of a text."""
        size = self.vocab_size
        pieces = _PIECES.findall(text)
        return make_token_ids([crc32(piece.encode(errors="surrogatepass")) % size for piece in pieces])


class HfTokenizer:
    """A real tokenizer: the `tokenizer.json` of a Hugging Face model folder."""

    max_chars: int | None = None

    def __init__(self, folder: str) -> None:
        """Raises ConfigError if the file is missing or cannot be read."""
        path = Path(folder, "tokenizer.json")
        try:
            import tokenizers
        except ImportError:
            raise ConfigError("--tokenizer needs the tokenizers package: pip install tokenizers") from None
        if not path.is_file():
            raise ConfigError(f"--tokenizer: there is no {path}")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise ConfigError(f"--tokenizer: {path}: {error}") from None
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        in_order = (token.lstrip("Ġ▁") for token in sorted(vocabulary, key=vocabulary.__getitem__))
        candidates = dict.fromkeys(word for word in in_order if re.fullmatch("[a-z]{3,8}", word))
        self.words = Words(self, candidates)

    def encode(self, text: str) -> TokenIds:
        """The ids of a text."""
        # The library rejects a lone half of a character (a surrogate).
        clean = text.encode(errors="replace").decode()
        return make_token_ids(self._tokenizer.encode(clean, add_special_tokens=False).ids)


def _make_up_words() -> Iterable[str]:
    syllables = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
    num_words = len(syllables) ** 2
    for number in range(num_words):
        # The stride reaches all candidates, so that neighbouring words do not begin with the same letters.
        first, second = divmod(number * 1237 % num_words, len(syllables))
        yield syllables[first] + syllables[second]

"""Text to token ids, and the words that the simulated model answers in.

Without a real tokenizer there is `PieceTokenizer`: pieces about as long as real tokens, ids that are a fixed
function of the piece. What matters to a prefix cache holds for it exactly: equal text has equal ids, and an
answer that a client sends back is the tokens it was generated as.
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
"""Different words in answers, where the vocabulary has so many."""
MIN_WORDS = 64

_PIECES = re.compile(
    r"<\|[a-z_]{1,12}\|>"  # markers of the chat template
    r"| ?[A-Za-z]{1,8}"
    r"| ?[0-9]{1,3}"
    r"| ?[!-/:-@\[-`{-~]{1,4}"
    r"|\s{1,15}(?!\S)"  # all blanks but the last, which belongs to the word behind it
    r"|[\s\S]"
)


class Tokenizer(Protocol):
    """What the server needs of a tokenizer."""

    vocab_size: int
    """Ids are below it."""
    max_chars: int | None
    """Longest text that one token stands for; None if nobody knows."""
    words: Words

    def encode(self, text: str) -> TokenIds:
        """The ids of a text, no special ones added."""


class Words:
    """Words of one token each, with a blank before them and at a text's beginning."""

    def __init__(self, tokenizer: Tokenizer, candidates: Iterable[str]) -> None:
        """Those candidates that are one token; raises ConfigError if they are too few."""
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
        """The text of these words; `begins` says that no blank comes before it."""
        text = " ".join(map(self._spelled.__getitem__, token_ids))
        return text if begins or not text else f" {text}"


class PieceTokenizer:
    """Short words, digits by three, punctuation by four; a piece's id is its checksum."""

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
    """A real one: the `tokenizer.json` of a Hugging Face model folder."""

    max_chars: int | None = None

    def __init__(self, folder: str) -> None:
        """Raises ConfigError if there is none, or none that can be read."""
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
        # A lone half of a character is no text to the library.
        clean = text.encode(errors="replace").decode()
        return make_token_ids(self._tokenizer.encode(clean, add_special_tokens=False).ids)


def _make_up_words() -> Iterable[str]:
    syllables = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
    num_words = len(syllables) ** 2
    for number in range(num_words):
        # A stride that reaches all of them, so that neighbours do not begin alike.
        first, second = divmod(number * 1237 % num_words, len(syllables))
        yield syllables[first] + syllables[second]

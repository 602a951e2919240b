"""Tokens: from text to ids, and from ids to the simulator's content.

Tokenizers give the ids. Without a real one, `PieceTokenizer` is used. Its pieces are about as long as real
tokens, and a piece's id is a fixed function of its text. So it has exactly what a prefix cache needs: equal
text has equal ids, and an answer that a client sends back has the same tokens as when it was generated.

`ContentTree` converts ids to the simulator's spans. Sequences that begin with equal tokens get equal spans:

    root ── [system, task 3] ── [answer 1] ── [tool 1 …] ── …
                         └───── [task 4, from where it differs] ── …

A text begins where its tokens first differ from all other texts. A sequence is a list of spans; each span
is the beginning of one text. Two sequences share texts exactly as far as their tokens are equal. A text
lives as long as the engine refers to its content (`tenuto.sim.kv.pool`).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakValueDictionary
from zlib import crc32

from tenuto.core.errors import ConfigError
from tenuto.core.reuse import count_common
from tenuto.sim.kv.pool import Span

TokenIds: TypeAlias = "array[int]"
"""Unsigned 32-bit ids, type code "I"."""


MAX_ANSWERS = 20
"""Maximum number of attempts to find a new answer."""


def make_token_ids(ids: Iterable[int] = ()) -> TokenIds:
    """Make an array of token ids. Raises TypeError or OverflowError for values that are not token ids."""
    return array("I", ids)


class Text:
    """A piece of text that continues the first tokens of another text."""

    __slots__ = ("__weakref__", "_before", "following", "token_ids")

    def __init__(self, token_ids: TokenIds, before: Text | None = None) -> None:
        self._before = before
        self.token_ids = token_ids
        self.following: WeakValueDictionary[tuple[int, int], Text] = WeakValueDictionary()
        """The texts that continue this one. Key: how many of its tokens they follow, and their own first
        token."""

    def try_extend(self, token_ids: TokenIds) -> bool:
        """Make the text begin with these tokens. If it has others, return False and change nothing."""
        num_tokens = len(self.token_ids)
        if token_ids[:num_tokens] != self.token_ids[: len(token_ids)]:
            return False
        if len(token_ids) > num_tokens:
            if (num_tokens, token_ids[num_tokens]) in self.following:
                return False
            self.token_ids = token_ids
        return True


class ContentTree:
    """A tree of all content that the engine may have cached, searched by tokens."""

    def __init__(self) -> None:
        self._root = Text(make_token_ids())

    def place(self, token_ids: TokenIds) -> list[Span]:
        """Return the spans of a prompt. New content stays known as long as any object holds the spans."""
        text, start = self._root, 0
        spans: list[Span] = []
        while True:
            num_common = count_common(text.token_ids, token_ids, start)
            if num_common:
                spans.append((text, num_common))
            start += num_common
            if start == len(token_ids):
                return spans
            following = text.following.get((num_common, token_ids[start]))
            if following is None:
                following = Text(token_ids[start:], text)
                text.following[num_common, token_ids[start]] = following
            text = following

    def place_answer(self, prompt: list[Span], generate: Callable[[int], TokenIds]) -> tuple[Span, TokenIds]:
        """Return the span of an answer after a placed prompt, and the answer's tokens.

        An answer is one span. So its first token must differ from those of other known texts after the
        prompt. `generate` is called for answer 0, 1 and so on until this is true. It must return the same
        tokens for the same number. If all attempts collide, the last answer is a text that no look-up finds.
        """
        text, num_tokens = prompt[-1]
        assert isinstance(text, Text)
        for number in range(MAX_ANSWERS):
            token_ids = generate(number)
            key = (num_tokens, token_ids[0])
            answer = text.following.get(key)
            if text.token_ids[num_tokens : num_tokens + 1] != token_ids[:1]:
                if answer is None:
                    answer = text.following[key] = Text(token_ids, text)
                if answer.try_extend(token_ids):
                    return (answer, len(token_ids)), token_ids
        return (Text(token_ids, text), len(token_ids)), token_ids


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


class Words:
    """Words that are one token each, both after a blank and at the beginning of a text."""

    def __init__(self, tokenizer: Tokenizer, candidates: Iterable[str]) -> None:
        """Keep the candidates that are one token. Raises ConfigError if there are too few."""
        self.first: list[int] = []
        self.other: list[int] = []
        self._spelled: dict[int, str] = {}
        self._tokens: dict[int, str] = {}
        for word in candidates:
            token_ids = tokenizer.encode(f"{word} {word}")
            known = [self._spelled.setdefault(token_id, word) for token_id in token_ids]
            if known == [word, word]:
                self.first.append(token_ids[0])
                self.other.append(token_ids[1])
                self._tokens.update(zip(token_ids, (word, f" {word}"), strict=True))
                if len(self.first) == NUM_WORDS:
                    return
        if len(self.first) < MIN_WORDS:
            raise ConfigError(f"the tokenizer has too few whole words to answer in: {len(self.first)}")

    def get_token(self, token_id: int) -> str | None:
        """Return the text of one token, with the blank before it; None if it is not a word."""
        return self._tokens.get(token_id)

    def spell(self, token_ids: Sequence[int], *, begins: bool) -> str:
        """Return the text of these words. With `begins`, there is no blank before the first one."""
        text = " ".join(map(self._spelled.__getitem__, token_ids))
        return text if begins or not text else f" {text}"


class PieceTokenizer:
    """Splits text into short words, up to three digits, or up to four punctuation marks.

    An id is a checksum. Its text is remembered from its last encoding.
    """

    max_chars: int | None = 16
    """Length of the longest text that one token can represent, in characters; None if unknown."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._pieces: dict[int, str] = {}
        self.words = Words(self, _make_up_words())

    def encode(self, text: str) -> TokenIds:
        """The ids of a text."""
        size = self.vocab_size
        pieces = _PIECES.findall(text)
        token_ids = [crc32(piece.encode(errors="surrogatepass")) % size for piece in pieces]
        self._pieces.update(zip(token_ids, pieces, strict=True))
        return make_token_ids(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, with replacement characters for ids that no text has had yet."""
        return "".join([self._pieces.get(token_id, "\ufffd") for token_id in token_ids])


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

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


Tokenizer: TypeAlias = PieceTokenizer | HfTokenizer
"""Both encode a text without added special tokens, into ids below `vocab_size`."""


def _make_up_words() -> Iterable[str]:
    syllables = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
    num_words = len(syllables) ** 2
    for number in range(num_words):
        # The stride reaches all candidates, so that neighbouring words do not begin with the same letters.
        first, second = divmod(number * 1237 % num_words, len(syllables))
        yield syllables[first] + syllables[second]

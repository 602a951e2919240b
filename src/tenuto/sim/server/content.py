"""Converts token ids to the simulator's spans. Sequences that begin with equal tokens get equal spans.

    root ── [system, task 3] ── [answer 1] ── [tool 1 …] ── …
                         └───── [task 4, from where it differs] ── …

A text begins where its tokens first differ from all other texts. A sequence is a list of spans; each span is
the beginning of one text. Two sequences share texts exactly as far as their tokens are equal. A text lives as
long as the engine refers to its content (`tenuto.sim.kv.segments`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import TypeAlias
from weakref import WeakValueDictionary

from tenuto.sim.kv.segments import Span

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
        """Make the text begin with these tokens.

        If it has different ones: returns False and changes nothing.
        """
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
            num_common = _count_common(text.token_ids, token_ids, start)
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


def _count_common(a: TokenIds, b: TokenIds, start: int) -> int:
    """Count how many leading tokens of `a` equal the tokens of `b` from `start` on."""
    longest = min(len(a), len(b) - start)
    if a[:longest] == b[start : start + longest]:
        return longest
    low, high = 0, longest - 1
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
    return low

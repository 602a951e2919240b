"""Salted chained hashes that show which prompts begin alike without their text, and the spans they stand for.

A prompt is a sequence of pieces: blocks of 16 tokens if token ids are known, otherwise messages. The hash of
a piece covers everything before it, like the block hash of a KV cache. It is keyed with the salt, so a guess
of the text cannot be checked without the salt.

    turn 1   pieces a b c      →  [c 400]                            answer  [out1 20]
    turn 2   pieces a b c d e  →  [c 400][out1 20][e 112]            d is the answer
    another  pieces a b x      →  [c 290][x 85]                      alike up to b, then not

A beginning that was seen before keeps its spans. The rest becomes one new span, named by its last hash.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate

from tenuto.workload.schema import Prompt, Span

BLOCK_TOKENS = 16
"""Tokens per piece, where they are known: vLLM's smallest block, so that any of its caches can be told."""
TOKENS_START, TEXTS_START = b"tokens", b"texts"
"""Start values of the hash chains. They differ, so a block of tokens never has the hash of a text."""
MAX_REMEMBERED = 300_000
"""Pieces remembered, the latest; 5 million tokens of different content."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """A prompt, or an answer that goes on from one, in pieces."""

    hashes: list[bytes]
    weights: list[int]
    """Tokens of each piece; characters, where tokens are not known."""


class Hasher:
    """Makes the chained hashes of one recording."""

    def __init__(self, salt: bytes) -> None:
        self._key = blake2b(salt, digest_size=32).digest()

    def hash_tokens(self, token_ids: Sequence[int], after: bytes = TOKENS_START) -> Pieces:
        """In blocks, the last of which may not be full; `after` is the hash of the block before them."""
        ids = array("i", token_ids)
        blocks = [ids[at : at + BLOCK_TOKENS] for at in range(0, len(ids), BLOCK_TOKENS)]
        return self._chain([block.tobytes() for block in blocks], [len(block) for block in blocks], after)

    def hash_texts(self, texts: Sequence[str], after: bytes = TEXTS_START) -> Pieces:
        """Text by text; `after` is the hash of what stands before them."""
        encoded = [text.encode(errors="surrogatepass") for text in texts]
        return self._chain(encoded, [max(1, len(text)) for text in encoded], after)

    def hash_id(self, text: str) -> str:
        """A name that stands for an id."""
        return blake2b(
            text.encode(errors="surrogatepass"), digest_size=8, key=self._key, person=b"id"
        ).hexdigest()

    def _chain(self, encoded: list[bytes], weights: list[int], parent: bytes) -> Pieces:
        hashes = []
        for piece in encoded:
            digest = blake2b(parent, digest_size=8, key=self._key)
            digest.update(b"\x00")
            digest.update(piece)
            parent = digest.digest()
            hashes.append(parent)
        return Pieces(hashes, weights)


class Contents:
    """The beginnings of prompts seen so far, and the spans they stand for. Bounded, oldest out first."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, tuple[Prompt, int]] = OrderedDict()

    def resolve(self, pieces: Pieces, num_tokens: int) -> Prompt:
        """The spans of a prompt, `num_tokens` in all; its beginnings stand for them from now on.

        Pieces not seen before share what the others leave, by their weights.
        """
        known, start = self._find(pieces, num_tokens)
        num_known = sum(span.num_tokens for span in known)
        rest = num_tokens - num_known
        # Named by the last hash, which covers everything: no other content ever has this name.
        prompt = (*known, Span(pieces.hashes[-1].hex(), rest)) if rest else known
        self.remember(prompt, pieces, start, num_known)
        return prompt

    def remember(self, prompt: Prompt, pieces: Pieces, start: int, num_before: int) -> None:
        """Let the pieces from `start` on stand for a prompt's beginnings behind its first tokens."""
        rest = sum(span.num_tokens for span in prompt) - num_before
        total = max(1, sum(pieces.weights[start:]))
        ends = accumulate(pieces.weights[start:])
        for piece_hash, weight in zip(pieces.hashes[start:], ends, strict=True):
            self._seen[piece_hash] = (prompt, num_before + rest * weight // total)
        while len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)

    def _find(self, pieces: Pieces, num_tokens: int) -> tuple[Prompt, int]:
        """The longest beginning seen before that leaves a token for every piece after it."""
        num_pieces = len(pieces.hashes)
        for index in range(num_pieces - 1, -1, -1):
            seen = self._seen.get(pieces.hashes[index])
            if seen is None:
                continue
            num_after = num_pieces - 1 - index
            if seen[1] == num_tokens if num_after == 0 else seen[1] + num_after <= num_tokens:
                self._seen.move_to_end(pieces.hashes[index])
                return cut(*seen), index + 1
        return (), 0


def cut(prompt: Prompt, num_tokens: int) -> Prompt:
    """The first tokens of a prompt."""
    spans = []
    for span in prompt:
        if num_tokens <= 0:
            break
        spans.append(Span(span.content_id, min(span.num_tokens, num_tokens)))
        num_tokens -= span.num_tokens
    return tuple(spans)

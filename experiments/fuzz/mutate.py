"""Makes damaged inputs from sound ones: by the structure of JSON, by bytes, and from nothing.

Everything comes from the random generator that is passed in, so a seed makes the same inputs again.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from typing import Any

from experiments.fuzz.hostile import make_text, make_value

MAX_BYTES = 200_000
"""Largest input. Parsers bound what they read by themselves; this bounds the fuzzing."""
LONG = 60_000
"""Bytes of the rare inputs that repeat one piece many times. They find expressions of quadratic cost."""

Place = tuple[Any, Any]
"""A container of a JSON value, and the key or the index in it."""


class Mutator:
    """Makes inputs for one parser."""

    def __init__(self, rng: random.Random, corpus: Sequence[bytes]) -> None:
        """`corpus`: sound inputs of the parser."""
        self._rng = rng
        self._corpus = corpus

    def make(self) -> bytes:
        """One input."""
        rng = self._rng
        base = rng.choice(self._corpus)
        kind = rng.random()
        if kind < 0.5:
            data = self._mutate_json(base) or self._mutate_bytes(base)
        elif kind < 0.9:
            data = self._mutate_bytes(base)
        elif kind < 0.95:
            data = encode(make_value(rng, depth=5))
        else:
            data = self._wrap(base)
        if rng.random() < 0.1:
            data = self._mutate_bytes(data)
        return data[:MAX_BYTES]

    def _mutate_json(self, base: bytes) -> bytes | None:
        """Change values, keys and lines of a JSON value or of JSON lines; None if it is neither."""
        rng = self._rng
        values = decode(base)
        if values is None:
            return None
        if len(values) > 1 and rng.random() < 0.3:
            self._move_lines(values)
        for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
            number = rng.randrange(len(values))
            places = list(find_places(values[number]))
            if not places:
                values[number] = make_value(rng)
                continue
            container, key = rng.choice(places)
            self._change(container, key, places)
        return b"\n".join(map(encode, values)) + (b"\n" if rng.random() < 0.9 else b"")

    def _move_lines(self, values: list[Any]) -> None:
        rng = self._rng
        at, other = rng.randrange(len(values)), rng.randrange(len(values))
        kind = rng.random()
        if kind < 0.3:
            del values[at]
        elif kind < 0.6:
            values[at], values[other] = values[other], values[at]
        else:
            values.insert(at, json.loads(json.dumps(values[other])))

    def _change(self, container: Any, key: Any, places: Sequence[Place]) -> None:
        rng = self._rng
        kind = rng.random()
        old = container[key]
        if kind < 0.5:
            container[key] = make_value(rng) if rng.random() < 0.7 else self._nudge(old)
        elif kind < 0.65:
            del container[key]
        elif kind < 0.8:
            other, at = rng.choice(places)
            container[key] = json.loads(json.dumps(other[at]))
        elif isinstance(container, dict):
            container[make_text(rng, 12) if rng.random() < 0.5 else str(rng.choice(places)[1])] = old
        else:
            container.extend([old] * rng.choice((1, 2, 100)))

    def _nudge(self, old: Any) -> Any:
        """A value of the same type, near the old one."""
        rng = self._rng
        if isinstance(old, bool) or old is None:
            return not old
        if isinstance(old, int | float) and abs(old) < 1e30:
            return rng.choice((old + 1, old - 1, -old, old * 2, old * 1_000_000, old * 0.3, 0, "7"))
        if isinstance(old, str):
            return rng.choice((old + make_text(rng), make_text(rng) + old, old * 3, old[:-1], old.upper()))
        return old

    def _mutate_bytes(self, base: bytes) -> bytes:
        rng = self._rng
        data = bytearray(base)
        for _ in range(rng.choice((1, 1, 2, 4, 16))):
            start = rng.randrange(len(data) + 1)
            end = min(len(data), start + rng.choice((0, 1, 1, 4, 20, 200)))
            kind = rng.random()
            if kind < 0.25:
                del data[start:end]
            elif kind < 0.45:
                data[start:end] = rng.randbytes(end - start)
            elif kind < 0.65:
                data[start:start] = make_text(rng).encode(errors="surrogatepass")
            elif kind < 0.8:
                other = rng.choice(self._corpus)
                at = rng.randrange(len(other) + 1)
                data[start:end] = other[at : at + rng.choice((1, 5, 40, 400))]
            elif kind < 0.95:
                data[start:start] = data[start:end] * rng.choice((1, 2, 20))
            elif kind < 0.97:
                piece = bytes(data[start:end]) or b"("
                data[start:start] = piece * (LONG // len(piece))
            else:
                del data[start:]
        return bytes(data)

    def _wrap(self, base: bytes) -> bytes:
        rng = self._rng
        kind = rng.randrange(8)
        if kind == 0:
            return gzip.compress(base, mtime=0)
        if kind == 1:
            return gzip.compress(base, mtime=0)[: rng.randrange(1, 200)]
        if kind == 2:
            return rng.choice((b"[", b'{"a":', b"(", b"<", b'[{"":')) * rng.choice((900, 20_000))
        if kind == 3:
            return b"\xef\xbb\xbf" + base
        if kind == 4:
            return base.decode(errors="replace").encode(
                rng.choice(("utf-16", "latin-1", "utf-32")), "replace"
            )
        if kind == 5:
            return base * rng.choice((2, 30))
        if kind == 6:
            return b"9" * rng.choice((20, 5000)) + base
        return b""


def decode(data: bytes) -> list[Any] | None:
    """The JSON value of an input, or those of its lines; None if it is neither."""
    try:
        return [json.loads(data)]
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in data.split(b"\n") if line.strip()] or None
    except (ValueError, RecursionError):
        return None


def encode(value: Any) -> bytes:
    """JSON as Python writes it: NaN and infinity are allowed, lone surrogates are escaped."""
    try:
        return json.dumps(value).encode()
    except ValueError:  # an integer of more digits than Python converts
        return b"1" + b"0" * 5000


def find_places(value: Any) -> list[Place]:
    """Every place in a JSON value that holds something."""
    places: list[Place] = []
    stack = [value]
    while stack:
        each = stack.pop()
        keys: Any = each if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        for key in keys:
            places.append((each, key))
            if isinstance(each[key], dict | list):
                stack.append(each[key])
    return places

"""A client's wish that its cache be kept, read from any dialect, and what becomes of it.

A wish is one or more spans: a part of the prompt, from its start, and the seconds for which it is wanted.
It is never a promise and never a pin:

    on the GPU    held for at most `limits.max_lease_s`, and revoked before any lease that the policy wants
    below it      goes last, for as long as was asked, within `limits.max_wished_share` and the tenant's part

A reader of a dialect fills a `Said`; `read_wish` in this package makes one wish of what all readers found.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

from tenuto.core.types import LeaseEnd, LeaseRefusal

MAX_KEEP_S = 86_400.0
"""A wish for more is one for a day: the most that any of the dialects defines."""
MAX_SPANS = 4
"""Of one request; Anthropic and OpenAI allow as many breakpoints. The longest wanted are taken."""
MAX_MARKS = 64
"""Breakpoints of one request that are looked at; further ones are not read."""
MAX_VALUES = 200_000
"""Values of one body that are looked through for breakpoints and before them: the server waits meanwhile."""
MAX_TAIL_CHARS = 48
MAX_TEXT_CHARS = 2048
MAX_PROMPT_TOKENS = 2**31
_MAX_DEPTH = 8

_DURATION = re.compile(r"([0-9]{1,6})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Place = tuple[str | int, ...]
"""A breakpoint's place in a body, after this part: `("system", 0)`, `("messages", 3, 1)`."""


class Mark(NamedTuple):
    """The end of a part of a prompt, of which only the text is known."""

    share: float
    """How much of the request's text is before it, in characters: from 0 to 1."""
    tail: str = ""
    """The last characters before it; empty if they are not text."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a prompt, and for how long it is wanted."""

    keep_s: float
    num_tokens: int | None = None
    """Where it ends; None: at the turn's end, answer and all."""
    mark: Mark | None = None
    """Where it ends, if that is not known in tokens yet."""

    @property
    def extent(self) -> float:
        """Its length in tokens, for comparisons."""
        return math.inf if self.num_tokens is None else self.num_tokens


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request wishes; without spans, it only tried to."""

    dialect: str
    """That of the longest span; of `malformed` if there is none."""
    spans: tuple[Span, ...] = ()
    malformed: tuple[str, ...] = ()
    """Dialects in which the request said something that makes no sense."""

    @property
    def keep_s(self) -> float:
        """The longest time that is asked for; 0 without spans."""
        return max((span.keep_s for span in self.spans), default=0.0)

    @property
    def num_tokens(self) -> int | None:
        """How much is wanted at all; None: all of it."""
        span = self.get_span(0.0)
        return None if span is None else span.num_tokens

    def get_span(self, age_s: float) -> Span | None:
        """The longest part that is still wanted after this many seconds; None if there is none."""
        wanted = [span for span in self.spans if span.keep_s > age_s]
        return max(wanted, key=lambda span: span.extent) if wanted else None

    def resolve(self, find: Callable[[Mark], int]) -> Wish:
        """The same with every end in tokens. `find`: where a mark is; 0 if that is not known."""
        if all(span.mark is None for span in self.spans):
            return self
        return replace(self, spans=tuple(_resolve(span, find) for span in self.spans))


def _resolve(span: Span, find: Callable[[Mark], int]) -> Span:
    return span if span.mark is None else Span(span.keep_s, find(span.mark))


# What readers find.


@dataclass
class Said:
    """The wishes that one reader found in a request."""

    asked: list[tuple[float, Place | int | None]] = field(default_factory=list)
    """Seconds, and the part that is wanted: up to a place in the body, a number of tokens, or all of it."""
    num_malformed: int = 0

    def ask(self, keep_s: float | None, end: Place | int | None = None) -> None:
        """It asks for this many seconds. None, or no time at all, is malformed."""
        if keep_s is None or not 0 < keep_s < math.inf:
            self.num_malformed += 1
        elif len(self.asked) < MAX_MARKS:
            self.asked.append((min(keep_s, MAX_KEEP_S), end))

    def refuse(self) -> None:
        """It says something that makes no sense."""
        self.num_malformed += 1


def read_duration(value: Any) -> float | None:
    """Seconds of a text such as `5m`; None for anything else."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else float(int(match[1]) * _UNIT_S[match[2]])


def read_number(value: Any) -> float | None:
    """Seconds as a number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def list_parts(body: Mapping[str, Any]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Every part of a prompt that can have a breakpoint, in the order of the prompt, and where it stands.

    At most the first `MAX_VALUES` are listed.
    """
    return islice(_list_parts(body), MAX_VALUES)


def _list_parts(body: Mapping[str, Any]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    for name in ("tools", "system"):
        yield from _list_objects(body.get(name), (name,))
    for name in ("messages", "input"):
        for place, message in _list_objects(body.get(name), (name,)):
            yield place, message
            yield from _list_objects(message.get("content"), place)


def _list_objects(values: Any, place: Place) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    for number, value in enumerate(values if isinstance(values, list) else ()):
        if isinstance(value, dict):
            yield (*place, number), value


# Where a breakpoint stands in the prompt's text.


def cut(body: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """The body without the part of its prompt after a place of `list_parts`."""
    name, number, *inside = place
    names = ("tools", "system", "messages", "input")
    later = names[names.index(str(name)) + 1 :]
    rest = {key: value for key, value in body.items() if key not in later}
    values = list(body[str(name)][: int(number) + 1])
    if inside:
        values[-1] = {**values[-1], "content": values[-1]["content"][: int(inside[0]) + 1]}
    return {**rest, str(name): values}


def make_mark(body: Mapping[str, Any], place: Place) -> Mark:
    """The mark of a place of `list_parts`; one that is never found if the body is too large to count.

    Takes time in proportion to the body, up to `MAX_VALUES`.
    """
    num_all = _count_all(body)
    if num_all is None:
        return Mark(0.0)
    share = (_count_all(cut(body, place)) or 0) / num_all if num_all else 1.0
    name, number, *inside = place
    part = body[str(name)][int(number)]
    part = part["content"][int(inside[0])] if inside else part
    text = None if place[0] == "tools" else _get_text(part)
    return Mark(min(1.0, share), "" if text is None else text.rstrip()[-MAX_TAIL_CHARS:])


_NO_TEXT = ("cache_control", "prompt_cache_breakpoint", "type", "role", "id")
"""Fields that are not text of the prompt: those about caching, and the words of the protocol."""


def _count_all(body: Mapping[str, Any]) -> int | None:
    """Characters of all texts of a prompt; None if it has more than `MAX_VALUES` values."""
    names = ("tools", "system", "instructions", "messages", "input")
    inner: list[Iterator[Any]] = [iter([body.get(name) for name in names])]
    num_chars = 0
    for _ in range(MAX_VALUES):
        while (value := next(inner[-1], inner)) is inner:
            inner.pop()
            if not inner:
                return num_chars
        if isinstance(value, str):
            num_chars += len(value)
        elif len(inner) <= _MAX_DEPTH and isinstance(value, list):
            inner.append(iter(value))
        elif len(inner) <= _MAX_DEPTH and isinstance(value, dict):
            inner.append(each for name, each in value.items() if name not in _NO_TEXT)
    return None


def _get_text(part: Any, depth: int = 0) -> str | None:
    if isinstance(part, str):
        return part
    if isinstance(part, list) and part and depth < _MAX_DEPTH:
        return _get_text(part[-1], depth + 1)
    if isinstance(part, dict) and depth < _MAX_DEPTH:
        return _get_text(part.get("text", part.get("content")), depth + 1)
    return None


class MarkFinder:
    """Finds marks among a prompt's tokens, and remembers where the last ones were.

    The mark's share of the text says roughly where it is, and its last characters say it exactly. These are
    looked for as tokens first, which is quick. A tokenizer may split them otherwise in the prompt; then the
    text around is read. Both are bounded, because the engine waits meanwhile, and take no longer in a longer
    prompt. Misses are not remembered: another prompt may have the mark.
    """

    WINDOW = 1024
    """Tokens whose text is read. Twice as many are looked through."""
    NUM_KNOWN = 256
    MIN_CORE = 3
    """Fewer tokens than this are in too many places."""
    MAX_PLACES = 64
    """Of a mark's tokens, that are looked at."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], encode: Callable[[str], Sequence[int]]
    ) -> None:
        """`decode`, `encode`: the tokenizer's, without tokens of its own."""
        self._decode = decode
        self._encode = encode
        self._known: OrderedDict[str, int] = OrderedDict()

    def find(self, mark: Mark, prompt: Sequence[int]) -> int:
        """How many of a prompt's tokens are before a mark; 0 if it is not found."""
        if mark.share >= 1.0:
            # Agents mark the end of each prompt, and some mark the same place in the next one.
            self._remember(mark.tail, len(prompt))
            return len(prompt)
        if not mark.tail:
            return 0
        known = self._known.get(mark.tail)
        if known is not None and self._ends_at(known, mark.tail, prompt):
            self._known.move_to_end(mark.tail)
            return known
        tail = list(self._encode(mark.tail))
        # Its first tokens and its last may be others in the prompt, where text goes on before and behind.
        num_before = max(2, len(tail) - 10)
        core = tail[num_before:-2]
        found = self._search(mark, prompt, core, num_before) or self._look(mark, prompt, core)
        if found:
            self._remember(mark.tail, found)
        return found

    def _remember(self, tail: str, end: int) -> None:
        self._known[tail] = end
        self._known.move_to_end(tail)
        if len(self._known) > self.NUM_KNOWN:
            self._known.popitem(last=False)

    def _search(self, mark: Mark, prompt: Sequence[int], core: list[int], num_before: int) -> int:
        """Look for the tail's tokens around where it should be; 0 if they are not there.

        `core`: some of them, after `num_before` others.
        """
        if len(core) < self.MIN_CORE:
            return 0
        guess = int(mark.share * len(prompt))
        start = max(0, guess - self.WINDOW)
        around = list(prompt[start : start + 2 * self.WINDOW])
        places, place = [], -1
        for _ in range(self.MAX_PLACES):
            try:
                place = around.index(core[0], place + 1)
            except ValueError:
                break
            if around[place : place + len(core)] == core:
                places.append(start + place)
        if not places:
            return 0
        place = min(places, key=lambda each: abs(each - guess))
        first, behind = max(0, place - num_before - 4), place + len(core)
        part = prompt[first : behind + 4]
        before, found, _ = self._decode(part).partition(mark.tail)
        return first + self._count(part, len(before) + len(found), behind - first) if found else 0

    def _look(self, mark: Mark, prompt: Sequence[int], core: Sequence[int]) -> int:
        """Look for the tail in the text around where it should be; 0 if it is not there."""
        first = max(0, int(mark.share * len(prompt)) - self.WINDOW // 2)
        window = prompt[first : first + self.WINDOW]
        # Tokenizers split some places of a text otherwise, not all. Reading the text takes far longer.
        if len(core) >= self.MIN_CORE and set(pairwise(core)).isdisjoint(pairwise(window)):
            return 0
        text = self._decode(window)
        guess = len(text) * (mark.share * len(prompt) - first) / max(1, len(window))
        ends = [match.end() for match in re.finditer(re.escape(mark.tail), text)]
        if not ends:
            return 0
        return first + self._count(window, min(ends, key=lambda each: abs(each - guess)))

    def _count(self, tokens: Sequence[int], end: int, low: int = 0) -> int:
        """The most tokens whose text is no longer than `end` characters; `low` or more of them."""
        high = len(tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if len(self._decode(tokens[:middle])) <= end:
                low = middle
            else:
                high = middle - 1
        return low

    def _ends_at(self, end: int, tail: str, prompt: Sequence[int]) -> bool:
        # Its last token may extend beyond the mark.
        return tail in self._decode(prompt[max(0, end - MAX_TAIL_CHARS - 1) : end + 1])


# As text, for a field of the request that the engine gets.


def write_wish(wish: Wish) -> str:
    """A wish as text; `parse_wish` reads it."""
    spans = [[span.keep_s, span.num_tokens, *(span.mark or ())] for span in wish.spans]
    return json.dumps({"dialect": wish.dialect, "spans": spans, "malformed": wish.malformed})


def parse_wish(text: Any, dialects: Sequence[str]) -> Wish | None:
    """Read a wish that anybody may have written; None if it is none."""
    if not isinstance(text, str) or len(text) > MAX_TEXT_CHARS:
        return None
    try:
        said = json.loads(text)
        spans = tuple(map(_parse_span, said["spans"][:MAX_SPANS]))
        malformed = tuple(name for name in dialects if name in said["malformed"])
        dialect = said["dialect"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    is_known = isinstance(dialect, str) and dialect in dialects
    return Wish(dialect, spans, malformed) if is_known and (spans or malformed) else None


def _parse_span(said: Any) -> Span:
    if not isinstance(said, list) or len(said) not in (2, 4):
        raise ValueError("a span has two or four parts")
    keep_s = read_number(said[0])
    if keep_s is None or not 0 < keep_s <= MAX_KEEP_S:
        raise ValueError("no time")
    if len(said) == 4:
        share, tail = read_number(said[2]), said[3]
        if share is None or not 0 <= share <= 1 or not isinstance(tail, str) or len(tail) > MAX_TAIL_CHARS:
            raise ValueError("no mark")
        return Span(keep_s, None, Mark(share, tail))
    num_tokens = said[1]
    if num_tokens is not None and not (type(num_tokens) is int and 0 < num_tokens <= MAX_PROMPT_TOKENS):
        raise ValueError("no number of tokens")
    return Span(keep_s, num_tokens)


# What becomes of it.

WISH_HEADER = "X-Tenuto-Wish"
"""The header of an answer that says what becomes of the request's wish."""
RESULTS = ("accepted", "clipped", "refused")


class Verdict(NamedTuple):
    """What becomes of a wish. All of it may still be revoked earlier."""

    result: str
    """One of `RESULTS`. Clipped: less of the time than was asked."""
    dialect: str
    asked_s: float
    gpu_s: float
    """The longest time on the GPU, in seconds."""
    below_s: float
    """The longest time in host memory and on disk, in seconds."""
    reason: LeaseRefusal | LeaseEnd | None = None

    def describe(self) -> dict[str, Any]:
        """All of it in JSON types."""
        return {**self._asdict(), "reason": None if self.reason is None else self.reason.value}


def judge(
    wish: Wish, max_lease_s: float, *, has_tier: bool, refusal: LeaseRefusal | None = None
) -> Verdict | None:
    """What becomes of a wish under these limits; None if it asks for nothing.

    `has_tier`: whether there is host memory or a disk below the GPU that keeps wishes.
    `refusal`: why nothing is kept.
    """
    asked_s = wish.keep_s
    if not wish.spans:
        return None
    gpu_s = 0.0 if refusal is not None else min(asked_s, max_lease_s)
    below_s = asked_s if has_tier and refusal is None else 0.0
    reason: LeaseRefusal | LeaseEnd | None = refusal
    result = "accepted"
    if refusal is not None or not max(gpu_s, below_s):
        result, reason = "refused", refusal or LeaseEnd.TIME_LIMIT
    elif max(gpu_s, below_s) < asked_s:
        result, reason = "clipped", LeaseEnd.TIME_LIMIT
    return Verdict(result, wish.dialect, asked_s, gpu_s, below_s, reason)


def make_wish_header(wish: Wish | None, verdict: Verdict | None) -> tuple[str, str] | None:
    """The header of an answer to a request that wished something; None for others."""
    if wish is None:
        return None
    parts = ["refused", "reason=malformed"]
    if verdict is not None:
        parts = [
            verdict.result,
            f"dialect={verdict.dialect}",
            f"asked={verdict.asked_s:.0f}",
            f"gpu={verdict.gpu_s:.0f}",
            f"below={verdict.below_s:.0f}",
        ]
        parts += [] if verdict.reason is None else [f"reason={verdict.reason.value}"]
    parts += [f"malformed={name}" for name in wish.malformed]
    return WISH_HEADER, "; ".join(parts)

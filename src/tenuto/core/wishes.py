"""A client's wish to keep its cache, read from any dialect, and what becomes of it.

A wish has one or more spans. Each is a part of the prompt, from its start, and the seconds for which it is
wanted. Tenuto never guarantees a wish:

    on the GPU    held for at most `limits.max_lease_s`, and revoked before any lease that the policy wants
    below it      evicted last for as long as asked, within `limits.max_wished_share` and the tenant's part

The readers of dialects (`tenuto.core.wish_dialects`) yield what they find; `read_wish` makes one wish of it.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

from tenuto.core.types import LeaseEnd, LeaseRefusal, Reason

MAX_KEEP_S = 86_400.0
"""Longer times are shortened to this, one day: the longest that any dialect defines."""
MAX_SPANS = 4
"""Most spans of one request, as many as Anthropic and OpenAI allow breakpoints. The longest times are
taken."""
MAX_MARKS = 64
"""Most breakpoints of one request that are read."""
MAX_VALUES = 50_000
"""Most values of one body that are searched for breakpoints, because the server waits meanwhile."""
MAX_TAIL_CHARS = 48
MAX_TEXT_CHARS = 2048
MAX_PROMPT_TOKENS = 2**31
_MAX_DEPTH = 8

_DURATION = re.compile(r"([0-9]{1,6})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Place = tuple[str | int, ...]
"""The part of a body after which a breakpoint is: `("system", 0)`, `("messages", 3, 1)`."""


class Mark(NamedTuple):
    """The end of a span that is known only in the text, not in tokens."""

    share: float
    """The share of the request's characters that are before it, from 0 to 1."""
    tail: str = ""
    """The last characters before it; empty if it does not follow a text."""
    share_before_tools: float | None = None
    """The same share if the template writes the system text before the tools; None: it is the same."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a prompt, and the time for which it is wanted."""

    keep_s: float
    num_tokens: int | None = None
    """Where it ends; None: at the end of the turn, including the answer."""
    mark: Mark | None = None
    """Where it ends, if the end is not known in tokens yet."""

    @property
    def extent(self) -> float:
        """Its length in tokens, for comparisons; infinite if it covers the whole turn."""
        return math.inf if self.num_tokens is None else self.num_tokens


@dataclass(frozen=True, slots=True)
class Wish:
    """A request's wish. It has no spans if all that the request asked for is malformed."""

    dialect: str
    """The dialect of the longest span; without spans, a malformed one."""
    spans: tuple[Span, ...] = ()
    malformed: tuple[str, ...] = ()
    """Dialects in which the request has malformed values."""

    @property
    def keep_s(self) -> float:
        """The longest time asked for, in seconds; 0 without spans."""
        return max((span.keep_s for span in self.spans), default=0.0)

    @property
    def found_s(self) -> float:
        """As `keep_s`, without the parts whose end is not in the prompt."""
        return max((span.keep_s for span in self.spans if span.extent > 0), default=0.0)

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens that are wanted; None: all."""
        span = self.get_span(0.0)
        return None if span is None else span.num_tokens

    def get_span(self, age_s: float) -> Span | None:
        """The largest span that is still wanted after `age_s` seconds; None if there is none."""
        wanted = [span for span in self.spans if span.keep_s > age_s]
        return max(wanted, key=lambda span: span.extent) if wanted else None

    def resolve(self, find: Callable[[Mark], int]) -> Wish:
        """The wish with every end in tokens. `find`: returns a mark's position, or 0 if it is not found."""
        if all(span.mark is None for span in self.spans):
            return self
        spans = (span if span.mark is None else Span(span.keep_s, find(span.mark)) for span in self.spans)
        return replace(self, spans=tuple(spans))


# For the readers.

Asked = tuple[float | None, Place | int | None]
"""What a reader finds: seconds, and the end of the wanted part, which is a place in the body, a number of
tokens, or None for all. None, or a time that is not positive, is malformed."""
MALFORMED: Asked = (None, None)


def read_duration(value: Any) -> float | None:
    """The seconds of a text such as `5m`; None for anything else."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else float(int(match[1]) * _UNIT_S[match[2]])


def read_number(value: Any) -> float | None:
    """A number of seconds; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def list_parts(body: Mapping[str, Any]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Every part of a prompt that can have a breakpoint, with its place, in the order of the prompt.

    At most the first `MAX_VALUES` parts are listed.
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


# The position of a breakpoint in the prompt's text.


def cut(body: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """The body without the part of its prompt that is after a place of `list_parts`."""
    name, number, *inside = place
    names = ("tools", "system", "messages", "input")
    later = names[names.index(str(name)) + 1 :]
    rest = {key: value for key, value in body.items() if key not in later}
    values = list(body[str(name)][: int(number) + 1])
    if inside:
        values[-1] = {**values[-1], "content": values[-1]["content"][: int(inside[0]) + 1]}
    return {**rest, str(name): values}


def make_mark(body: Mapping[str, Any], place: Place) -> Mark:
    """The mark of a place of `list_parts`. If the body is too large to count, the mark will not be found.

    Takes time linear in the size of the body, up to `MAX_VALUES`.
    """
    num_all = _count_all(body)
    if num_all is None:
        return Mark(0.0)
    share = (_count_all(cut(body, place)) or 0) / num_all if num_all else 1.0
    name, number, *inside = place
    part = body[str(name)][int(number)]
    part = part["content"][int(inside[0])] if inside else part
    text = None if place[0] == "tools" else _get_text(part)
    tail = "" if text is None else text.rstrip()[-MAX_TAIL_CHARS:]
    is_system = name == "system" or body[str(name)][int(number)].get("role") in ("system", "developer")
    if share >= 1.0 or not (tail and is_system and body.get("tools")):
        return Mark(min(1.0, share), tail)
    num_before_tools = _count_all({**cut(body, place), "tools": None}) or 0
    return Mark(share, tail, num_before_tools / num_all)


_NO_TEXT = ("cache_control", "prompt_cache_breakpoint", "type", "role", "id")
"""Fields that are not text of the prompt: those about caching, and protocol fields."""


def _count_all(body: Mapping[str, Any]) -> int | None:
    """Number of characters of a prompt's texts; None if it has more than `MAX_VALUES` values."""
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
    """Finds marks among a prompt's tokens, and remembers the positions of the last ones.

    The mark's share of the text gives its approximate position, and its last characters give it exactly.
    Where templates differ in the order of parts, there are two such positions.
    First, the tokens of these characters are searched, which is fast. In the prompt, a tokenizer may split
    them differently; then the text around the position is decoded. The time of both is bounded whatever the
    prompt's length, because the engine waits meanwhile. Misses are not remembered, because another prompt may
    have the mark.
    """

    WINDOW = 1024
    """Number of tokens whose text is read. Twice as many tokens are searched."""
    MAX_WINDOW_CHARS = 16 * WINDOW
    """A longer text is not searched: it has lines of one character, whose tokens are ten times as long as
    those of words, and a client may send it to keep the engine busy."""
    NUM_KNOWN = 256
    MIN_CORE = 3
    """Fewest tokens to search for; fewer would occur in too many places."""
    MAX_PLACES = 64
    """Most places with a mark's tokens that are checked."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], encode: Callable[[str], Sequence[int]]
    ) -> None:
        """`decode`, `encode`: the tokenizer's functions, without special tokens."""
        self._decode = decode
        self._encode = encode
        self._known: OrderedDict[str, int] = OrderedDict()

    def find(self, mark: Mark, prompt: Sequence[int]) -> int:
        """Number of a prompt's tokens before a mark; 0 if the mark is not found."""
        if mark.share >= 1.0:
            # Agents mark the end of each prompt, and some mark the same place again in the next prompt.
            self._remember(mark.tail, len(prompt))
            return len(prompt)
        if not mark.tail:
            return 0
        known = self._known.get(mark.tail)
        if known is not None and self._ends_at(known, mark.tail, prompt):
            self._known.move_to_end(mark.tail)
            return known
        tail = list(self._encode(mark.tail))
        # Its first and last tokens may differ in the prompt, where text precedes and follows it.
        num_before = max(2, len(tail) - 10)
        core = tail[num_before:-2]
        for share in (mark.share, mark.share_before_tools):
            if share is None:
                break
            guess = int(share * len(prompt))
            found = self._search(mark, prompt, guess, core, num_before)
            found = found or self._look(mark, prompt, guess, core)
            if found:
                self._remember(mark.tail, found)
                return found
        return 0

    def _remember(self, tail: str, end: int) -> None:
        self._known[tail] = end
        self._known.move_to_end(tail)
        if len(self._known) > self.NUM_KNOWN:
            self._known.popitem(last=False)

    def _search(self, mark: Mark, prompt: Sequence[int], guess: int, core: list[int], num_before: int) -> int:
        """Search for the tail's tokens around its expected position; 0 if they are not there.

        `core`: some of the tokens, which follow `num_before` others.
        """
        if len(core) < self.MIN_CORE:
            return 0
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

    def _look(self, mark: Mark, prompt: Sequence[int], guess: int, core: Sequence[int]) -> int:
        """Search for the tail in the text around its expected position; 0 if it is not there."""
        first = max(0, guess - self.WINDOW // 2)
        window = prompt[first : first + self.WINDOW]
        # Tokenizers split a text differently only at some places. To read the text takes far longer.
        if len(core) >= self.MIN_CORE and set(pairwise(core)).isdisjoint(pairwise(window)):
            return 0
        text = self._decode(window)
        if len(text) > self.MAX_WINDOW_CHARS:
            return 0
        middle = len(text) * (guess - first) / max(1, len(window))
        ends = [match.end() for match in re.finditer(re.escape(mark.tail), text)]
        if not ends:
            return 0
        return first + self._count(window, min(ends, key=lambda each: abs(each - middle)))

    def _count(self, tokens: Sequence[int], end: int, low: int = 0) -> int:
        """The most tokens, `low` or more, whose text is not longer than `end` characters."""
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


# Wishes as text, for a field of the request that reaches the engine.


def write_wish(wish: Wish) -> str:
    """A wish as text, which `parse_wish` reads."""
    spans = [[span.keep_s, span.num_tokens, *(span.mark or ())] for span in wish.spans]
    return json.dumps({"dialect": wish.dialect, "spans": spans, "malformed": wish.malformed})


def parse_wish(text: Any, dialects: Sequence[str]) -> Wish | None:
    """Read an untrusted text of a wish; None if it is not a wish."""
    if not isinstance(text, str) or len(text) > MAX_TEXT_CHARS:
        return None
    try:
        parsed = json.loads(text)
        spans = tuple(map(_parse_span, parsed["spans"][:MAX_SPANS]))
        malformed = tuple(name for name in dialects if name in parsed["malformed"])
        dialect = parsed["dialect"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    is_known = isinstance(dialect, str) and dialect in dialects
    return Wish(dialect, spans, malformed) if is_known and (spans or malformed) else None


def _parse_span(parsed: Any) -> Span:
    if not isinstance(parsed, list) or len(parsed) not in (2, 5):
        raise ValueError("a span has two or five parts")
    keep_s = read_number(parsed[0])
    if keep_s is None or not 0 < keep_s <= MAX_KEEP_S:
        raise ValueError("no time")
    if len(parsed) == 5:
        tail, shares = parsed[3], [read_number(parsed[2])]
        shares += [] if parsed[4] is None else [read_number(parsed[4])]
        if not isinstance(tail, str) or len(tail) > MAX_TAIL_CHARS:
            raise ValueError("no mark")
        if not all(share is not None and 0 <= share <= 1 for share in shares):
            raise ValueError("no share")
        return Span(keep_s, None, Mark(shares[0] or 0.0, tail, *shares[1:]))
    num_tokens = parsed[1]
    if num_tokens is not None and not (type(num_tokens) is int and 0 < num_tokens <= MAX_PROMPT_TOKENS):
        raise ValueError("no number of tokens")
    return Span(keep_s, num_tokens)


# What becomes of a wish.

WISH_HEADER = "X-Tenuto-Wish"
RESULTS = ("accepted", "clipped", "refused")


class WishRefusal(Reason):
    """Why less is kept than was wished, whatever the settings are."""

    MARK_NOT_FOUND = "mark-not-found", "the text before its breakpoint is not in the prompt"


class Verdict(NamedTuple):
    """What becomes of a wish. Its lease may still be revoked, and its chunks evicted, earlier."""

    result: str
    """One of `RESULTS`. Clipped: for less time than was asked."""
    dialect: str
    asked_s: float
    gpu_s: float
    """The longest time on the GPU, in seconds."""
    below_s: float
    """The longest time in host memory and on disk, in seconds."""
    reason: LeaseRefusal | LeaseEnd | WishRefusal | None = None

    def describe(self) -> dict[str, Any]:
        """The verdict in JSON types."""
        return {**self._asdict(), "reason": None if self.reason is None else self.reason.value}


def judge(
    wish: Wish, max_lease_s: float, *, has_tier: bool, refusal: LeaseRefusal | None = None
) -> Verdict | None:
    """What will become of a wish under these limits; None if it asks for nothing.

    `has_tier`: whether there is host memory or a disk that keeps chunks for wishes. `refusal`: the reason why
    nothing is kept, or None.
    """
    asked_s, found_s = wish.keep_s, wish.found_s
    if not wish.spans:
        return None
    gpu_s = 0.0 if refusal is not None else min(found_s, max_lease_s)
    below_s = found_s if has_tier and refusal is None else 0.0
    reason: LeaseRefusal | LeaseEnd | WishRefusal | None = refusal
    result = "accepted"
    if refusal is not None or max(gpu_s, below_s) < asked_s:
        result = "clipped" if max(gpu_s, below_s) else "refused"
        is_found = max(gpu_s, below_s) < found_s
        reason = refusal or (LeaseEnd.TIME_LIMIT if is_found else WishRefusal.MARK_NOT_FOUND)
    return Verdict(result, wish.dialect, asked_s, gpu_s, below_s, reason)


def make_wish_header(wish: Wish | None, verdict: Verdict | None) -> tuple[str, str] | None:
    """The response header for a request with a wish; None for other requests."""
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

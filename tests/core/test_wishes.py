"""Wishes: what each dialect says, what is malformed, what is bounded, and where a breakpoint is."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tenuto.core.requests import (
    HINT_FIELDS,
    WISH_FIELD,
    Hints,
    are_xargs,
    make_fields,
    parse_hints,
    read_hints,
)
from tenuto.core.types import LeaseEnd, LeaseRefusal
from tenuto.core.wish_dialects import CONTEXT_FIELD, DIALECTS, read_wish, read_wish_text
from tenuto.core.wishes import (
    MAX_KEEP_S,
    MAX_MARKS,
    MAX_SPANS,
    MAX_TAIL_CHARS,
    MAX_VALUES,
    Mark,
    MarkFinder,
    Span,
    Wish,
    cut,
    judge,
    list_parts,
    make_mark,
    make_wish_header,
    write_wish,
)

UNIX_S = 1_788_839_400.0
HOUR = {"type": "ephemeral", "ttl": "1h"}
TOOL = {"name": "ls", "cache_control": {"type": "ephemeral", "ttl": "5m"}}
SYSTEM = [{"type": "text", "text": "Be brief.", "cache_control": HOUR}]
HELLO = [{"role": "user", "content": "Hello."}]
PARTS = [{"type": "text", "text": "Be brief.", "prompt_cache_breakpoint": {"mode": "explicit"}}]
RETAIN = {"action_type": "Retain", "payload": {"ttl_seconds": 300}}
HINT = {"schema_version": 1, "trajectory_id": "t", "kv_priority": 65, "lease_until": 1_788_840_000.0}
OF_DIALECTS: dict[str, tuple[tuple[dict[str, Any], float], ...]] = {
    "anthropic": (
        ({"cache_control": HOUR, "messages": HELLO}, 3600.0),
        ({"system": SYSTEM, "messages": HELLO}, 3600.0),
        ({"tools": [TOOL], "messages": HELLO}, 300.0),
        ({"messages": [{"role": "user", "content": SYSTEM}]}, 3600.0),
        ({"cache_control": {"type": "ephemeral"}, "messages": HELLO}, 0.0),
    ),
    "openai": (
        ({"prompt_cache_retention": "24h", "messages": HELLO}, 86_400.0),
        ({"prompt_cache_retention": "in_memory", "input": "Hello."}, 300.0),
        ({"prompt_cache_options": {"ttl": "30m"}, "input": "Hello."}, 1800.0),
        (
            {
                "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
                "messages": [{"role": "system", "content": PARTS}, *HELLO],
            },
            1800.0,
        ),
        ({"prompt_cache_options": {"mode": "implicit"}, "input": "Hello."}, 0.0),
        ({"prompt_cache_key": "app", "messages": HELLO}, 0.0),
    ),
    "retention-directives": (
        ({"retention_directives": [{"start": 0, "end": 2048, "priority": 80, "duration": 300}]}, 300.0),
        (
            {"retention_directives": [{"start": 0, "end": None, "duration": 12.8}], "retention_scope": "s"},
            12.8,
        ),
        ({"retention_directives": [{"start": 0, "end": 16, "priority": 80}]}, 0.0),
    ),
    "nvext": (
        ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "30m"}}}, 1800.0),
        (
            {"nvext": {"cache_control": {"type": "ephemeral", "ttl": "45s"}, "agent_hints": {"osl": 128}}},
            45.0,
        ),
        ({"nvext": {"cache_control": {"type": "ephemeral"}}}, 0.0),
        ({"nvext": {"agent_hints": {"latency_sensitivity": 1.0, "priority": 5}}}, 0.0),
    ),
    "kv-hints": (
        ({"kv_hints": {"protocol_version": "1", "actions": [RETAIN]}}, 300.0),
        ({"kv_hints": {"retain_full_prompt": {"ttl_seconds": 1800}}}, 1800.0),
        ({"kv_hints": {"actions": [{"action_type": "retain"}, {"action_type": "prefetch"}]}}, 0.0),
    ),
    "agentic-context": (
        ({"vllm_xargs": {CONTEXT_FIELD: {"program_id": "p", "kv_retention_ttl_seconds": 30}}}, 30.0),
        ({CONTEXT_FIELD: '{"program_id": "p", "kv_retention_ttl_seconds": 7200}'}, 7200.0),
        ({CONTEXT_FIELD: {"program_id": "p", "kv_retention_ttl_seconds": 0}}, 0.0),
        ({CONTEXT_FIELD: {"program_id": "p"}}, 0.0),
    ),
    "agent-hint": (
        ({"kv_transfer_params": {"agent_hint": HINT}}, 600.0),
        ({"agent_hint": HINT}, 600.0),
        ({"agent_hint": {**HINT, "lease_until": UNIX_S - 1}}, 0.0),
        ({"agent_hint": {"schema_version": 1, "kv_priority": 65}}, 0.0),
    ),
}
"""Sample bodies of each dialect, and the longest time that each asks for at `UNIX_S`, in seconds."""
SAMPLES = [(name, *sample) for name, samples in OF_DIALECTS.items() for sample in samples]
ODD = (
    0,
    -1,
    1e400,
    math.nan,
    10**400,
    "x",
    "5 m",
    "-5m",
    "9" * 5000 + "m",
    True,
    [],
    [1],
    {},
    {"a": 1},
    "\ud800",
)
"""What may stand in the place of any value."""


def read(body: dict[str, Any]) -> Wish | None:
    xargs = body.get("vllm_xargs")
    return read_wish(body, xargs if isinstance(xargs, dict) else {}, UNIX_S)


@pytest.mark.parametrize(("dialect", "body", "keep_s"), SAMPLES)
def test_each_dialect(dialect: str, body: dict[str, Any], keep_s: float) -> None:
    wish = read(body)
    if keep_s == 0:
        assert wish is None
        return
    assert wish is not None
    assert (wish.dialect, wish.keep_s, wish.malformed) == (dialect, keep_s, ())


def test_every_dialect_has_a_wish_and_what_is_none() -> None:
    assert {name for name, _, keep_s in SAMPLES if keep_s} == set(DIALECTS)
    assert {name for name, _, keep_s in SAMPLES if not keep_s} == set(DIALECTS)


def list_damaged(value: Any) -> Iterator[Any]:
    """The value with each of its parts replaced by each of `ODD`."""
    yield from ODD
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, part in steps:
        for damaged in list_damaged(part):
            whole = copy.copy(value)
            whole[step] = damaged
            yield whole


@pytest.mark.parametrize(("dialect", "body"), [(name, body) for name, body, _ in SAMPLES])
def test_damaged_values_raise_nothing_and_stay_bounded(dialect: str, body: dict[str, Any]) -> None:
    num_refused = 0
    for damaged in list_damaged(body):
        if not isinstance(damaged, dict):
            continue
        wish = read(damaged)
        num_refused += wish is not None and dialect in wish.malformed
        hints = read_hints(damaged, {}, "/v1/messages", UNIX_S)
        if hints.wish is not None:
            assert 0 <= hints.wish.keep_s <= MAX_KEEP_S
            assert len(hints.wish.spans) <= MAX_SPANS
            assert are_xargs(make_fields(hints))
            assert read_wish_text(write_wish(hints.wish)) == hints.wish
    assert num_refused > 0


@pytest.mark.parametrize(
    "body",
    [
        {"cache_control": {"type": "persistent", "ttl": "1h"}},
        {"cache_control": {"type": "ephemeral", "ttl": "2h"}},
        {"messages": [{"role": "user", "content": [{"text": "a", "cache_control": "ephemeral"}]}]},
        {"prompt_cache_retention": "25h"},
        {"prompt_cache_key": 3},
        {"prompt_cache_options": {"mode": "all", "ttl": "30m"}},
        {"retention_directives": [{"start": 0, "end": -1, "duration": 5}]},
        {"retention_directives": {"duration": 5}},
        {"nvext": {"cache_control": {"type": "ephemeral", "ttl": 300}}},
        {"nvext": {"cache_control": {"type": "ephemeral", "ttl": "٣m"}}},
        {"kv_hints": {"retain_full_prompt": True}},
        {"agentic_context": {"kv_retention_ttl_seconds": "soon"}},
        {"agent_hint": {"lease_until": "tomorrow"}},
    ],
)
def test_what_is_malformed_is_said_and_asks_for_nothing(body: dict[str, Any]) -> None:
    wish = read(body)
    assert wish is not None
    assert wish.spans == () and len(wish.malformed) == 1
    assert judge(wish, 600, has_tier=True) is None
    name, text = make_wish_header(wish, None) or ("", "")
    assert (name, text) == ("X-Tenuto-Wish", f"refused; reason=malformed; malformed={wish.malformed[0]}")


def test_what_is_right_counts_beside_what_is_wrong() -> None:
    wish = read({"cache_control": {"type": "ephemeral", "ttl": "1h"}, "prompt_cache_retention": "forever"})
    assert wish == Wish("anthropic", (Span(3600.0),), ("openai",))


def test_the_longest_wanted_spans_are_taken_and_the_largest_of_equal_ones() -> None:
    blocks = [{"text": f"block {n}", "cache_control": {"type": "ephemeral", "ttl": "5m"}} for n in range(200)]
    wish = read({"system": blocks[:2], "messages": [{"role": "user", "content": blocks}]})
    assert wish is not None
    [span] = wish.spans
    assert span.mark is not None and span.mark.tail == f"block {MAX_MARKS - 3}"
    many = [{"end": 10 * n, "duration": n} for n in range(1, 40)]
    wish = read({"retention_directives": many})
    assert wish is not None
    assert [span.keep_s for span in wish.spans] == [39.0, 38.0, 37.0, 36.0]
    whole = {
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "system": [
            {
                "text": "a",
            }
        ],
    }
    whole["system"][0]["cache_control"] = whole["cache_control"]  # type: ignore[index]
    assert read(whole) == Wish("anthropic", (Span(3600.0),))


HOUR = {"type": "ephemeral", "ttl": "1h"}
BODY: dict[str, Any] = {
    "tools": [{"name": "a", "description": "x" * 100}, {"name": "b"}],
    "system": [{"type": "text", "text": "s" * 98 + " end "}, {"type": "text", "text": "t" * 100}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "u" * 50}, {"type": "text", "text": "v" * 50}]},
        {"role": "assistant", "content": "w" * 100},
    ],
}


def test_a_body_of_millions_of_parts_is_not_looked_through() -> None:
    """The server waits meanwhile. A mark of such a body is not found, and its wish is for nothing."""
    messages: list[Any] = [{"role": "user", "content": "a", "cache_control": HOUR}, *[{}] * MAX_VALUES]
    assert len(list(list_parts({"messages": messages}))) == MAX_VALUES
    assert make_mark({"messages": messages}, ("messages", 0)) == Mark(0.0)
    assert make_mark({"messages": messages[:1000]}, ("messages", 0)) == Mark(1.0, "a")
    assert read({"messages": [*messages[1:], messages[0]]}) is None
    wish = read({"messages": messages})
    assert wish is not None
    assert wish.resolve(lambda mark: MarkFinder(str, lambda _: ()).find(mark, [1] * 50)).num_tokens == 0


def test_a_mark_is_the_share_of_the_text_and_its_end() -> None:
    body = copy.deepcopy(BODY)
    body["system"][0]["cache_control"] = HOUR
    wish = read(body)
    assert wish is not None and wish.spans[0].mark is not None
    share, tail, _ = wish.spans[0].mark
    assert share == pytest.approx(205 / 505, abs=0.01)
    assert tail == ("s" * 98 + " end")[-MAX_TAIL_CHARS:]
    assert cut(body, ("system", 0)) == {"tools": body["tools"], "system": body["system"][:1]}
    assert cut(body, ("messages", 0, 0))["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "u" * 50}]}
    ]
    assert cut(body, ("tools", 1)) == {"tools": body["tools"]}
    last = copy.deepcopy(BODY)
    last["messages"][0]["content"][1]["cache_control"] = HOUR
    del last["messages"][1]
    wish = read(last)
    assert wish is not None and wish.spans[0].mark == Mark(1.0, "v" * MAX_TAIL_CHARS)


class Words:
    """A tokenizer: a token is a word with the blank behind it."""

    def __init__(self, text: str) -> None:
        self.words = [f"{word} " for word in text.split()]
        self._numbers = {word: number for number, word in enumerate(text.split())}
        self.num_decoded = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.num_decoded += len(tokens)
        return "".join(self.words[token] for token in tokens)

    def encode(self, text: str) -> list[int]:
        return [self._numbers.get(word, -1) for word in text.split()]


def test_a_mark_is_found_among_the_tokens_and_nothing_behind_it() -> None:
    words = Words(" ".join(f"word{n}" for n in range(6000)))
    finder, prompt = MarkFinder(words.decode, words.encode), list(range(6000))
    # Its share is wrong, for the texts before and behind it are not equally dense.
    assert finder.find(Mark(0.4, "word1998 word1999"), prompt) == 1999
    words.num_decoded = 0
    assert finder.find(Mark(0.4, "word1998 word1999"), prompt) == 1999
    assert words.num_decoded < 100, "it was known"
    assert finder.find(Mark(0.4, "word1998 word1999"), prompt[:1000]) == 0
    assert finder.find(Mark(1.0, "whatever"), prompt) == 6000
    assert finder.find(Mark(0.5, ""), prompt) == 0


@pytest.mark.parametrize("is_system_first", [False, True])
@pytest.mark.parametrize("role", [None, "system", "developer"])
def test_the_end_of_the_system_text_is_found_before_the_tools_and_behind_them(
    role: str | None, is_system_first: bool
) -> None:
    """Templates such as those of Qwen and Hermes write the tools behind the system text."""
    of_tools, of_system, of_user = (
        " ".join(f"{name}{n}" for n in range(number))
        for name, number in (("t", 4000), ("s", 1500), ("u", 2000))
    )
    blocks = [{"type": "text", "text": of_system, "cache_control": HOUR}]
    body: dict[str, Any] = {"tools": [{"name": "a", "description": of_tools}]}
    user = {"role": "user", "content": of_user}
    if role is None:
        body |= {"system": blocks, "messages": [user]}
    else:
        body["messages"] = [{"role": role, "content": blocks}, user]
    head = (of_system, of_tools) if is_system_first else (of_tools, of_system)
    words = Words(" ".join((*head, of_user)))
    finder = MarkFinder(words.decode, words.encode)
    wish = read_wish_text(write_wish(read(body) or Wish("none")))
    assert wish is not None
    # The tokenizer of this test has a blank behind each word, so the last word is not whole in the text.
    found = wish.resolve(lambda mark: finder.find(mark, range(7500))).num_tokens
    assert found == (1500 if is_system_first else 5500) - 1


def test_a_mark_of_many_tokens_is_found_without_reading_the_prompt() -> None:
    """And the last prompt's end, which an agent marks again, at once."""
    words = Words(" ".join(f"w{n}" for n in range(900)))
    finder, prompt = MarkFinder(words.decode, words.encode), [n % 900 for n in range(6000)]
    tail = "w90 w91 w92 w93 w94 w95 w96 w97 w98 w99"
    assert finder.find(Mark(0.6, tail), prompt) == 3699, "the nearest of seven"
    assert words.num_decoded < 100
    # If its first and last words are others there, it is no mark.
    assert finder.find(Mark(0.6, "no" + tail), prompt) == 0
    words.num_decoded = 0
    assert finder.find(Mark(1.0, "the end"), prompt) == 6000
    ended = Words("so it is the end of it")
    finder = MarkFinder(ended.decode, ended.encode)
    first = [n % 7 for n in range(5)]
    assert finder.find(Mark(1.0, "the end"), first) == 5
    assert finder.find(Mark(0.9, "the end"), [n % 7 for n in range(9000)]) == 5
    assert ended.num_decoded < 100


def test_the_text_is_read_only_where_two_tokens_in_a_row_are_the_mark_s() -> None:
    """Most marks that a prompt lacks cost no decoding; one that is split otherwise in a place is found."""
    words = Words(" ".join(f"w{n}" for n in range(6000)))
    finder, prompt = MarkFinder(words.decode, words.encode), list(range(6000))
    assert finder.find(Mark(0.5, " ".join(f"w{n}" for n in range(0, 6000, 500))), prompt) == 0
    assert words.num_decoded == 0
    words.words.append("w3094 w3095 ")
    prompt[3094:3096] = [6000]
    assert finder.find(Mark(0.5, " ".join(f"w{n}" for n in range(3090, 3100))), prompt) == 3098


def test_looking_for_a_mark_is_bounded() -> None:
    words = Words(" ".join(f"word{n}" for n in range(100_000)))
    finder = MarkFinder(words.decode, words.encode)
    for n in range(2 * finder.NUM_KNOWN):
        assert finder.find(Mark(0.5, f"absent{n}"), range(100_000)) == 0
    assert words.num_decoded <= 2 * finder.NUM_KNOWN * finder.WINDOW
    assert not finder._known, "what one prompt lacks may be in another's"
    for n in range(2 * finder.NUM_KNOWN):
        assert finder.find(Mark(0.5, f"word{50_000 + n} "), range(100_000)) == 50_001 + n
    assert len(finder._known) == finder.NUM_KNOWN


def test_a_text_of_very_long_tokens_is_read_once() -> None:
    """Such as one of blanks only, which some tokenizers have a hundred at a time."""
    words = Words(" ".join(f"{n:0100}" for n in range(6000)))
    finder = MarkFinder(words.decode, words.encode)
    assert finder.find(Mark(0.5, f"{3000:0100}"[-MAX_TAIL_CHARS:]), range(6000)) == 0
    assert 0 < words.num_decoded <= finder.WINDOW


def test_spans_end_one_after_the_other() -> None:
    wish = Wish("anthropic", (Span(3600.0, None, Mark(0.1, "x")), Span(300.0)))
    wish = wish.resolve(lambda mark: 64)
    assert wish.spans == (Span(3600.0, 64), Span(300.0))
    assert wish.get_span(0) == wish.get_span(299) == Span(300.0)
    assert wish.get_span(300) == wish.get_span(3599) == Span(3600.0, 64)
    assert wish.get_span(3600) is None


def test_a_wish_reaches_the_engine_as_text() -> None:
    hints = read_hints(
        {"system": [{"text": "Be brief.", "cache_control": HOUR}], "messages": []}, {}, "/v1/messages"
    )
    assert hints.wish is not None and hints.wish.spans[0].mark == Mark(1.0, "Be brief.")
    fields = make_fields(hints)
    assert WISH_FIELD in HINT_FIELDS and isinstance(fields[WISH_FIELD], str)
    assert parse_hints(fields) == hints
    own = read_hints({"vllm_xargs": {WISH_FIELD: fields[WISH_FIELD]}}, {}, "/v1/completions")
    assert own.wish == hints.wish


@pytest.mark.parametrize(
    "text",
    [
        3, "", "{", "[" * 3000, "x" * 5000, "{}", '{"dialect": "anthropic", "spans": [], "malformed": []}',
        '{"dialect": "mine", "spans": [[5, null]], "malformed": []}',
        *(json.dumps({"dialect": "openai", "spans": [span], "malformed": []}) for span in (
            3, [], [5], [0, None], [-1, None], [1e9, None], ["5", None], [5, 0], [5, -3], [5, 1.5], [5, True],
            [5, 10**30], [5, None, 2, "x", None], [5, None, 0.5, 3, None], [5, None, 0.5, "x" * 100, None],
            [5, None, 0.5, "x"], [5, None, 0.5, "x", 2], [5, None, 0.5, "x", "x"], [True, None],
            {"keep": 5},
        )),
    ],
)  # fmt: skip
def test_whoever_writes_the_field_stays_within_its_bounds(text: Any) -> None:
    assert parse_hints({WISH_FIELD: text}) == Hints()


@pytest.mark.parametrize(
    ("keep_s", "max_lease_s", "has_tier", "refusal", "expected"),
    [
        (300, 600, False, None, "accepted; dialect=openai; asked=300; gpu=300; below=0"),
        (3600, 600, False, None, "clipped; dialect=openai; asked=3600; gpu=600; below=0; reason=time-limit"),
        (3600, 600, True, None, "accepted; dialect=openai; asked=3600; gpu=600; below=3600"),
        (3600, 0, False, None, "refused; dialect=openai; asked=3600; gpu=0; below=0; reason=time-limit"),
        (
            300,
            600,
            True,
            LeaseRefusal.LAST_TURN,
            "refused; dialect=openai; asked=300; gpu=0; below=0; reason=last-turn",
        ),
    ],
)
def test_what_becomes_of_it(
    keep_s: float, max_lease_s: float, has_tier: bool, refusal: LeaseRefusal | None, expected: str
) -> None:
    wish = Wish("openai", (Span(keep_s),))
    verdict = judge(wish, max_lease_s, has_tier=has_tier, refusal=refusal)
    assert make_wish_header(wish, verdict) == ("X-Tenuto-Wish", expected)
    assert verdict is not None and verdict.reason in (None, refusal, LeaseEnd.TIME_LIMIT)

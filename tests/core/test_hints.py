"""What clients say about their jobs, from the helpful to the hostile."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tenuto.core.requests import (
    MAX_EXPECTED_TOOL_S,
    MAX_ID_CHARS,
    MAX_TOOL_CHARS,
    Hints,
    get_bounded_id,
    get_conversation_id,
    get_header_fields,
    parse_hints,
    read_hints,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=5,
)
FIELDS = ["job_id", "is_last_step", "tool", "expected_tool_seconds", "tenant", "unknown"]


def test_a_client_that_says_everything() -> None:
    said = {"job_id": "j", "is_last_step": False, "tool": "ls", "expected_tool_seconds": 2, "tenant": "t"}
    hints = parse_hints(said)
    assert (hints.is_last, hints.tool, hints.expected_tool_s, hints.tenant) == (False, "ls", 2.0, "t")
    assert hints.job_id is not None and "j" in hints.job_id


@pytest.mark.parametrize("fields", [None, {}, {"other": 1}, [], ["job_id"], "job_id", 3])
def test_a_client_that_says_nothing(fields) -> None:
    assert parse_hints(fields) == Hints()


def test_the_session_id_names_the_job_when_no_job_id_does() -> None:
    assert parse_hints({}, "session").job_id == "session"
    assert parse_hints({"job_id": "job"}, "session").job_id == "job"
    assert parse_hints({"job_id": [1]}, "session").job_id == "session"
    assert parse_hints(None, None).job_id is None


def test_which_ids_are_of_a_session() -> None:
    def is_session(body: dict, headers: dict | None = None) -> bool | None:
        return read_hints(body, headers or {}, "/v1/chat/completions").is_session

    for header in ("x-session-id", "x-claude-code-session-id", "thread-id"):
        assert is_session({}, {header: "s"})
        assert not is_session({"job_id": "j"}, {header: "s"})
        assert not is_session({"vllm_xargs": {"job_id": "j"}}, {header: "s"})
        assert not is_session({"agentic_context": {"program_id": "p"}}, {header: "s"})
    assert is_session({"session_id": "s"})
    assert is_session({"metadata": {"session_id": "s"}})
    assert is_session({"metadata": {"session_id": "s"}, "vllm_xargs": {"job_id": ""}})
    assert not is_session({"job_id": "j"})
    assert not is_session({"messages": [{"role": "user", "content": "Mend it."}]})


def test_a_conversation_s_name_that_a_router_pins_by_is_no_stronger_than_the_content() -> None:
    name = get_conversation_id({"messages": [{"role": "user", "content": "Mend it."}]})
    assert name is not None
    hints = parse_hints({}, name)
    assert (hints.job_id, hints.conversation, hints.name) == (None, name, name)
    assert parse_hints({"tenant": "t"}, name).conversation == f"t\t{name}"
    assert parse_hints({"job_id": "job"}, name).job_id == "job"
    for other in (f"{name}0", name.upper(), "conv-task-17"):
        assert parse_hints({}, other).job_id == other


def test_a_job_id_is_private_to_its_tenant() -> None:
    pairs = [("a", "b/c"), ("a/b", "c"), ("a", "c"), ("b", "c"), (None, "a/c"), (None, "c"), (None, "a c")]
    ids = [parse_hints({"tenant": tenant, "job_id": job}).job_id for tenant, job in pairs]
    assert len(set(ids)) == len(pairs)
    assert parse_hints({"tenant": "a"}, "session").job_id != "session"


@pytest.mark.slow
@given(
    st.tuples(st.none() | st.text(), st.text()),
    st.tuples(st.none() | st.text(), st.text()),
)
def test_no_two_tenants_share_a_job_id(one, other) -> None:
    bounded_one, bounded_other = (tuple(map(get_bounded_id, pair)) for pair in (one, other))
    ids = [parse_hints({"tenant": tenant, "job_id": job}).job_id for tenant, job in (one, other)]
    if None not in ids:
        assert (ids[0] == ids[1]) == (bounded_one == bounded_other)


def test_an_id_of_10_kb_costs_what_a_short_one_does() -> None:
    long = get_bounded_id("x" * 10_000)
    assert long is not None and len(long) <= MAX_ID_CHARS
    assert long == get_bounded_id("x" * 10_000)
    assert long != get_bounded_id("x" * 10_001)
    assert get_bounded_id("x" * MAX_ID_CHARS) == "x" * MAX_ID_CHARS


@pytest.mark.parametrize("value", ["", "  ", "\n", None, True, False, 1.5, [], {}, 10**200, -(10**200)])
def test_ids_that_name_nothing(value) -> None:
    assert get_bounded_id(value) is None


def test_ids_that_are_numbers_or_have_blanks_around_them() -> None:
    assert get_bounded_id(42) == get_bounded_id(" 42\n") == "42"


def test_control_characters_never_reach_a_log() -> None:
    for value in ("a\x00b", "a\nb", "\x1b[31mred", "a\u202eb", "\ud800"):
        bounded = get_bounded_id(value)
        assert bounded is not None and bounded.isprintable()
        tool = parse_hints({"tool": value}).tool
        assert tool is not None and tool.isprintable()


def test_unprintable_ids_stay_apart() -> None:
    values = ["a\ud800", "a\ud801", "a\x00", "a\x01", "a?"]
    assert len({get_bounded_id(value) for value in values}) == len(values)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        (0, False),
        (2, True),
        ("true", True),
        (" YES ", True),
        ("0", False),
        ("False", False),
        ("maybe", None),
        ("", None),
        (math.nan, None),
        (None, None),
        ([], None),
        ({"a": 1}, None),
    ],
)
def test_whether_this_is_the_last_turn(value, expected) -> None:
    assert parse_hints({"is_last_step": value}).is_last is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2, 2.0),
        ("2.5", 2.5),
        (0, 0.0),
        (math.inf, MAX_EXPECTED_TOOL_S),
        ("1e999", MAX_EXPECTED_TOOL_S),
        (MAX_EXPECTED_TOOL_S + 1, MAX_EXPECTED_TOOL_S),
        (math.nan, None),
        ("nan", None),
        (-1, None),
        (-math.inf, None),
        (True, None),
        (10**400, None),
        ("soon", None),
        ("1" * 1000, None),
        ([1], None),
        (None, None),
    ],
)
def test_how_long_the_tool_will_take(value, expected) -> None:
    assert parse_hints({"expected_tool_seconds": value}).expected_tool_s == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("ls", "ls"), ("  git status ", "git status"), ("", None), ("  ", None), (3, None), (["ls"], None)],
)
def test_which_tool_is_called(value, expected) -> None:
    assert parse_hints({"tool": value}).tool == expected


def test_a_tool_name_is_bounded() -> None:
    assert parse_hints({"tool": "x" * 10_000}).tool == "x" * MAX_TOOL_CHARS
    # It is the same name when it is sent on: the cut leaves no space at its end.
    assert parse_hints({"tool": "x " * 10_000}).tool == ("x " * MAX_TOOL_CHARS)[: MAX_TOOL_CHARS - 1]


@pytest.mark.slow
@given(json_values)
def test_any_json_value_as_fields(fields) -> None:
    assert isinstance(parse_hints(fields), Hints)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(FIELDS), json_values), json_values)
def test_any_json_value_in_a_field_is_bounded(fields, session_id) -> None:
    hints = parse_hints(fields, session_id)
    for text, bound in (
        (hints.job_id, 2 * MAX_ID_CHARS + 1),  # tenant, separator, job
        (hints.tenant, MAX_ID_CHARS),
        (hints.tool, MAX_TOOL_CHARS),
    ):
        assert text is None or (type(text) is str and 0 < len(text) <= bound)
    assert hints.is_last in (None, True, False)
    assert hints.expected_tool_s is None or 0 <= hints.expected_tool_s <= MAX_EXPECTED_TOOL_S


def test_headers_name_the_job_and_the_first_of_them_counts() -> None:
    assert get_header_fields({}) == {}
    assert get_header_fields({"x-conversation-id": "c", "x-session-id": "s"}) == {"job_id": "s"}
    assert get_header_fields({"x-session-id": " ", "x-conversation-id": "c"}) == {"job_id": "c"}


def test_subagents_of_one_session_are_jobs_of_their_own() -> None:
    main = get_header_fields({"x-claude-code-session-id": "s"})
    agents = [
        get_header_fields({"x-claude-code-session-id": "s", "x-claude-code-agent-id": agent})
        for agent in "ab"
    ]
    assert len({fields["job_id"] for fields in (main, *agents)}) == 3


def test_a_header_may_say_that_the_job_ends() -> None:
    assert get_header_fields({"x-dynamo-session-final": "true"}) == {"is_last_step": True}
    assert get_header_fields({"x-dynamo-session-final": "perhaps"}) == {}


def test_of_an_id_of_megabytes_both_ends_and_the_length_count() -> None:
    long = "a" * 10**6
    bounded = get_bounded_id(long)
    assert bounded == get_bounded_id(long) and bounded is not None and len(bounded) <= MAX_ID_CHARS
    assert len({bounded, *map(get_bounded_id, (f"b{long[1:]}", f"{long[1:]}b", f"{long}a"))}) == 4

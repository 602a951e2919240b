"""OpenTelemetry spans of agents, by the semantic conventions for generative AI, as exporters write them.

OTLP as JSON, the whole of it or an export per line, as the Collector's file exporter writes it:

    {"resourceSpans": [{"scopeSpans": [{"spans": [
      {"traceId": "5b8e…", "spanId": "eee1…", "parentSpanId": "eee0…", "name": "chat small",
       "startTimeUnixNano": "1544712660000000000", "endTimeUnixNano": "1544712661500000000", "attributes": [
        {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "820"}}, …]}, …]}]}]}

or a span per line: one of these, or as the SDK for Python writes it (`span.to_json(indent=None)`):

    {"name": "execute_tool ls", "context": {"trace_id": "0x5b8e…", "span_id": "0xeee2…"},
     "parent_id": "0xeee0…",
     "start_time": "2026-06-01T05:40:30.836000Z", "end_time": "2026-06-01T05:40:31.696000Z",
     "attributes": {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "ls"}, …}

Three operations are read; all other spans only have a place in the tree.

- `chat`, `text_completion` and `generate_content` call a model: a turn. It needs `gen_ai.usage.input_tokens`
  and `output_tokens` (`prompt_tokens` and `completion_tokens` before version 1.27 of the conventions). A call
  that failed and counts no tokens is left out. Where such spans stand within each other, as a framework's
  around its client's, the innermost counts.
- `execute_tool` is a tool that the latest answer before it has called, with its true time. Of tools within
  each other, the outermost counts.
- `invoke_agent` around calls of a model is an agent. Its calls are a job: that of the conversation
  (`gen_ai.conversation.id`, else the trace) and the agent's name. An agent within another one is a sub-agent
  with a job of its own. It begins after the answer before it, and the next call of the outer agent waits for
  its end if that came later.

Messages in spans are not read. See `rounds` for what prompts are taken to share.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tenuto.core.errors import DataError
from tenuto.records.codec import MAX_TOKENS, Fields, show
from tenuto.workload.formats.rounds import Call, Round, get_seconds, make_turns, read_time_ns
from tenuto.workload.formats.rows import read_model
from tenuto.workload.schema import After, Job, TurnSpec

RESOURCES = "resourceSpans"
"""The key of an OTLP export."""
_MODEL_CALLS = ("chat", "text_completion", "generate_content")
_COUNTS = {
    "input": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
    "output": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    "cached": ("gen_ai.usage.cache_read.input_tokens",),
    "reasoning": ("gen_ai.usage.reasoning.output_tokens",),
}
_VALUES = ("stringValue", "intValue", "doubleValue", "boolValue")
_MAX_NS = 2**64
_ERROR = 2


@dataclass(slots=True, eq=False)
class _Span:
    fields: Fields
    key: tuple[str, str]
    """Ids of the trace and of the span, without 0x."""
    parent: tuple[str, str] | None
    attributes: Fields
    operation: object
    outer: _Span | None = None
    """The span that contains it."""
    holds_call: bool = False
    """Whether a call of a model stands somewhere within it."""
    is_agent: bool = False
    """Whether it is an agent that calls a model itself."""
    agent: _Span | None = None
    """The innermost agent that contains it, or itself."""
    tool: _Span | None = None
    """The outermost tool of its agent that contains it, or itself."""
    conversation: str = ""
    job_id: str = ""
    outermost: str = ""
    """The job of the outermost agent that contains an agent, or its own."""


class _Tool(NamedTuple):
    span: _Span
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class _Session:
    spawner: _Span | None
    """The span that contains a sub-agent's agent."""
    rounds: list[Round] = field(default_factory=list)
    tools: list[_Tool] = field(default_factory=list)
    tools_of: list[list[_Tool]] = field(default_factory=list)
    """Those of each round; tools before the first answer belong to none."""
    awaited: set[_Span | None] = field(default_factory=set)
    """Tools that are sub-agents which a later turn waits for."""


def is_span(record: Fields) -> bool:
    """Whether an object is an export of spans, or one span."""
    return RESOURCES in record or "spanId" in record or ("context" in record and "start_time" in record)


def read_otel_spans(records: Sequence[Fields]) -> list[Job]:
    """One job per agent of a conversation, in the order of sending. Raises DataError naming the field."""
    spans: dict[tuple[str, str], _Span] = {}
    for record in records:
        for each in _find_spans(record):
            span = _read_span(each)
            spans.setdefault(span.key, span)  # exporters may send a span again
    ordered = _sort_by_depth(spans)
    _mark(ordered)
    sessions = _make_sessions(ordered)
    if not sessions:
        raise DataError(
            f"{records[0].file}: no span calls a model: gen_ai.operation.name is {', '.join(_MODEL_CALLS)}"
        )
    return _make_jobs(sessions)


# Spans and their tree.


def _find_spans(record: Fields) -> Iterator[Fields]:
    if RESOURCES not in record:
        yield record
        return
    for resource in record.records(RESOURCES):
        for scope in resource.records("scopeSpans") if "scopeSpans" in resource else []:
            yield from scope.records("spans") if "spans" in scope else []


def _read_span(fields: Fields) -> _Span:
    if "context" in fields:
        context = fields.part("context")
        trace, span = context.text("trace_id"), context.text("span_id")
        parent = fields.optional(fields.string, "parent_id")
        attributes = fields.optional_part("attributes")
    else:
        trace, span = fields.text("traceId"), fields.text("spanId")
        parent = fields.optional(fields.string, "parentSpanId")
        attributes = _read_attributes(fields)
    trace = trace.removeprefix("0x")
    return _Span(
        fields=fields,
        key=(trace, span.removeprefix("0x")),
        parent=(trace, parent.removeprefix("0x")) if parent else None,
        attributes=attributes,
        operation=attributes.values.get("gen_ai.operation.name"),
    )


def _read_attributes(fields: Fields) -> Fields:
    """OTLP's list of keys and typed values as an object; values of other types are left out."""
    named: dict[str, Any] = {}
    for attribute in fields.records("attributes") if "attributes" in fields else []:
        value = attribute.optional_part("value").values
        kind = next((kind for kind in _VALUES if kind in value), None)
        if kind is not None:
            named[attribute.text("key")] = value[kind]
    return Fields(fields.place, named, "attributes.")


def _sort_by_depth(spans: Mapping[tuple[str, str], _Span]) -> list[_Span]:
    """The spans, each after the one that contains it. Raises DataError if they form a circle."""
    inner: dict[_Span | None, list[_Span]] = {}
    for span in spans.values():
        # The one around it may not have been exported.
        span.outer = spans.get(span.parent) if span.parent else None
        inner.setdefault(span.outer, []).append(span)
    ordered = inner.get(None, [])
    for span in ordered:
        ordered += inner.get(span, [])
    if len(ordered) < len(spans):
        seen = set(ordered)
        lost = next(span for span in spans.values() if span not in seen)
        raise lost.fields.error("parent", "spans contain each other in a circle")
    return ordered


def _mark(ordered: Sequence[_Span]) -> None:
    """Find each span's conversation, agent, tool and job."""
    for span in reversed(ordered):
        if span.outer is not None:
            span.outer.holds_call |= span.holds_call or _calls_model(span)
    for span in ordered:
        outer = span.outer
        own = span.attributes.optional(span.attributes.text, "gen_ai.conversation.id")
        span.conversation = own or (outer.conversation if outer else "")
    _set_agents(ordered, lambda span: span.operation == "invoke_agent")
    for span in ordered:
        if _is_turn(span) and span.agent is not None:
            span.agent.is_agent = True
            span.agent.conversation = span.agent.conversation or span.conversation
    # An agent without calls of its own is a workflow, or a client's view of a remote agent.
    _set_agents(ordered, lambda span: span.is_agent)
    for span in ordered:
        outer = span.outer
        if outer is not None and outer.tool is not None and outer.agent is span.agent:
            span.tool = outer.tool
        elif span.operation == "execute_tool":
            span.tool = span
        span.job_id = _make_job_id(span)


def _set_agents(ordered: Sequence[_Span], is_agent: Callable[[_Span], bool]) -> None:
    for span in ordered:
        span.agent = span if is_agent(span) else span.outer.agent if span.outer else None


def _make_job_id(span: _Span) -> str:
    if span.agent is not span:
        return span.agent.job_id if span.agent else span.conversation or span.key[0]
    if span.outer is not None and span.outer.agent is not None:
        # Not after all agents around it: names of nested ones would have the square of their number.
        span.outermost = span.outer.agent.outermost
        return f"{span.outermost}/{span.key[1]}"
    name = span.attributes.values.get("gen_ai.agent.name")
    whole = span.conversation or span.key[0]
    span.outermost = f"{whole}/{name}" if isinstance(name, str) and name else whole
    return span.outermost


def _calls_model(span: _Span) -> bool:
    return span.operation in _MODEL_CALLS and not _has_failed(span)


def _is_turn(span: _Span) -> bool:
    return _calls_model(span) and not span.holds_call


def _has_failed(span: _Span) -> bool:
    """Whether a call ended in an error before anything was counted."""
    status = span.fields.values.get("status")
    code = status.get("code", status.get("status_code")) if isinstance(status, dict) else None
    is_error = "error.type" in span.attributes or code in (_ERROR, "STATUS_CODE_ERROR", "ERROR")
    return is_error and not any(key in span.attributes for key in _COUNTS["output"])


# Jobs.


def _make_sessions(ordered: Sequence[_Span]) -> dict[str, _Session]:
    """By job id, in the order in which they began."""
    sessions: dict[str, _Session] = {}
    for span in ordered:
        if _is_turn(span):
            outer = span.agent.outer if span.agent else None
            spawner = outer if outer and outer.agent else None
            sessions.setdefault(span.job_id, _Session(spawner)).rounds.append(_read_round(span))
    for span in ordered:
        if span.tool is span and (session := sessions.get(span.job_id)) is not None:
            session.tools.append(_Tool(span, *_read_times(span.fields)))
    for session in sessions.values():
        session.rounds.sort(key=lambda each: (each.sent_ns, each.end_ns))
        session.tools.sort(key=lambda each: each[1:])
    return dict(sorted(sessions.items(), key=lambda each: each[1].rounds[0].sent_ns))


def _make_jobs(sessions: Mapping[str, _Session]) -> list[Job]:
    start_ns = next(iter(sessions.values())).rounds[0].sent_ns
    turns = {}
    for job_id, session in sessions.items():
        _add_calls(session)
        turns[job_id] = make_turns(job_id, session.rounds, start_ns)
    for job_id in sessions:
        _tie(turns, sessions, job_id)
    return [
        Job(
            job_id,
            get_seconds(session.rounds[0], start_ns, session.rounds[0].sent_ns),
            tuple(_shorten_tools(turns[job_id], session)),
            parent=session.spawner.job_id if session.spawner else None,
        )
        for job_id, session in sessions.items()
    ]


def _add_calls(session: _Session) -> None:
    ends = sorted((each.end_ns, index) for index, each in enumerate(session.rounds))
    session.tools_of = [[] for _ in session.rounds]
    for tool in session.tools:
        at = bisect_right(ends, tool.start_ns, key=lambda each: each[0])
        if at:
            session.tools_of[ends[at - 1][1]].append(tool)
    session.rounds = [
        replace(each, calls=tuple(map(_read_call, tools)))
        for each, tools in zip(session.rounds, session.tools_of, strict=True)
    ]


def _read_call(tool: _Tool) -> Call:
    attributes = tool.span.attributes
    arguments = attributes.values.get("gen_ai.tool.call.arguments")
    return Call(attributes.text("gen_ai.tool.name"), arguments, (tool.end_ns - tool.start_ns) / 10**9)


def _tie(turns: Mapping[str, list[TurnSpec]], sessions: Mapping[str, _Session], job_id: str) -> None:
    """Let a sub-agent begin after an answer of its parent, and the parent's next turn wait for it."""
    session = sessions[job_id]
    if session.spawner is None:
        return
    parent = sessions[session.spawner.job_id]
    sent_ns, end_ns = session.rounds[0].sent_ns, session.rounds[-1].end_ns
    before = bisect_right([each.sent_ns for each in parent.rounds], sent_ns) - 1
    if before < 0 or parent.rounds[before].end_ns > sent_ns:
        return
    called, own = parent.rounds[before], turns[session.spawner.job_id]
    since = After(session.spawner.job_id, before, "finished", get_seconds(called, called.end_ns, sent_ns))
    turns[job_id][0] = replace(turns[job_id][0], after=(since,))
    following = parent.rounds[before + 1 : before + 2]
    if following and following[0].sent_ns >= end_ns:
        delay_s = get_seconds(called, end_ns, following[0].sent_ns)
        until = After(job_id, len(turns[job_id]) - 1, "finished", delay_s)
        own[before + 1] = replace(own[before + 1], after=(*own[before + 1].after, until))
        parent.awaited.add(session.spawner.tool)


def _shorten_tools(turns: Sequence[TurnSpec], session: _Session) -> Iterator[TurnSpec]:
    """Before a turn that waits for sub-agents, the tool time is only that of the other tools."""
    for index, turn in enumerate(turns):
        if index + 1 == len(turns) or not turns[index + 1].after:
            yield turn
            continue
        since_ns, until_ns = session.rounds[index].end_ns, session.rounds[index + 1].sent_ns
        others = [tool.end_ns for tool in session.tools_of[index] if tool.span not in session.awaited]
        busy_ns = min(max(others, default=since_ns), until_ns)
        yield replace(turn, tool_s=max(0, busy_ns - since_ns) / 10**9)


def _read_round(span: _Span) -> Round:
    sent_ns, end_ns = _read_times(span.fields)
    counts = {}
    for what, keys in _COUNTS.items():
        key = next((key for key in keys if key in span.attributes), None)
        if key is None and what in ("input", "output"):
            raise span.attributes.error(keys[0], "is missing: how long was this call of a model?")
        counts[what] = 0 if key is None else _read_whole(span.attributes, key, MAX_TOKENS)
    attributes = span.attributes.values
    model = attributes.get("gen_ai.response.model", attributes.get("gen_ai.request.model"))
    extra = read_model(Fields(span.fields.place, {"model": model}))
    first_s = attributes.get("gen_ai.response.time_to_first_chunk")
    if isinstance(first_s, int | float) and not isinstance(first_s, bool) and 0 <= first_s < 1e9:
        extra["ttft_ms"] = first_s * 1000
    return Round(
        place=span.fields,
        sent_ns=sent_ns,
        end_ns=end_ns,
        num_prompt_tokens=counts["input"],
        num_output_tokens=counts["output"],
        num_cached_tokens=counts["cached"],
        num_reasoning_tokens=counts["reasoning"],
        extra=extra,
    )


def _read_whole(fields: Fields, key: str, high: int) -> int:
    """OTLP writes whole numbers of 64 bits as texts; some exporters do not."""
    value = fields.values.get(key)
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= len(str(high)):
        value = int(value)
    if type(value) is not int or not 0 <= value <= high:
        raise fields.error(key, f"must be a whole number from 0 to {high}, got {show(value)}")
    return value


def _read_times(fields: Fields) -> tuple[int, int]:
    """Start and end of a span, in nanoseconds since 1970."""
    start, end = "startTimeUnixNano", "endTimeUnixNano"
    if start in fields:
        start_ns, end_ns = _read_whole(fields, start, _MAX_NS), _read_whole(fields, end, _MAX_NS)
    else:
        start, end = "start_time", "end_time"
        start_ns, end_ns = read_time_ns(fields, start), read_time_ns(fields, end)
    if end_ns < start_ns:
        raise fields.error(end, "is before the span's start; spans that have not ended cannot be read")
    return start_ns, end_ns

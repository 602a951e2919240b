"""TraceLab's rounds: recorded Claude Code and Codex sessions, JSONL, one call of a model per row.

    {"provider": "claude", "session_id": "claude:92ee…", "round_index": 0, "model": "claude-opus-4-8",
     "input_tokens_total": 32272, "prefix_tokens": 27217, "output_tokens": 931,
     "reasoning_output_tokens": null,
     "timing_events": [{"event_type": "user_message", "timestamp": "2026-06-01T05:40:20.151Z"}, …,
                       {"event_type": "tool_call", "timestamp": "2026-06-01T05:40:30.836Z", …}],
     "tools": [{"tool_name": "Bash", "tool_wall_latency_ms": 860, "tool_internal_latency_ms": null, …}], …}

The meaning of the fields was taken from uw-syfi/TraceLab (artifacts/utils/DB_SCHEMA.md, utils/timing.py,
docs/prompt_cache_accounting.md). Its data are CC BY 4.0.

- A round was sent when its last input (`user_message`, `tool_result`) had come, before the first output. It
  ended with its last output (`reasoning`, `text`, `tool_call`). A round without either is left out.
- `tool_wall_latency_ms` is from the call to its result as the client saw it, with approvals by people.
  `tool_internal_latency_ms`, the tool's own time, is kept as the turn's other key, `tool_internal_times`.
- `prefix_tokens` came from the provider's cache, which forgets after minutes. See `rounds` for what prompts
  are taken to share instead.
- Published rows have no `input` of tools. Your own rows have it, and then a shell call has its command.
- Nothing connects a sub-agent with the session that started it, so it is a job of its own.
- `round_index` contradicts the times at some places, so rounds are in the order of sending.
"""

from __future__ import annotations

from collections.abc import Sequence

from tenuto.core.errors import DataError
from tenuto.records.codec import Fields
from tenuto.workload.formats.rounds import Call, Round, get_seconds, make_turns, read_time_ns
from tenuto.workload.formats.rows import read_model
from tenuto.workload.schema import Job

EVENTS = "timing_events"
"""The key that, beside `round_index`, only these files have."""
_INPUTS = ("user_message", "tool_result")
_OUTPUTS = ("reasoning", "text", "tool_call")


def read_tracelab(records: Sequence[Fields]) -> list[Job]:
    """One job per session, in the order of their first rows. Raises DataError naming file, line and field."""
    sessions: dict[str, list[tuple[int, int, Round]]] = {}
    for record in records:
        session = record.text("session_id")
        made = _read_round(record)
        if made is not None:
            sessions.setdefault(session, []).append((made.sent_ns, record.count("round_index"), made))
    if not sessions:
        raise DataError(f"{records[0].file}: not one round has the times of its input and its output")
    start_ns = min(sent_ns for rounds in sessions.values() for sent_ns, _, _ in rounds)
    jobs = []
    for session, timed in sessions.items():
        rounds = [each for _, _, each in sorted(timed, key=lambda each: each[:2])]
        arrival_s = get_seconds(rounds[0], start_ns, rounds[0].sent_ns)
        jobs.append(Job(session, arrival_s, tuple(make_turns(session, rounds, start_ns))))
    return jobs


def _read_round(record: Fields) -> Round | None:
    events = [(event.text("event_type"), event) for event in record.records(EVENTS)]
    outputs = [read_time_ns(event, "timestamp") for kind, event in events if kind in _OUTPUTS]
    inputs = [read_time_ns(event, "timestamp") for kind, event in events if kind in _INPUTS]
    asked = [at_ns for at_ns in inputs if at_ns <= min(outputs, default=0)]
    if not asked:
        return None
    tools = record.records("tools")
    internal = [tool.optional(tool.milliseconds, "tool_internal_latency_ms") for tool in tools]
    extra = read_model(record)
    if any(each is not None for each in internal):
        extra["tool_internal_times"] = internal
    return Round(
        place=record,
        sent_ns=max(asked),
        end_ns=max(outputs),
        num_prompt_tokens=record.integer("input_tokens_total"),
        num_output_tokens=record.integer("output_tokens"),
        num_cached_tokens=record.integer("prefix_tokens"),
        num_reasoning_tokens=record.optional(record.integer, "reasoning_output_tokens") or 0,
        calls=tuple(
            Call(
                tool.text("tool_name"),
                tool.values.get("input"),
                tool.optional(tool.milliseconds, "tool_wall_latency_ms"),
            )
            for tool in tools
        ),
        extra=extra,
    )

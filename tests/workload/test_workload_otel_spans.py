"""OpenTelemetry's spans of agents, in each form that exporters write."""

from __future__ import annotations

import json

import pytest

from tenuto.cli import main
from tenuto.core.errors import DataError
from tenuto.workload.load import holds_text, load_workload

START_NS = 1_780_000_000 * 10**9


class Spans:
    """Spans in OTLP's form; times are seconds after the start."""

    def __init__(self):
        self.made = []

    def add(self, start_s, end_s, operation, outer="", trace="7" * 32, status=None, **attributes):
        span_id = f"{len(self.made) + 1:016x}"
        named = {"gen_ai.operation.name": operation} if operation else {}
        named |= {f"gen_ai.{key.replace('__', '.')}": value for key, value in attributes.items()}
        self.made.append(
            {
                "traceId": trace,
                "spanId": span_id,
                "parentSpanId": outer,
                "name": f"{operation}",
                "kind": 3,
                "startTimeUnixNano": str(START_NS + round(start_s * 10**9)),
                "endTimeUnixNano": str(START_NS + round(end_s * 10**9)),
                "attributes": [
                    {"key": key, "value": {"intValue": str(value)} if type(value) is int
                     else {"stringValue": value}}
                    for key, value in named.items()
                ],
                "status": status or {},
            }
        )  # fmt: skip
        return span_id

    def chat(self, start_s, end_s, num_input, num_output, outer="", **more):
        counts = {"usage__input_tokens": num_input, "usage__output_tokens": num_output}
        return self.add(start_s, end_s, "chat", outer, **counts, **more)

    def tool(self, start_s, end_s, name, outer="", **more):
        return self.add(start_s, end_s, "execute_tool", outer, tool__name=name, **more)

    def export(self, spans=None):
        return {
            "resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": spans or self.made}]}]
        }


def make_agent():
    """A conversation of two runs of an agent, in two traces; in the first a sub-agent and two tools."""
    spans = Spans()
    run = spans.add(0, 30, "invoke_agent", agent__name="coder", conversation__id="talk")
    spans.chat(1, 3, 100, 20, run, request__model="small")
    # The framework's span around the client's: one call.
    outer = spans.chat(4, 6, 150, 30, run)
    spans.chat(4.5, 5.5, 150, 30, outer, usage__cache_read__input_tokens=100)
    spans.tool(3, 3.75, "ls", run)
    call = spans.tool(6, 16, "explore", run)
    # Nobody's call but the one around it, and nothing to do with agents.
    spans.tool(6.25, 6.5, "tools/call", spans.add(6, 7, None, call))
    child = spans.add(6, 16, "invoke_agent", call, agent__name="explorer")
    spans.chat(7, 9, 60, 10, child)
    spans.tool(9, 13.5, "grep", child)
    spans.chat(14, 15, 80, 10, child)
    spans.tool(6, 12, "make", run)
    spans.chat(17, 18, 300, 40, run)
    later = spans.add(60, 70, "invoke_agent", trace="8" * 32, agent__name="coder", conversation__id="talk")
    spans.chat(61, 62, 400, 5, later, trace="8" * 32)
    return spans


def check_agent(jobs):
    coder, explorer = jobs
    assert (coder.job_id, explorer.job_id) == ("talk/coder", f"talk/coder/{9:016x}")
    assert explorer.parent == coder.job_id
    assert [turn.num_prompt_tokens for turn in coder.turns] == [100, 150, 300, 400]
    assert [turn.tool for turn in coder.turns] == ["ls", "explore", None, None]
    assert coder.turns[0].extra["tool_times"] == [["ls", 0.75]]
    assert coder.turns[1].extra["tool_times"] == [["make", 6.0], ["explore", 10.0]]
    assert coder.turns[0].extra["latency_ms"] == 2000
    # From the answer's end until the next call: 1.5 s; then what is left beside the sub-agent, `make`.
    assert [turn.tool_s for turn in coder.turns] == pytest.approx([1.5, 6.5, 43.0, 0.0])
    assert [turn.tool_s for turn in explorer.turns] == [5.0, 0.0]
    [began], [joined] = explorer.turns[0].after, coder.turns[2].after
    assert (began.job_id, began.turn, began.event, began.delay_s) == (coder.job_id, 1, "finished", 1.5)
    assert (joined.job_id, joined.turn, joined.event, joined.delay_s) == (explorer.job_id, 1, "finished", 2.0)
    assert coder.turns[1].prompt[:2] == (*coder.turns[0].prompt, coder.turns[0].output)


def to_sdk_line(span):
    """As `ReadableSpan.to_json` writes it; see `test_the_sdk_writes_this_form`."""
    from datetime import UTC, datetime

    def write(at_ns):
        return datetime.fromtimestamp(int(at_ns) / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def get(value):
        return int(value["intValue"]) if "intValue" in value else value["stringValue"]

    outer = span["parentSpanId"]
    return {
        "name": span["name"],
        "context": {
            "trace_id": f"0x{span['traceId']}",
            "span_id": f"0x{span['spanId']}",
            "trace_state": "[]",
        },
        "kind": "SpanKind.CLIENT",
        "parent_id": f"0x{outer}" if outer else None,
        "start_time": write(span["startTimeUnixNano"]),
        "end_time": write(span["endTimeUnixNano"]),
        "status": {"status_code": "UNSET"},
        "attributes": {each["key"]: get(each["value"]) for each in span["attributes"]},
        "events": [],
    }


FORMS = {
    "one export": lambda spans: [spans.export()],
    "an export per line": lambda spans: [spans.export([span]) for span in spans.made],
    "a span per line": lambda spans: spans.made,
    "the SDK's lines": lambda spans: map(to_sdk_line, spans.made),
    "any order": lambda spans: [spans.export(spans.made[::-1])],
    "sent twice": lambda spans: [spans.export(), spans.export()],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_jobs(write_rows, form):
    check_agent(load_workload(write_rows(*FORMS[form](make_agent()))).jobs)


def test_the_sdk_writes_this_form(tmp_path):
    """Spans made and written by OpenTelemetry's own SDK."""
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    path = tmp_path / "spans.jsonl"
    with path.open("w") as out:
        provider = trace.TracerProvider()
        exporter = export.ConsoleSpanExporter(
            out=out, formatter=lambda span: f"{span.to_json(indent=None)}\n"
        )
        provider.add_span_processor(export.SimpleSpanProcessor(exporter))
        tracer = provider.get_tracer("test")
        with tracer.start_as_current_span(
            "invoke_agent coder", attributes={"gen_ai.operation.name": "invoke_agent"}
        ):
            for num_input in (100, 150):
                counts = {"gen_ai.usage.input_tokens": num_input, "gen_ai.usage.output_tokens": 20}
                with tracer.start_as_current_span(
                    "chat small", attributes={"gen_ai.operation.name": "chat", **counts}
                ):
                    pass
                tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "ls"}
                with tracer.start_as_current_span("execute_tool ls", attributes=tool):
                    pass
        provider.shutdown()
    [job] = load_workload(path).jobs
    assert [(turn.num_prompt_tokens, turn.tool) for turn in job.turns] == [(100, "ls"), (150, "ls")]
    [[name, seconds]] = job.turns[0].extra["tool_times"]
    assert name == "ls" and 0 <= seconds < job.turns[0].tool_s + 1


def test_without_agents_and_conversations_a_trace_is_a_job(write_rows):
    spans = Spans()
    spans.chat(0, 1, 10, 5, trace="a" * 32)
    spans.chat(2, 3, 20, 5, trace="a" * 32, outer="f" * 16)  # its parent was not exported
    spans.chat(1, 2, 10, 5, trace="b" * 32)
    spans.chat(9, 9.5, 30, 5, trace="c" * 32, conversation__id="talk")
    jobs = load_workload(write_rows(spans.export())).jobs
    assert [(job.job_id[:4], len(job.turns)) for job in jobs] == [("aaaa", 2), ("bbbb", 1), ("talk", 1)]


def test_a_call_that_failed_is_left_out_and_one_that_counts_nothing_is_an_error(write_rows):
    spans = Spans()
    spans.chat(0, 1, 10, 5)
    spans.add(1, 2, "chat", status={"code": 2})
    spans.made[-1]["attributes"].append({"key": "error.type", "value": {"stringValue": "timeout"}})
    assert len(load_workload(write_rows(spans.export())).jobs[0].turns) == 1
    spans.add(2, 3, "chat")
    with pytest.raises(DataError, match=r"attributes.gen_ai.usage.input_tokens: is missing"):
        load_workload(write_rows(spans.export()))


def test_counts_of_old_conventions_are_read(write_rows):
    spans = Spans()
    spans.add(0, 1, "chat", usage__prompt_tokens=10, usage__completion_tokens=5)
    [job] = load_workload(write_rows(spans.export())).jobs
    assert (job.turns[0].num_prompt_tokens, job.turns[0].num_output_tokens) == (10, 5)


def test_commands_are_dropped_by_convert(write_rows, tmp_path):
    spans = Spans()
    spans.chat(0, 1, 10, 5)
    spans.tool(1, 2, "bash", tool__call__arguments=json.dumps({"command": "KEY=PLANTED pytest"}))
    spans.chat(2, 3, 20, 5)
    path = write_rows(spans.export())
    assert holds_text(path)
    assert load_workload(path).jobs[0].turns[0].command == "KEY=PLANTED pytest"
    main(["convert", str(path), str(tmp_path / "out.jsonl")])
    assert "PLANTED" not in (tmp_path / "out.jsonl").read_text()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"spanId": 5}, "spanId: must be a string"),
        ({"traceId": ""}, "traceId: must be a string"),
        ({"attributes": {}}, "attributes: must be a list"),
        ({"attributes": [5]}, r"attributes\[0\]: must be an object"),
        ({"attributes": [{"value": {"intValue": 1}}]}, r"attributes\[0\].key: is missing"),
        ({"startTimeUnixNano": -1}, "startTimeUnixNano: must be a whole number"),
        ({"startTimeUnixNano": "9" * 5000}, "startTimeUnixNano: must be a whole number"),
        ({"startTimeUnixNano": "¹"}, "startTimeUnixNano: must be a whole number"),
        ({"endTimeUnixNano": "0"}, "endTimeUnixNano: is before the span's start"),
        ({"startTimeUnixNano": "0"}, "must be within 1e.09 seconds of the first"),
        ({"parentSpanId": "0000000000000002"}, "contain each other in a circle"),
    ],
)
def test_a_hostile_field_is_named(write_rows, change, problem):
    spans = Spans()
    spans.chat(0, 1, 10, 5)
    spans.chat(1, 2, 20, 5)
    spans.made[1] |= change
    path = write_rows(*spans.made)
    with pytest.raises(DataError, match=problem) as caught:
        load_workload(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "value", [{"intValue": True}, {"intValue": 10**12}, {"stringValue": "x"}, {"intValue": None}]
)
def test_hostile_counts_are_named(write_rows, value):
    spans = Spans()
    spans.chat(0, 1, 10, 5)
    spans.made[0]["attributes"][1]["value"] = value
    with pytest.raises(DataError, match=r"attributes\.gen_ai\.usage\.input_tokens: "):
        load_workload(write_rows(spans.export()))


def test_spans_without_calls_of_a_model_are_refused(write_rows):
    spans = Spans()
    spans.add(0, 1, None)
    with pytest.raises(DataError, match="no span calls a model"):
        load_workload(write_rows(spans.export()))


def test_deep_and_wide_trees_are_read(write_rows):
    """Nothing recurses over spans, and nothing is done twice for each pair of them."""
    spans = Spans()
    outer = ""
    for _ in range(3000):
        outer = spans.add(0, 9, None, outer)
    for index in range(3000):
        spans.chat(index, index + 0.5, 10, 1, outer)
    [job] = load_workload(write_rows(spans.export())).jobs
    assert len(job.turns) == 3000


def test_names_of_nested_agents_do_not_grow_with_their_depth(tmp_path):
    spans, outer = Spans(), ""
    for depth in range(200):
        outer = spans.add(depth, 1000 - depth, "invoke_agent", outer, agent__name="a" * 100)
        spans.chat(depth + 0.1, depth + 0.2, 100, 20, outer)
    path = tmp_path / "spans.json"
    path.write_text(json.dumps(spans.export()))
    jobs = load_workload(path).jobs
    assert len({job.job_id for job in jobs}) == 200
    assert max(len(job.job_id) for job in jobs) < 200
    assert [job.parent for job in jobs[1:]] == [job.job_id for job in jobs[:-1]]

"""Every export is what its readers want: checked against their schemas, and by readers that are here.

The schemas below are written down from their sources, so that they hold where a reader cannot be installed:

- Weka: `weka_trace_models.py` of AIPerf 0.13 (its models forbid other keys), and the published sessions of
  callanjfox/kv-cache-tester, whose keys `test_the_published_sessions_have_the_schema` looks at.
- Mooncake: FAST25-release/README of kvcache-ai/Mooncake; `MooncakeTrace` in `dataset/loader/models.py` of
  AIPerf 0.13. tests/vllm/test_documents.py lets `vllm bench serve` read it.
- agentic Mooncake: `dynamo.agentic_mooncake`, version 2, as aisimulate 0.13 reads it.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tenuto.workload.convert import FORMATS, find_losses, write_trace
from tenuto.workload.load import load_workload, read_trace
from tenuto.workload.schema import After, Job, Span, TurnSpec

TYPES: dict[str, Any] = {
    "text": lambda value: isinstance(value, str) and value,
    "any text": lambda value: isinstance(value, str),
    "whole": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float) and value >= 0,
    "texts": lambda value: value and all(isinstance(word, str) for word in value),
    "any texts": lambda value: all(isinstance(word, str) for word in value),
    "ids": lambda value: all(type(each) is int and each >= 0 for each in value),
    "list": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
# What ends with ! must be there; the rest may be missing or null.
REQUEST = {
    "t": "number!", "type": "text!", "model": "text!", "in": "whole!", "out": "whole!",
    "hash_ids": "ids", "input_types": "any texts", "output_types": "any texts", "stop": "any text",
    "api_time": "number", "think_time": "number", "ttft": "number",
}  # fmt: skip
SUB_AGENT = {
    "t": "number!", "type": "text!", "agent_id": "text!", "subagent_type": "text!", "status": "text!",
    "models": "texts!", "requests": "list!", "duration_ms": "whole", "total_tokens": "whole",
    "tool_use_count": "whole", "tool_tokens": "whole", "system_tokens": "whole",
}  # fmt: skip
SESSION = {
    "id": "text!", "models": "texts!", "block_size": "whole!", "hash_id_scope": "text!",
    "requests": "list!", "tool_tokens": "whole", "system_tokens": "whole", "totals": "object",
}  # fmt: skip
MOONCAKE = {"timestamp": "number!", "input_length": "whole!", "output_length": "whole!", "hash_ids": "ids!"}
AGENTIC_HEADER = {
    "schema": "text!", "version": "whole!", "block_size": "whole!", "hash_id_scope": "text!",
    "source": "object!",
}  # fmt: skip
AGENTIC = {
    "request_id": "text!", "play_id": "text!", "session_id": "text!", "model": "text!",
    "input_length": "whole!", "output_length": "whole!", "hash_ids": "ids!",
    "not_before_ms": "number!", "dependencies": "list!",
}  # fmt: skip
DEPENDENCY = {"request_id": "text!", "trigger": "text!", "delay_ms": "number!", "relation": "text!"}


def check(row: dict[str, Any], schema: dict[str, str]) -> None:
    missing = {key for key, kind in schema.items() if kind.endswith("!")} - row.keys()
    assert not missing, f"{missing} are missing in {row}"
    assert row.keys() <= schema.keys(), f"readers refuse {row.keys() - schema.keys()}"
    for key, value in row.items():
        kind = schema[key]
        is_absent = value is None and not kind.endswith("!")
        assert is_absent or TYPES[kind.rstrip("!")](value), (key, value)


def check_weka(session: dict[str, Any]) -> None:
    check(session, SESSION)
    assert session["hash_id_scope"] == "local"
    seen: set[str] = set()
    for entry in session["requests"]:
        if entry["type"] == "subagent":
            check(entry, SUB_AGENT)
            assert entry["status"] in ("completed", "async_launched")
            assert entry["agent_id"] not in seen
            seen.add(entry["agent_id"])
        for request in entry["requests"] if entry["type"] == "subagent" else [entry]:
            check(request, REQUEST)
            assert request["type"] in ("n", "s")
            assert request["type"] == "s" or "ttft" not in request
            assert len(request["hash_ids"]) == request["in"] // session["block_size"]


def make_jobs() -> list[Job]:
    """Jobs as recorded, with a sub-agent that is waited for and one that is not, and a plain request."""

    def record(**more: object) -> dict[str, object]:
        return {"model": "small", "latency_ms": 1500.25, "ttft_ms": 300.125} | more

    def turn(name: str, before: TurnSpec | None, new: int, **more: Any) -> TurnSpec:
        span = Span(name, new)
        return TurnSpec(before.followed_by(span) if before else (span,), Span(f"{name}/out", 20), **more)

    first = turn("a0", None, 160, tool="tool_use", tool_s=2.0, extra=record())
    second = turn(
        "a1", first, 44, tool="tool_use", tool_s=0.0, at_s=4.5, extra=record(model="large", latency_ms=500.0)
    )
    third = turn("a2", second, 30, at_s=12.0, after=(After("a/one", 1, "finished", 0.5),), extra=record())
    spawn = (After("a", 1, "finished", 1.0),)
    one = turn("b0", None, 90, tool="tool_use", tool_s=1.0, after=spawn, extra=record())
    rest = turn("b1", one, 50, at_s=8.5, extra=record(latency_ms=3000.0))
    two = turn("c0", None, 90, after=spawn, extra={})
    return [
        Job("a", 1.0, (first, second, third)),
        Job("a/one", 6.0, (one, rest), parent="a"),
        Job("a/two", 6.0, (two,), parent="a"),
        Job("b", 2.0, (turn("d0", None, 70, extra=record()),)),
    ]


def export(name: str, folder: Path, jobs: list[Job]) -> tuple[Path, list[Job]]:
    chosen = FORMATS[name]
    out = folder / (name if chosen.has_sessions else f"{name}.jsonl")
    return out, write_trace(out, jobs, chosen, chosen.block_size)


def read_rows(path: Path) -> list[dict[str, Any]]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_weka_files_have_what_readers_insist_on(tmp_path: Path) -> None:
    jobs = make_jobs()
    out, written = export("weka", tmp_path, jobs)
    session, plain = read_rows(out)
    check_weka(session)
    check_weka(plain)
    assert session["models"] == ["small", "large"]
    entries = session["requests"]
    assert [entry["type"] for entry in entries] == ["s", "s", "subagent", "subagent", "s"]
    assert [entry["status"] for entry in entries[2:4]] == ["completed", "async_launched"]
    assert entries[3]["models"] == ["unknown"]
    assert (entries[0]["ttft"], entries[0]["api_time"]) == (0.300125, 1.50025)
    assert entries[2]["duration_ms"] == 5500
    # Only answers that come back in a prompt have no ids: 100 of 534 tokens, and parts of blocks.
    [loss] = find_losses(jobs, written, FORMATS["weka"].get_names(jobs))
    assert loss.startswith("tokens repeated from the turn before")


def test_generated_jobs_are_weka_sessions(tmp_path: Path) -> None:
    """They have no model, and nobody knows how long their answers take."""
    out, _ = export("weka", tmp_path, list(load_workload("ab8", jps=1, window_s=5).jobs))
    for session in read_rows(out):
        check_weka(session)
        assert session["models"] == ["unknown"]
        assert not any("api_time" in request for request in session["requests"])
    # What stands for no model is not one when it is read again.
    assert all("model" not in turn.extra for job in read_trace(out) for turn in job.turns)


def test_keys_of_strangers_do_not_get_into_a_session(tmp_path: Path) -> None:
    extra = {"model": 5, "input_types": "x", "stop": None, "totals": [1], "latency_ms": "soon", "ttft_ms": -1}
    extra |= {"tool_tokens": -3, "subagent_type": ["x"], "duration_ms": 1e300, "mine": 1}
    jobs = make_jobs()
    jobs = [Job(j.job_id, j.arrival_s, tuple(TurnSpec(
        t.prompt, t.output, t.tool, None, t.tool_s, t.at_s, t.after, extra) for t in j.turns
    ), parent=j.parent) for j in jobs]  # fmt: skip
    for session in read_rows(export("weka", tmp_path, jobs)[0]):
        check_weka(session)


def test_mooncake_files_have_what_readers_insist_on(tmp_path: Path) -> None:
    for row in read_rows(export("mooncake", tmp_path, make_jobs())[0]):
        check(row, MOONCAKE)
        assert len(row["hash_ids"]) == -(-row["input_length"] // 512)


def test_agentic_mooncake_files_have_what_readers_insist_on(tmp_path: Path) -> None:
    jobs = make_jobs()
    out, written = export("agentic-mooncake", tmp_path, jobs)
    header, *rows = read_rows(out)
    check(header, AGENTIC_HEADER)
    names = {row["request_id"] for row in rows}
    for row in rows:
        check(row, AGENTIC)
        for dependency in row["dependencies"]:
            check(dependency, DEPENDENCY)
            assert dependency["trigger"] in ("dispatch", "completion")
            assert dependency["request_id"] in names
    models = [turn.extra.get("model") for job in written for turn in job.turns]
    assert models == [turn.extra.get("model") for job in jobs for turn in job.turns]


@pytest.mark.slow
def test_the_published_sessions_have_the_schema(tmp_path: Path) -> None:
    """They come back through Tenuto's own format field by field, but for pauses that contradict times."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "traces" / "weka"
    if not folder.exists():
        pytest.skip("the recorded Weka sessions are not beside the project")
    chosen = sorted(folder.iterdir(), key=lambda file: file.stat().st_size)[:40]
    published = [json.loads(gzip.decompress(file.read_bytes())) for file in chosen]
    (tmp_path / "in").mkdir()
    for session in published:
        check_weka(session)
        (tmp_path / "in" / f"{session['id']}.json").write_text(json.dumps(session))
    _, jobs = export("tenuto", tmp_path, read_trace(tmp_path / "in"))
    again = {session["id"]: session for session in read_rows(export("weka", tmp_path, jobs)[0])}
    left_out = ("requests", "hash_ids", "think_time")
    for session in published:
        other = again[session["id"]]
        assert {key: value for key, value in session.items() if key != "requests"} == {
            key: value for key, value in other.items() if key != "requests"
        }
        for entry, same in zip(session["requests"], other["requests"], strict=True):
            pairs = [(entry, same), *zip(entry.get("requests", ()), same.get("requests", ()), strict=True)]
            for one, two in pairs:
                assert {k: v for k, v in one.items() if k not in left_out} == {
                    k: v for k, v in two.items() if k not in left_out
                }


AIPERF = """
import json, sys
from pathlib import Path
from aiperf.dataset.loader.models import MooncakeTrace
from aiperf.dataset.loader.weka_trace import WekaTraceLoader
from aiperf.dataset.loader.weka_trace_models import WekaTrace
weka, *mooncake = map(Path, sys.argv[1:])
assert WekaTraceLoader.can_load(filename=weka)
traces = [WekaTrace.model_validate_json(file.read_bytes()) for file in sorted(weka.iterdir())]
for file in mooncake:
    for line in file.read_text().splitlines():
        MooncakeTrace.model_validate(json.loads(line))
print([len(trace.requests) for trace in traces])
"""


def test_aiperf_reads_the_exports(tmp_path: Path) -> None:
    """`make test-clients` installs it; elsewhere TENUTO_TEST_AIPERF names the python of its environment."""
    python = os.environ.get("TENUTO_TEST_AIPERF", sys.executable)
    paths = [export(name, tmp_path, make_jobs())[0] for name in ("weka", "mooncake")]
    command = [python, "-W", "ignore", "-c", AIPERF, *map(str, paths)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "No module named 'aiperf'" in done.stderr:
        pytest.skip(
            "AIPerf is not installed; name the python of an environment that has it: TENUTO_TEST_AIPERF"
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "[5, 1]"


AISIMULATE_CONFIG = """\
traffic:
  source: {{type: trace, paths: [{trace}], format: agentic_mooncake, block_size: 64}}
  load: {{type: trace_timestamps, agentic_lanes: 2}}
engine:
  mode: aggregated
  model: meta-llama/Meta-Llama-3.1-8B
  hardware: h200_sxm
  backend: vllm
  context_length: 131072
  workers:
    aggregated: {{}}
"""


@pytest.mark.slow
def test_aisimulate_runs_an_agentic_mooncake_export(tmp_path: Path) -> None:
    command = os.environ.get("TENUTO_TEST_AISIMULATE") or shutil.which("aisimulate")
    if command is None:
        pytest.skip("AISimulate is not installed; name its command: TENUTO_TEST_AISIMULATE")
    trace, _ = export("agentic-mooncake", tmp_path, make_jobs())
    config = tmp_path / "config.yaml"
    config.write_text(AISIMULATE_CONFIG.format(trace=trace))
    done = subprocess.run(
        [command, "predict", "-c", str(config), "--output-dir", str(tmp_path / "out"), "--overwrite"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""What clients say about their jobs, and that it means the same on the wire as in the simulator."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tenuto.client.http import RequestWriter, TokenIds
from tenuto.core import wishes
from tenuto.core.requests import Hints, read_hints
from tenuto.workload import Job, Span, TurnSpec
from tenuto.workload.hints import HINTS

TURNS = (
    TurnSpec((Span("task", 9),), Span("out0", 3), tool="ls", tool_s=2.0),
    TurnSpec((Span("task", 9), Span("more", 4)), Span("out1", 3), tool="cat", tool_s=5.0),
    TurnSpec((Span("task", 9), Span("rest", 4)), Span("out2", 3)),
)
JOB = Job("j", 0.0, TURNS)
HOUR = wishes.Wish("anthropic", (wishes.Span(3600.0),))


@pytest.mark.parametrize(
    ("choice", "first", "second", "last"),
    [
        ("none", Hints(), Hints(), Hints()),
        ("job", Hints("j"), Hints("j"), Hints("j")),
        ("last", Hints("j", False), Hints("j", False), Hints("j", True)),
        ("tool", Hints("j", False, "ls"), Hints("j", False, "cat"), Hints("j", True)),
        (
            "tool-time",
            Hints("j", False, "ls", 2.0),
            Hints("j", False, "cat", 5.0),
            Hints("j", True, None, 0.0),
        ),
        (
            "wish",
            Hints("j", False, "ls", wish=HOUR),
            Hints("j", False, "cat", wish=HOUR),
            Hints("j", True, wish=HOUR),
        ),
        ("wrong", Hints("j", False, "ls", 20.0), Hints("j", False, "cat", 0.5), Hints("j", True, None, 0.0)),
    ],
)
def test_each_choice_says_one_thing_more(choice: str, first: Hints, second: Hints, last: Hints) -> None:
    assert [HINTS[choice](JOB, index) for index in range(3)] == [first, second, last]


@pytest.mark.parametrize("tenant", [None, "team"])
@pytest.mark.parametrize("choice", HINTS)
def test_a_server_reads_what_the_simulator_is_told(choice: str, tenant: str | None) -> None:
    job = dataclasses.replace(JOB, tenant=tenant)
    writer = RequestWriter("m", TokenIds(), "run", HINTS[choice])
    for index in range(3):
        body = json.loads(writer.write_body(job, index, '"prompt": [1]'))
        headers = {name.lower(): value for name, value in writer.write_headers(job).items()}
        said = HINTS[choice](job, index)
        # On the wire the run's id begins the job's, and a server makes a job private to its tenant.
        job_id = None if said.job_id is None else "run/j" if tenant is None else "team\trun/j"
        # A header that other servers read too names a session, whose requests may have other conversations.
        is_session = ("x-session-id" in headers and "vllm_xargs" not in body) or None
        expected = dataclasses.replace(said, job_id=job_id, is_session=is_session)
        assert read_hints(body, headers, "/v1/completions") == expected


def test_the_job_alone_goes_into_a_header_that_any_server_takes() -> None:
    writer = RequestWriter("m", TokenIds(), "run", HINTS["job"])
    assert writer.write_headers(JOB) == {"X-Session-ID": "run/j"}
    assert "vllm_xargs" not in json.loads(writer.write_body(JOB, 0, '"prompt": [1]'))

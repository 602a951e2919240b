"""What prompts share, and what a workload refuses."""

from __future__ import annotations

import math
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.core.errors import ConfigError, DataError
from tenuto.core.reuse import count_shared_tokens
from tenuto.workload.schema import After, Job, Span, TurnSpec, Workload

prompts = st.lists(
    st.builds(Span, st.sampled_from(["a", "b", "c"]), st.integers(1, 6)), min_size=1, max_size=6
).map(tuple)


def spell(prompt):
    """A prompt's tokens, one by one: token k of text c is (c, k)."""
    return [(span.content_id, k) for span in prompt for k in range(span.num_tokens)]


def make_turn(**changes):
    return TurnSpec(**({"prompt": (Span("p", 10),), "output": Span("o", 2)} | changes))


def make_job(job_id="j", num_turns=2, **changes):
    turns = tuple(make_turn(tool_s=1.0 if n < num_turns - 1 else 0.0) for n in range(num_turns))
    return Job(**({"job_id": job_id, "arrival_s": 0.0, "turns": turns} | changes))


@given(prompts, prompts)
def test_shared_tokens_are_the_equal_leading_tokens(a, b):
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(spell(a), spell(b), strict=False))
    assert count_shared_tokens(a, b) == len(list(equal))
    assert count_shared_tokens(a, b) == count_shared_tokens(b, a)


@given(prompts)
def test_the_usual_next_prompt_shares_prompt_and_output(prompt):
    turn = make_turn(prompt=prompt, output=Span("out", 3))
    following = turn.followed_by(Span("tool", 5))
    assert count_shared_tokens((*prompt, turn.output), following) == turn.num_prompt_tokens + 3
    assert make_turn(prompt=following).num_prompt_tokens == turn.num_prompt_tokens + 8


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": ()},
        {"prompt": (Span("p", 0),)},
        {"prompt": (Span("p", 5), Span("q", -1))},
        {"output": Span("o", 0)},
        {"tool_s": -1.0},
        {"tool_s": math.nan},
        {"at_s": math.inf},
        {"after": (After("j", 0, "sent", -0.5),)},
    ],
)
def test_a_turn_out_of_range_is_refused(changes):
    with pytest.raises(DataError):
        make_turn(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"turns": ()}, "no turns"),
        ({"arrival_s": math.nan}, "arrival_s"),
        ({"turns": (make_turn(at_s=3.0),)}, "arrival_s, not at_s"),
        ({"turns": (make_turn(tool_s=3.0),)}, "last one"),
    ],
)
def test_a_job_out_of_range_is_refused(changes, words):
    with pytest.raises(DataError, match=words):
        make_job(**changes)


def waiting(job_id, *events, first=()):
    return make_job(job_id, turns=(make_turn(tool_s=1.0, after=first), make_turn(after=events)))


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        ([make_job("a"), make_job("a")], "several jobs are called 'a'"),
        ([make_job("a", parent="b")], "parent 'b'"),
        ([make_job("a", parent="b"), make_job("b", parent="a")], "missing or its descendant"),
        ([waiting("a", After("b", 0, "sent"))], "no such turn"),
        ([waiting("a", After("a", 2, "sent"))], "no such turn"),
        ([waiting("a", After("a", 1, "sent"))], "'a' turn 1: turns wait for each other"),
        ([waiting("a", After("b", 1, "sent")), waiting("b", After("a", 1, "finished"))], "in a circle"),
        # Neither may start before the other has ended.
        (
            [waiting("a", first=(After("b", 1, "sent"),)), waiting("b", first=(After("a", 1, "sent"),))],
            "in a circle",
        ),
    ],
)
def test_jobs_that_do_not_fit_together_are_refused(jobs, words):
    with pytest.raises(DataError, match=words):
        Workload("w", tuple(jobs))


def test_jobs_may_wait_for_each_other_without_a_circle():
    a = waiting("a", After("b", 1, "finished", 2.0))
    b = waiting("b", After("a", 0, "sent"), After("c", 0, "sent"))
    assert Workload("w", (a, b, make_job("c", parent="a"))).jobs[2].parent == "a"


def test_an_open_loop_needs_recorded_times():
    job = make_job(turns=(make_turn(tool_s=1.0), make_turn(at_s=4.0)))
    assert Workload("w", (job,), "open").loop == "open"
    with pytest.raises(ConfigError, match="'k' has no recorded time for turn 1"):
        Workload("w", (job, make_job("k")), "open")
    with pytest.raises(ConfigError, match="closed or open"):
        Workload("w", (job,), "ajar")

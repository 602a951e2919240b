"""ab8 exactly as published; swe-bench and bfcl within the sampling error of what was published.

The tolerances are about three standard errors at the number of jobs drawn here, with fixed seeds.
"""

from __future__ import annotations

import statistics

import pytest

from tenuto.core.reuse import count_shared_tokens
from tenuto.workload.generators.agents import (
    BFCL,
    PART_CV,
    SLOW_SHARE,
    SWE_BENCH,
    bfcl_contexts_jobs,
    bfcl_jobs,
    swe_bench_contexts_jobs,
    swe_bench_jobs,
)
from tenuto.workload.generators.fixed_lengths import MAX_ANSWER_TOKENS, ab8_jobs, trace8_jobs
from tenuto.workload.load import load_workload
from tenuto.workload.schema import Span
from tests.support.processes import run_under_hash_seeds

NUM_JOBS = 3000
FAMILIES = [(SWE_BENCH, "swe_bench"), (BFCL, "bfcl_web")]


@pytest.fixture(scope="module")
def drawn():
    arrivals = range(NUM_JOBS)
    return {"swe-bench": swe_bench_jobs(arrivals, seed=1), "bfcl": bfcl_jobs(arrivals, seed=1)}


def tool_times_s(jobs, tool=None):
    return [turn.tool_s for job in jobs for turn in job.turns[:-1] if tool in (None, turn.tool)]


def share_of_slowest_tenth(times_s):
    times_s = sorted(times_s)
    return sum(times_s[-round(len(times_s) / 10) :]) / sum(times_s)


def test_ab8_is_the_published_workload(reference):
    published = reference("workload_ab8.json")
    job = ab8_jobs([3.5])[0]
    assert job.arrival_s == 3.5
    assert [turn.num_prompt_tokens for turn in job.turns] == published["prompt_tokens"]
    assert {turn.num_output_tokens for turn in job.turns} == {published["output_tokens"]}
    assert [turn.tool_s for turn in job.turns] == [published["tool_seconds"]] * 7 + [0.0]


def test_ab8_jobs_share_the_system_prompt_and_nothing_else():
    one, two = ab8_jobs([0.0, 1.0])
    for turn, other in zip(one.turns, two.turns, strict=True):
        assert count_shared_tokens(turn.prompt, other.prompt) == 80
    for turn, following in zip(one.turns, one.turns[1:], strict=False):
        assert following.prompt[: len(turn.prompt) + 1] == (*turn.prompt, turn.output)


@pytest.mark.parametrize(("jps", "num_jobs"), [(1, 54), (3, 133), (6, 255), (10, 433), (15, 665)])
def test_ab8_arrivals_give_the_published_numbers_of_jobs(jps, num_jobs):
    workload = load_workload("ab8", jps=jps)
    assert len(workload.jobs) == num_jobs
    assert all(0 < job.arrival_s <= 45 for job in workload.jobs)


@pytest.mark.parametrize(("family", "key"), FAMILIES)
def test_the_families_hold_the_published_numbers(family, key, reference):
    published = reference("tool_times.json")["continuum_paper_table_1"][key]
    assert (family.turns_mean, family.turns_sd) == tuple(published["turns"].values())
    assert (family.tokens_mean, family.tokens_sd) == tuple(published["tokens_per_job"].values())


@pytest.mark.parametrize(
    ("family", "mean_s", "sd_s"), [(SWE_BENCH, 0.925, 3.550), (BFCL, 1.923, 2.133)], ids=["swe-bench", "bfcl"]
)
def test_the_tools_together_have_the_published_moments_exactly(family, mean_s, sd_s):
    # E[x] and E[x²] of the mixture: per tool 0.9 fast + 0.1 slow, each part with E[x²] = (1 + cv²)·mean².
    parts = [
        (tool.share * share, part_s)
        for tool in family.tools
        for share, part_s in ((1 - SLOW_SHARE, tool.fast_s), (SLOW_SHARE, tool.slow_s))
    ]
    mean = sum(share * part_s for share, part_s in parts)
    square = sum(share * (1 + PART_CV**2) * part_s**2 for share, part_s in parts)
    assert sum(share for share, _ in parts) == pytest.approx(1)
    assert mean == pytest.approx(mean_s, rel=0.002)
    assert (square - mean**2) ** 0.5 == pytest.approx(sd_s, rel=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swe-bench", "bfcl"])
def test_turns_and_tokens_meet_the_published_statistics(name, drawn):
    family = {"swe-bench": SWE_BENCH, "bfcl": BFCL}[name]
    turns = [len(job.turns) for job in drawn[name]]
    tokens = [sum(t.num_prompt_tokens + t.num_output_tokens for t in job.turns) for job in drawn[name]]
    root = NUM_JOBS**0.5
    assert statistics.mean(turns) == pytest.approx(family.turns_mean, abs=3 * family.turns_sd / root)
    assert statistics.stdev(turns) == pytest.approx(family.turns_sd, rel=0.05)
    assert statistics.mean(tokens) == pytest.approx(family.tokens_mean, abs=3 * family.tokens_sd / root)
    assert statistics.stdev(tokens) == pytest.approx(family.tokens_sd, rel=0.10)


@pytest.mark.parametrize(
    ("name", "mean_s", "sd_s", "tool", "share"),
    [
        ("swe-bench", 0.925, 3.550, "cd", 0.941),
        ("bfcl", 1.923, 2.133, "fetch_url_content", 0.525),
    ],
)
def test_tool_times_meet_the_published_statistics(name, mean_s, sd_s, tool, share, drawn):
    times_s = tool_times_s(drawn[name])
    assert statistics.mean(times_s) == pytest.approx(mean_s, abs=3 * sd_s / len(times_s) ** 0.5)
    assert statistics.stdev(times_s) == pytest.approx(sd_s, rel=0.07)
    assert share_of_slowest_tenth(tool_times_s(drawn[name], tool)) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("name", ["swe-bench", "bfcl"])
def test_a_job_grows_by_its_outputs_and_its_tools(name, drawn):
    system = Span(f"{name}/system", {"swe-bench": 1200, "bfcl": 500}[name])
    texts = set()
    for job in drawn[name][:200]:
        assert job.turns[0].prompt[0] == system
        for turn, following in zip(job.turns, job.turns[1:], strict=False):
            assert following.prompt[:-1] == (*turn.prompt, turn.output)
            assert turn.tool
        assert job.turns[-1].tool is None
        own = [span.content_id for span in (*job.turns[-1].prompt[1:], job.turns[-1].output)]
        assert texts.isdisjoint(own)
        texts.update(own)


def test_a_job_does_not_depend_on_how_many_there_are():
    assert swe_bench_jobs([0.0, 1.0, 2.0], seed=5)[:2] == swe_bench_jobs([0.0, 1.0], seed=5)
    assert swe_bench_jobs([0.0], seed=5) != swe_bench_jobs([0.0], seed=6)


@pytest.mark.slow
def test_every_process_draws_the_same_workload():
    code = (
        "import hashlib; from tenuto.workload import load_workload;"
        "print(hashlib.sha256(repr([load_workload(n, jps=1, seed=3, arrival='gamma:2')"
        " for n in ('ab8', 'swe-bench', 'bfcl')]).encode()).hexdigest())"
    )
    run_under_hash_seeds(code)


def test_the_contexts_of_bfcl_have_the_published_tokens_scaled() -> None:
    jobs = bfcl_contexts_jobs(range(NUM_JOBS), seed=1)
    contexts = [job.turns[-1].num_prompt_tokens + job.turns[-1].num_output_tokens for job in jobs]
    # The longest 1.5 % are cut to 128,000 tokens, so the deviation is less than the published one.
    assert statistics.fmean(contexts) == pytest.approx(0.4 * 93_256, rel=0.05)
    assert 0.8 * 0.4 * 68_687 < statistics.stdev(contexts) < 0.4 * 68_687
    assert max(contexts) <= 128_000 + 20


@pytest.mark.parametrize("answers", [(10,) * 8, (MAX_ANSWER_TOKENS,) * 8, (1, 2, 3, 4, 5, 6, 7, 8)])
def test_trace8_is_the_first_published_comparison(answers: tuple[int, ...]) -> None:
    for job in trace8_jobs([0.0, 1.5, 2.0], seed=7, answer_tokens=answers):
        assert [turn.num_prompt_tokens for turn in job.turns] == [92, 469, 811, 1343, 1655, 2241, 2665, 2915]
        assert tuple(turn.num_output_tokens for turn in job.turns) == answers
        assert [turn.tool for turn in job.turns] == [
            "find",
            "cat",
            "cat",
            "grep",
            "pytest",
            "cat",
            "patch",
            None,
        ]
        assert 2 <= job.turns[4].tool_s <= 5
        assert all(0.05 <= turn.tool_s <= 0.3 for turn in job.turns[:-1] if turn.tool != "pytest")


def test_the_contexts_of_swe_bench_have_the_published_tokens() -> None:
    jobs = swe_bench_contexts_jobs(range(NUM_JOBS), seed=1)
    contexts = [job.turns[-1].num_prompt_tokens + job.turns[-1].num_output_tokens for job in jobs]
    assert statistics.fmean(contexts) == pytest.approx(70_126, rel=0.05)
    assert statistics.stdev(contexts) == pytest.approx(19_732, rel=0.15)


def test_jobs_of_trace8_share_the_system_prompt_or_all_text() -> None:
    own, shared = (trace8_jobs([0.0, 1.0], seed=7, shares_text=shares_text) for shares_text in (False, True))
    assert count_shared_tokens(own[0].turns[-1].prompt, own[1].turns[-1].prompt) == 80
    assert shared[0].turns[-1].prompt == shared[1].turns[-1].prompt
    assert [turn.tool_s for turn in own[1].turns] == [turn.tool_s for turn in shared[1].turns]

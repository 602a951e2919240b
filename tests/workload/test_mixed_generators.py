"""The generators of mixed traffic: what their tables say of them, and the same jobs in every process."""

from __future__ import annotations

import statistics

import pytest

from tenuto.core.reuse import count_shared_tokens
from tenuto.workload.generators.jobs import Exchange, make_job, make_rng
from tenuto.workload.generators.mixed import (
    agents_and_probes_jobs,
    chat_jobs,
    coding_jobs,
    document_jobs,
    draw,
    draw_turns,
    geometric_jobs,
    giant_jobs,
    long_prompt_jobs,
    mix,
    shift_jobs,
)
from tenuto.workload.load import GENERATORS, load_workload
from tenuto.workload.schema import Span
from tests.support.processes import run_under_hash_seeds

NEW = [name for name in GENERATORS if name not in ("ab8", "swe-bench", "bfcl", "random")]


def test_a_job_by_hand() -> None:
    job = make_job("j", 3.0, (Span("system", 10),), [Exchange(5, 2, "ls", 0.5), Exchange(4, 1, "ls", 9.0)])
    first, second = job.turns
    assert [span.num_tokens for span in second.prompt] == [10, 5, 2, 4]
    assert count_shared_tokens(first.prompt, second.prompt) == first.num_prompt_tokens == 15
    assert (first.tool, first.tool_s, second.tool, second.tool_s) == ("ls", 0.5, None, 0.0)


@pytest.mark.parametrize("name", NEW)
def test_every_generator_makes_jobs_that_fit_a_usual_model(name: str) -> None:
    workload = load_workload(name, jps=5, window_s=20, seed=3)
    turns = [turn for job in workload.jobs for turn in job.turns]
    assert max(turn.num_prompt_tokens + turn.num_output_tokens for turn in turns) < 131_072
    times_s = [job.arrival_s for job in workload.jobs]
    assert times_s == sorted(times_s) and len(times_s) > 50
    assert workload != load_workload(name, jps=5, window_s=20, seed=4)


def test_the_jobs_are_the_same_in_every_process() -> None:
    code = (
        "from tenuto.workload.load import GENERATORS, load_workload\n"
        "print([load_workload(n, jps=2, window_s=5, seed=1).jobs for n in GENERATORS])"
    )
    assert run_under_hash_seeds(code)


def test_numbers_of_turns_have_no_memory() -> None:
    rng = make_rng("test", 1, 0)
    drawn = [draw_turns(rng, 8) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(8, rel=0.03)
    left = [turns - 5 for turns in drawn if turns > 5]
    assert statistics.fmean(left) == pytest.approx(8, rel=0.05)


def test_draws_have_the_mean_and_the_deviation_that_are_asked_for() -> None:
    rng = make_rng("test", 2, 0)
    drawn = [draw(rng, 60.0, 0.8) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(60, rel=0.03)
    assert statistics.stdev(drawn) == pytest.approx(48, rel=0.1)


def test_documents_are_shared_and_long_prompts_are_not() -> None:
    documents = document_jobs(range(400), 1)
    assert len({job.turns[0].prompt[0] for job in documents}) == 40
    long = long_prompt_jobs(range(100), 1)
    assert count_shared_tokens(long[0].turns[0].prompt, long[1].turns[0].prompt) == 0
    assert all(15_000 <= job.turns[0].num_prompt_tokens <= 30_000 for job in long)


def test_people_call_no_tool_and_agents_do() -> None:
    assert not any(turn.tool for job in chat_jobs(range(50), 1) for turn in job.turns)
    waits_s = [turn.tool_s for job in chat_jobs(range(400), 1) for turn in job.turns[:-1]]
    assert statistics.median(waits_s) == pytest.approx(43, rel=0.15)
    assert all(turn.tool == "tool" for job in geometric_jobs(range(50), 1) for turn in job.turns[:-1])


def test_few_giants_have_most_of_the_work() -> None:
    jobs = giant_jobs(range(2000), 1)
    work = {job.job_id: sum(turn.num_prompt_tokens for turn in job.turns) for job in jobs}
    giants = [job_id for job_id in work if job_id.startswith("giant")]
    assert 0.025 < len(giants) / len(jobs) < 0.055
    assert sum(work[job_id] for job_id in giants) > 0.9 * sum(work.values())


def test_coding_sessions_are_as_long_as_the_public_ones() -> None:
    jobs = coding_jobs(range(300), 1)
    turns = [turn for job in jobs for turn in job.turns]
    assert statistics.median(len(job.turns) for job in jobs) == pytest.approx(29, rel=0.15)
    assert statistics.fmean(turn.num_output_tokens for turn in turns) == pytest.approx(413, rel=0.1)
    assert statistics.median(job.turns[0].num_prompt_tokens for job in jobs) == pytest.approx(
        20_195, rel=0.15
    )
    assert statistics.median(t.tool_s for j in jobs for t in j.turns[:-1]) == pytest.approx(9.0, rel=0.15)


def test_a_mix_keeps_its_shares_and_the_order_of_arrival() -> None:
    jobs = agents_and_probes_jobs([0.5 * n for n in range(1000)], 1)
    probes = [job for job in jobs if job.job_id.startswith("probe")]
    assert 430 < len(probes) < 570
    assert [job.arrival_s for job in jobs] == [0.5 * n for n in range(1000)]
    assert mix("none", [(1.0, document_jobs)], [], 1) == []


def test_a_shift_comes_in_the_middle() -> None:
    names = [job.job_id.rpartition("-")[0] for job in shift_jobs(range(10), 1)]
    assert names == ["swe-bench"] * 5 + ["bfcl"] * 5

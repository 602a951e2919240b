"""The attacks: what they send, that the bound holds under two of them, and how outcomes are shown."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest

from experiments.attacks import live
from experiments.attacks.__main__ import UNBOUNDED, measure
from experiments.attacks.options import add_options, get_attacks, get_scene
from experiments.attacks.plans import (
    ATTACKS,
    START_TOKENS,
    YEAR_S,
    Attack,
    Scene,
    is_agent,
    is_probe,
    make_say,
    make_workload,
)
from experiments.attacks.table import HEAD, Outcome, show
from tenuto.core.stock_queue import AGENTS_LIMIT
from tenuto.records.schema import TurnRecord
from tenuto.workload.schema import Span

SMALL = Scene(window_s=20.0)
WARM = Scene(window_s=40.0)
"""Long enough for the policy to learn which jobs come back."""


def test_one_id_of_a_hoard_comes_back_once_with_all_of_its_text() -> None:
    attack = ATTACKS["hoard"]
    workload, say = make_workload(attack, SMALL), make_say(attack)
    streams = [job for job in workload.jobs if job.job_id.startswith("attack")]
    ids = {say(job, index).job_id for job in streams for index in range(len(job.turns))}
    assert len(ids) == 1000
    first, second, third = streams[0].turns[:3]
    assert second.prompt[: len(first.prompt)] == first.prompt
    assert first.prompt[0] not in third.prompt
    assert say(streams[0], 0).job_id == say(streams[0], 1).job_id != say(streams[0], 2).job_id


def test_who_says_what() -> None:
    say = make_say(ATTACKS["year"])
    jobs = {job.job_id.split("-")[0]: job for job in make_workload(ATTACKS["year"], SMALL).jobs}
    assert say(jobs["attack"], 0).expected_tool_s == YEAR_S
    assert say(jobs["probe"], 0).job_id is None
    assert [say(jobs["ab8"], index).is_last for index in (0, 7)] == [False, True]
    shared = make_say(ATTACKS["busy"])
    busy = [job for job in make_workload(ATTACKS["busy"], SMALL).jobs if job.job_id.startswith("attack")]
    assert len({shared(job, 0).job_id for job in busy}) == 4


def test_a_seed_moves_arrivals_and_the_scene_scales_sizes() -> None:
    even, moved = (make_workload(Attack(), replace(SMALL, seed=seed)) for seed in (0, 7))
    assert [job.arrival_s for job in even.jobs] != [job.arrival_s for job in moved.jobs]
    assert make_workload(Attack(), replace(SMALL, seed=7)) == moved
    small = make_workload(ATTACKS["busy"], replace(SMALL, lengths=0.1, strength=0.5))
    streams = [job for job in small.jobs if job.job_id.startswith("attack")]
    assert (len(streams), streams[0].turns[0].num_prompt_tokens) == (16, 150)
    silent = make_workload(ATTACKS["busy"], replace(SMALL, no_calls=True)).jobs
    tools = {is_agent(job.job_id): {turn.tool for turn in job.turns[:-1]} for job in silent if job.turns[1:]}
    assert tools[False] == {None} and None not in tools[True]
    alike = make_workload(ATTACKS["busy"], replace(SMALL, same_start=True, lengths=0.1)).jobs
    starts = {
        job.turns[0].prompt[0] for job in alike if not is_probe(job.job_id) and not is_agent(job.job_id)
    }
    assert starts == {Span("start", START_TOKENS)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_seeds", "most_late"), [("busy", 1, 0), ("fresh", 1, 0), ("hoard", 16, 2)]
)
def test_nobody_waits_longer_than_in_stock(name: str, num_seeds: int, most_late: int) -> None:
    """By more than a tenth and one turn of service. Agents keep nine tenths of their hits.

    Under a hoard a single early start changes all that follows, so a new agent is late with some seeds.
    """
    attack = replace(ATTACKS[name], num_turns=24)
    num_late = 0
    for seed in range(num_seeds):
        scene = replace(WARM, seed=seed)
        stock, bounded = (measure(name, attack, policy, scene) for policy in ("stock", "tenuto"))
        assert bounded.worst_s <= 1.1 * stock.worst_s + stock.turn_s
        # Nor do plain requests of several steps, and agents that are new.
        assert bounded.long_s <= 1.1 * stock.long_s + stock.turn_s
        allowed_s = 1.1 * stock.new_s + stock.turn_s
        num_late += bounded.new_s > allowed_s
        assert bounded.new_s <= AGENTS_LIMIT * allowed_s
        # The ids of a hoard come back once, so it takes longer to tell them from agents.
        assert bounded.hits >= (0.85 if name == "hoard" else 0.9)
        assert bounded.job_s <= stock.job_s
    assert num_late <= most_late
    if name == "busy":
        # `tenuto` puts such probes first by itself; an order by jobs does not.
        assert measure(name, attack, "continuum", WARM, UNBOUNDED).worst_s > 2 * stock.worst_s
        assert measure(name, attack, "continuum", WARM).worst_s <= 1.1 * stock.worst_s + stock.turn_s


@pytest.mark.slow
@pytest.mark.parametrize("same_start", [False, True])
@pytest.mark.parametrize("name", ["busy", "constant"])
def test_plain_requests_of_several_steps_do_not_wait_for_ids_of_very_many_turns(
    name: str, same_start: bool
) -> None:
    """The ids of an attack that calls no tool look like conversations that never end."""
    scene = replace(WARM, no_calls=True, same_start=same_start)
    stock, bounded = (measure(name, ATTACKS[name], policy, scene) for policy in ("stock", "tenuto"))
    assert bounded.long_s <= 1.1 * stock.long_s + stock.turn_s
    assert bounded.hits >= 0.9


@pytest.mark.slow
def test_with_host_memory_agents_are_not_crowded_out() -> None:
    attack = replace(ATTACKS["hoard"], num_turns=24)
    stock, tenuto = (measure("hoard", attack, policy, WARM, host_gb=5) for policy in ("stock", "tenuto"))
    assert tenuto.worst_s <= 1.1 * stock.worst_s + stock.turn_s
    # Large steps serve the hoard faster, which then fills both memories faster. Agents still finish first.
    assert tenuto.hits >= 0.7 > stock.hits
    assert tenuto.job_s <= 0.5 * stock.job_s


def test_the_table_and_the_json_have_the_same_figures() -> None:
    outcomes = [
        Outcome(attack, policy, 0.5, 0.9, worst_s, 3.0, 4.0, hits, 3.0, 0.2, 40.0)
        for attack, policy, worst_s, hits in (
            ("none", "stock", 0.0, 1.0), ("none", "tenuto", 0.1, 1.0),
            ("busy", "stock", 2.0, 0.1), ("busy", "tenuto", 1.0, 0.9),
        )
    ]  # fmt: skip
    lines = [json.loads(line) for line in show(outcomes, as_json=True)]
    assert [line["worst_beside_stock"] for line in lines] == [None, None, 1.0, 0.5]
    assert [line["hits_kept"] for line in lines] == [1.0, 1.0, 0.1, 0.9]
    head, *rows = show(outcomes, as_json=False)
    assert head == HEAD
    assert "| 0.50 | 3.00 s, 1.00 | 4.00 s, 1.00 | 90% | 90% |" in rows[-1]


def test_options_are_the_numbers_of_the_scene() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, Scene())
    assert get_scene(parser.parse_args([])) == Scene()
    parsed = parser.parse_args(["--kv-tokens", "5000", "--seed", "3", "--attacks", "busy,long"])
    assert get_scene(parsed) == Scene(kv_tokens=5000, seed=3)
    assert get_scene(parser.parse_args(["--no-calls"])) == Scene(no_calls=True)
    assert get_scene(parser.parse_args(["--same-start"])) == Scene(same_start=True)
    assert list(get_attacks(parsed)) == ["busy", "long"]
    with pytest.raises(SystemExit, match="unknown x; there are none, busy"):
        get_attacks(parser.parse_args(["--attacks", "x"]))


def test_live_a_probe_without_an_answer_counts_with_the_time_it_waited() -> None:
    def make_turn(job: str, sent_s: float, first_s: float | None, hit: int | None = None) -> TurnRecord:
        answered = first_s is not None
        return TurnRecord(
            job=job,
            turn=1,
            status="ok" if answered else "cancelled",
            due_s=sent_s,
            sent_s=sent_s,
            first_token_s=first_s,
            last_token_s=first_s + 1.0 if answered else None,
            hit_tokens=hit,
            reusable_tokens=None if hit is None else 100,
        )

    records = [
        make_turn("probe-0", 1.0, 3.0),
        make_turn("probe-1", 5.0, None),
        make_turn("ab8-0", 0.0, 1.0, hit=40),
        make_turn("ab8-1", 0.0, 2.0, hit=80),
        make_turn("attack-0~0", 0.0, None),
    ]
    found = live.measure("busy", "tenuto", records, limit_s=30.0)
    assert (found.worst_s, found.hits, found.job_s, found.turn_s) == (25.0, 0.6, 2.5, 1.0)
    assert (found.num_failed, found.num_unfinished) == (0, 2)

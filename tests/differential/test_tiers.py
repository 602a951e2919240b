"""Host memory: our engine decides what vLLM's scheduler and connector do, also where layers differ.

Compared after every step: what `test_scheduler` compares, and which blocks of which layer groups host memory
holds. Copies take less than a step on both sides.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.differential.cases import CASES, LARGE, STOCK, TIERS, WITH_HOST, Case
from tests.differential.compare import STEP_S, compare, make_sides, step
from tests.differential.setups import Setup
from tests.differential.sides import Decision, Names, Turn

MORE_SEEDS = {
    "drafts": (89, 402970),
    "1:5": (509105,),
    "1:5, interval": (52974,),
    "1:5, small host": (323365,),
    "windows only": (774005,),
    "unlike blocks": (830932,),
    "states, small host": (445817,),
    "native, full, drafts": (512040,),
    "native, full, small host, preemptions": (166664,),
    "native, states, small host": (567712,),
    "native, 1:1, dense, small host": (92449,),
}
"""Workloads that once went another way than in vLLM. All cases have the seeds 1 and 2."""


@pytest.mark.parametrize("name", TIERS)
def test_same_decisions_as_the_connector(name: str) -> None:
    seeds = (1, 2, *MORE_SEEDS.get(name, ()))
    steps = [step for seed in seeds for step in compare(CASES[f"tiers/{name}/1"], seed)]
    assert any(step.loading for step in steps)


@pytest.mark.parametrize(
    "name",
    [
        *("full, small host", "native, full, small host", "native, full, drafts"),
        *("1:5, small host", "states, small host", "native, unlike blocks, small host"),
    ],
)
def test_same_decisions_after_aborts(name: str) -> None:
    steps = [step for seed in (1, 2, 3) for step in compare(CASES[f"aborts/{name}/1"], seed)]
    assert any(step.loading for step in steps)


def play(setup: Setup, turns: dict[int, list[Turn]], policy: str = STOCK) -> list[Decision]:
    """Give both engines these turns, each before its step; all but the first find an empty cache."""
    decisions: list[Decision] = []
    case = Case(setup, WITH_HOST, None if setup.is_native else policy)
    with make_sides(case) as (theirs, ours):
        names = Names(theirs.scheduler.hash_block_size)
        for number in range(max(turns) + 12):
            theirs.set_time(number * STEP_S)
            ours.now_s = number * STEP_S
            if number and number in turns:
                assert theirs.reset(preempt_running=False) == ours.reset(preempt_running=False)
            for turn in turns.get(number, []):
                names.pair(theirs.add(turn), ours.add(turn))
            decisions.append(step(theirs, ours, names))
    return decisions


PROMPT = (("p", 64),)
"""Whole blocks, so that all of it is loaded."""


@pytest.mark.parametrize("is_native", [False, True])
def test_a_turn_that_loads_its_whole_prompt_gets_drafts_at_once(is_native: bool) -> None:
    setup = Setup(num_blocks=60, num_host_chunks=LARGE, is_native=is_native, num_draft_tokens=3)
    turns = {0: [Turn("first", PROMPT, ("o1", 2))], 6: [Turn("again", PROMPT, ("o2", 20))]}
    assert play(setup, turns)[7].num_drafts == {"again": 3}


def test_a_turn_that_loads_its_whole_prompt_leaves_the_watermark_free() -> None:
    setup = Setup(num_blocks=60, num_host_chunks=LARGE, watermark=0.5, max_num_batched_tokens=512)
    long = Turn("long", (("q", 480),), ("o3", 3))
    turns = {0: [Turn("first", PROMPT, ("o1", 2))], 6: [Turn("again", PROMPT, ("o2", 2)), long]}
    decisions = play(setup, turns)
    assert [step for step, each in enumerate(decisions) if each.started] == [0, 6, 9]


def test_with_priorities_loaded_turns_start_in_the_order_of_arrival_whatever_the_policy_says() -> None:
    def make_turns(step: int) -> list[Turn]:
        long = Turn(f"long{step}", PROMPT, ("o1", 2), 1.0, xargs={"job_id": "long"})
        return [long, Turn(f"short{step}", (("q", 48),), ("o2", 2), 2.0, xargs={"job_id": "short"})]

    setup = Setup(num_blocks=60, num_host_chunks=LARGE, order="priority", max_num_seqs=1)
    decisions = play(setup, {0: make_turns(0), 8: make_turns(8)}, "tests.vllm.policies:ShortestFirst")
    assert any(len(each.loading) == 2 for each in decisions)
    assert [turn_id for each in decisions for turn_id, _ in each.started] == [
        "short0",
        "long0",
        "long8",
        "short8",
    ]

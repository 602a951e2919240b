"""One run has one set of numbers, whoever counts: vLLM, the simulator, the bench, and the driver in each."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tenuto.core.engine import StepTokens
from tenuto.records.files import RunFiles
from tenuto.records.metrics import get_job_times_s, summarise
from tenuto.records.schema import TurnRecord
from tenuto.report.analyze import analyze
from tenuto.sim.cost.batch import StepBatch, StepCost
from tenuto.workload import Workload
from tests.agreement.engines import BLOCK_SIZE, Sizes, make_simulation, run_bench, run_vllm, serve_simulated
from tests.agreement.workloads import make_busy, make_crowd, make_serial
from tests.client.conftest import read_lines
from tests.vllm.conftest import Clock, clock  # noqa: F401

SIZES = Sizes(num_blocks=41)


def by_turn(turns: Iterable[TurnRecord], name: str) -> dict[tuple[str, int], Any]:
    return {(turn.job, turn.turn - 1): getattr(turn, name) for turn in turns}


@pytest.mark.parametrize("make", [make_serial, make_crowd])
@pytest.mark.parametrize("num_blocks", [41, 61])
def test_vllm_and_the_simulator_agree(make: Any, num_blocks: int, clock: Clock) -> None:  # noqa: F811
    workload, sizes = make(), Sizes(num_blocks=num_blocks)
    real = run_vllm(workload, sizes, clock)
    simulation = make_simulation(workload, sizes)
    turns = simulation.run()
    assert by_turn(turns, "last_token_s") == real.finish_s
    assert by_turn(turns, "hit_tokens") == real.hit_tokens
    preempted = {key: count for key, count in by_turn(turns, "preemptions").items() if count}
    assert preempted == real.preemptions
    assert bool(preempted) == (make is make_crowd)
    # vLLM's own counters leave out what preempted turns hit when they are back, as the hits of a turn do.
    assert real.num_hits == sum(real.hit_tokens.values()) == real.stats.num_hit_tokens
    recomputed = sum(turn.recomputed_tokens or 0 for turn in turns)
    assert (
        recomputed
        == real.stats.num_recomputed_tokens
        == simulation.scheduler.driver.stats.num_recomputed_tokens
    )
    assert recomputed > 0 or num_blocks == 61


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("policy", ["continuum", "tenuto"])
def test_vllm_and_the_simulator_agree_under_a_policy(policy: str, reads: bool, clock: Clock) -> None:  # noqa: F811
    """Turns one after the other: what a policy retains is the same in both engines."""
    workload, sizes = make_serial(), Sizes(num_blocks=41, policy=policy, read_tool_calls=reads)
    real = run_vllm(workload, sizes, clock)
    simulation = make_simulation(workload, sizes)
    turns = simulation.run()
    stats = simulation.scheduler.driver.stats
    assert by_turn(turns, "last_token_s") == real.finish_s
    assert by_turn(turns, "hit_tokens") == real.hit_tokens
    assert stats.num_recomputed_tokens == real.stats.num_recomputed_tokens
    assert stats.num_leases_granted == real.stats.num_leases_granted
    # Continuum retains nothing where no tool is named.
    assert bool(stats.num_leases_granted) == (policy == "tenuto")


class Mixed(StepCost):
    """Step times of a slow engine, in which the step size matters."""

    def seconds(self, batch: StepBatch) -> float:
        num_decodes, num_tokens = batch.num_decodes, batch.num_prefill_tokens
        return (
            0.03 * bool(num_decodes + num_tokens)
            + 0.0012 * num_tokens
            + 1e-7 * batch.num_prefill_pairs
            + 0.003 * num_decodes
        )


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize(("policy", "size"), [("stock", "adaptive"), ("tenuto", "adaptive"), ("stock", 256)])
def test_vllm_and_the_simulator_take_steps_of_the_same_size(
    policy: str,
    size: StepTokens,
    reads: bool,
    clock: Clock,  # noqa: F811
) -> None:
    """The chooser learns from the steps of each engine, and chooses the same."""
    sizes = Sizes(
        num_blocks=2001,
        max_num_batched_tokens=2048,
        policy=policy,
        step_tokens=size,
        read_tool_calls=reads,
    )
    real = run_vllm(make_busy(), sizes, clock, cost=Mixed())
    turns = make_simulation(make_busy(), sizes, cost=Mixed()).run()
    assert by_turn(turns, "last_token_s") == pytest.approx(real.finish_s)
    most = max(real.step_tokens)
    if size == 256:
        assert most == 256
    else:
        assert most > 256
        whole = Sizes(num_blocks=2001, max_num_batched_tokens=2048, policy=policy, step_tokens=2048)
        assert real.step_tokens != run_vllm(make_busy(), whole, clock, cost=Mixed()).step_tokens


def test_the_bench_sees_what_vllm_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,  # noqa: F811
) -> None:
    workload = make_serial()
    real = run_vllm(workload, SIZES, clock)
    with serve_simulated(SIZES) as live:
        bench = run_bench(workload, live, tmp_path, RunFiles, monkeypatch)
        served = live.call(lambda: live.engine.scheduler.driver.stats)
        live.wait_until_idle()
    lines = read_lines(tmp_path / "turns.jsonl")
    assert {(line["job"], line["turn"] - 1): line["hit_tokens"] for line in lines} == real.hit_tokens
    assert bench.result["hit_tokens"] == real.num_hits == served.num_hit_tokens
    assert (
        bench.result["recomputed_tokens"] == real.stats.num_recomputed_tokens == served.num_recomputed_tokens
    )
    assert bench.result["recomputed_tokens"] > 0
    assert bench.result["preemptions"] == 0
    assert all(line["reusable_tokens"] % BLOCK_SIZE == 0 for line in lines)


@pytest.mark.parametrize("make", [make_serial, make_crowd])
def test_a_trace_read_back_says_the_same(make: Any, tmp_path: Path, clock: Clock) -> None:  # noqa: F811
    """The report of vLLM's trace, beside the records of the simulator's turns."""
    real = run_vllm(make(), SIZES, clock, tmp_path / "trace.jsonl")
    turns = make_simulation(make(), SIZES).run()
    report = analyze(tmp_path / "trace.jsonl")
    times_s = summarise(get_job_times_s(turns).values())
    assert times_s is not None
    for name in ("mean", "p50", "p90", "p95", "p99"):
        assert report["job_s"][name] == pytest.approx(getattr(times_s, name)), name
    assert report["tokens"]["hit"] == real.num_hits
    assert report["tokens"]["reusable"] == sum(turn.reusable_tokens or 0 for turn in turns)
    assert report["preemptions"] == sum(real.preemptions.values())


def test_the_comparison_can_fail(clock: Clock) -> None:  # noqa: F811
    """Another cache gives other hits: the workloads are tight enough to tell engines apart."""
    hits = [run_vllm(make_serial(), Sizes(num_blocks=size), clock).hit_tokens for size in (41, 51)]
    assert hits[0] != hits[1]


def test_a_serial_workload_never_has_two_turns_at_once() -> None:
    workload: Workload = make_serial()
    turns = sorted(make_simulation(workload, SIZES).run(), key=lambda turn: turn.due_s)
    assert all(before.last_token_s <= after.due_s for before, after in pairwise(turns))

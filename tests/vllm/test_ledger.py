"""Inside vLLM the ledger's sums are vLLM's own: tokens scheduled, hit, loaded and stored, and chunks held."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", "0.31.0")

import tenuto.vllm
from tenuto.core.ledger import add_figures
from tenuto.vllm.tiers.files import HEADER
from tests.vllm.conftest import Clock
from tests.vllm.slow_copies import SlowCopies
from tests.vllm.test_control import change
from tests.vllm.test_tiers import begin_job, run_turns
from tests.vllm.tiered import BLOCK_SIZE, TieredEngine
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler


@pytest.mark.parametrize("policy", ["stock", "tenuto", "infercept"])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_sums_are_vllm_s(policy: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TieredEngine(num_blocks=41, num_chunks=60, tenuto={"policy": policy}, depth=depth)
    scheduler = engine.scheduler
    num_scheduled, num_prompt, schedule = [0], [0], scheduler.schedule

    def count(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        num_scheduled[0] += output.total_num_scheduled_tokens
        num_prompt[0] += sum(len(new.prompt_token_ids) for new in output.scheduled_new_reqs)
        return output

    monkeypatch.setattr(scheduler, "schedule", count)
    run_turns(engine, 6, 3)
    engine.drain()
    ledger = scheduler.driver.ledger
    total = ledger.total.get_figures(time.monotonic())
    assert total["turns"] == 18
    assert total["prompt_tokens"] == num_prompt[0]
    assert total["cached_tokens"] == sum(hits for hits, _ in engine.hits.values())
    assert total["loaded_tokens"] == sum(loaded for _, loaded in engine.hits.values())
    assert total["loaded_tokens"] > 0 or policy == "infercept"  # it stores what it swaps out only
    assert total["output_tokens"] == sum(map(len, engine.outputs.values()))
    assert total["recomputed_tokens"] == scheduler.driver.stats.num_recomputed_tokens
    # With two steps in flight a step is scheduled before the end of the one before is known.
    assert total["computed_tokens"] == num_scheduled[0] or depth == 2
    host = engine.host
    assert total["stored_tokens"] == BLOCK_SIZE * (
        host.count_chunks()[1] + host.num_evicted + host.num_dropped
    )
    assert ledger.total.count_held("host") == host.count_chunks()[1]
    assert (total["host_block_seconds"] > 0) is (total["stored_tokens"] > 0)
    assert add_figures(each.get_figures(1e9) for each in ledger.tenants.values()) == pytest.approx(
        ledger.total.get_figures(1e9)
    )
    engine.assert_clean()


@pytest.mark.parametrize(
    "modes", [("on", "on"), ("off", "off"), ("shadow", "shadow"), ("on", "off"), ("off", "on")]
)
def test_what_is_stored_after_a_turn_s_end_is_its_job_s(modes: tuple[str, str]) -> None:
    """Stores wait for a load, so the turn ends before its KV is stored; an operator may change the mode."""
    settings = {"policy": "stock", "mode": modes[0], "tenants": "client"}
    engine = TieredEngine(tenuto=settings, copies=SlowCopies(random.Random(0)))
    driver = engine.scheduler.driver
    begin_job(engine, "load", [7] * 160, tenant="a", tool="ls")
    engine.drain()
    engine.scheduler.reset_prefix_cache()
    engine.copies.share_done = 0.0
    begin_job(engine, "load", [7] * 160, tenant="a", tool="ls")
    begin_job(engine, "late", [8] * 160, tenant="b", tool="ls")
    while "late" in engine.scheduler.requests:
        engine.step()
    before, account = driver.ledger.total.stored, driver.get_account("b\tlate")
    assert account is not None and account.stored == 0
    change(engine, mode=modes[1])
    engine.step()
    assert account.stored == driver.ledger.tenants["b"].stored == 179 // BLOCK_SIZE * BLOCK_SIZE
    assert driver.ledger.total.stored == before + account.stored
    assert account.count_held("host") == 179 // BLOCK_SIZE
    engine.copies.share_done = 1.0
    engine.drain()
    assert driver.ledger.total.count_held("host") == engine.host.count_chunks()[1]
    engine.assert_clean()


def test_the_disk_s_sums_are_its_files(tmp_path: Path) -> None:
    """While jobs store, load, and make room for each other, and when a reset gives all of it up."""
    disk = {"folder": str(tmp_path), "max_bytes": 50 * (HEADER.size + 4096)}
    engine = TieredEngine(num_blocks=41, num_chunks=20, tenuto={"policy": "stock"}, disk=disk)
    ledger = engine.scheduler.driver.ledger
    for _ in range(2):
        run_turns(engine, 6, 3)
        engine.drain()
        folder = engine.disk.get_path(b"x").parents[1]  # what a reset gave up is removed beside it
        # A slow disk takes fewer than it has room for.
        assert 0 < ledger.total.count_held("disk") == len(list(folder.rglob("*.kv"))) <= 50
        assert ledger.total.count_held("host") == engine.host.count_chunks()[1] == 20
        tenants = add_figures(each.get_figures(1e9) for each in ledger.tenants.values())
        assert tenants == pytest.approx(ledger.total.get_figures(1e9))
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert ledger.total.count_held("disk") == ledger.total.count_held("host") == 0
    assert ledger.total.get_figures(time.monotonic())["disk_block_seconds"] > 0
    engine.shutdown()


def test_kv_on_the_disk_is_charged_to_the_job_that_used_it_last(tmp_path: Path, clock: Clock) -> None:
    """Chunks of two blocks: what another job shares of the prompt is its own from its end on."""
    engine = TieredEngine(
        num_blocks=41,
        num_chunks=20,
        blocks_per_chunk=2,
        tenuto={"policy": "stock"},
        disk={"folder": str(tmp_path)},
    )
    driver, accounts = engine.scheduler.driver, {}
    for job, prompt in (("a", [7] * 160), ("b", [7] * 64 + [8] * 96)):
        begin_job(engine, job, prompt)
        accounts[job] = driver.get_account(job)
        engine.drain()
        clock.now_s += 10.0
    assert [each.count_held("disk") for each in accounts.values()] == [6, 10]
    charged = [each.get_figures(clock.now_s)["disk_block_seconds"] for each in accounts.values()]
    assert charged == [10 * 10.0 + 6 * 10.0, 10 * 10.0]
    engine.shutdown()


@pytest.mark.parametrize("end", ["said before", "said after", "left early"])
def test_a_prompt_that_is_streamed_in_is_counted_in_full(end: str) -> None:
    """Answers before the last count as prompt, as in vLLM. The client says that it ends, or leaves."""
    config = make_config(tenuto={"policy": "tenuto"})
    engine = Engine(make_scheduler(tenuto.vllm.Scheduler, config))
    prompts = [[7] * 100, [8] * 50, [9] * 30]
    num_computed = 0
    for number, prompt in enumerate(prompts):
        request = make_request("talk", prompt, max_tokens=4, xargs={"job_id": "talk"})
        request.resumable = True
        engine.scheduler.add_request(request)
        if number == 2 and end == "said before":
            engine.scheduler.add_request(make_request("talk", [1]))
        for _ in range(2 if number == 2 and end == "left early" else 8):
            num_computed += engine.step().total_num_scheduled_tokens
    account = engine.scheduler.driver.ledger.total
    if end == "said after":
        engine.scheduler.add_request(make_request("talk", [1]))
    elif end == "left early":
        engine.abort("talk")
    assert not engine.scheduler.requests
    engine.run()
    figures = account.get_figures(0.0)
    # Of each answer before the last, the last token is not computed, and vLLM drops it.
    assert figures["prompt_tokens"] == 100 + 3 + 50 + 3 + 30
    assert figures["computed_tokens"] == num_computed
    assert figures["output_tokens"] == (2 if end == "left early" else 4)
    assert figures["turns"] == 1


def test_a_turn_that_is_aborted_pays_for_what_it_computed() -> None:
    engine = TieredEngine(
        num_blocks=41, num_chunks=60, tenuto={"policy": "tenuto"}, max_num_batched_tokens=64
    )
    begin_job(engine, "gone", [7] * 300)
    engine.add(make_request("other", [8] * 20, max_tokens=1))
    for _ in range(2):
        engine.step()
    num_computed = engine.scheduler.requests["gone"].num_computed_tokens
    assert 0 < num_computed < 300
    account = engine.scheduler.driver.get_account("gone")
    engine.abort("gone")
    engine.drain()
    assert account is not None
    assert account.get_figures(0.0)["computed_tokens"] == num_computed
    assert account.get_figures(0.0)["output_tokens"] == 0

"""Inside vLLM the ledger's sums are vLLM's own: tokens scheduled, hit, loaded and stored, and chunks held."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("vllm")

from tenuto.core.ledger import add_figures
from tests.vllm.test_tiers import begin_job, run_turns
from tests.vllm.tiered import BLOCK_SIZE, TieredEngine
from tests.vllm.workerless import make_request


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

"""Presets: settings of the engine and nothing else; what those of stock-tuned bring, and what they cost."""

from __future__ import annotations

import pytest

from tenuto.core.loader import PRESETS, get_engine_settings, get_policy_names, load_policy
from tenuto.core.policy import EngineSettings
from tenuto.sim.machine import build
from tenuto.sim.run import run
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions
from tenuto.workload.schema import Job
from tests.policies.simulated import PrefillSteps, get_ends_s, make_job, simulate


def test_a_preset_is_a_policy_that_is_there_under_a_name_that_is_free() -> None:
    for name, preset in PRESETS.items():
        assert name not in get_policy_names()
        assert type(load_policy(name)) is type(load_policy(preset.policy))
        assert get_engine_settings(name, load_policy(name)) == preset.engine != EngineSettings()
        assert preset.help.endswith(".") and preset.source


def test_a_policy_s_own_settings_are_not_the_preset_s() -> None:
    assert get_engine_settings("autellix", load_policy("autellix")) == EngineSettings()
    assert get_engine_settings("tenuto", load_policy("tenuto")).offload == "async"


def test_a_preset_s_options_yield_to_the_user_s() -> None:
    assert load_policy("continuum-prototype").tools == "shown"  # type: ignore[attr-defined]
    assert load_policy("continuum-prototype", {"tools": "named"}).tools == "named"  # type: ignore[attr-defined]
    config = build(Setup(gpu="H100", policy="continuum-prototype", step_cost="roofline")).config
    assert (config.scheduler, config.kv.reserve_full_sequence) == ("continuum-fork", False)


def test_the_prototype_pins_nothing_in_the_workload_of_its_sweeps() -> None:
    leases: list[int] = []
    run(
        Setup(gpu="H100", policy="continuum-prototype", step_cost="roofline"),
        LoadOptions(jps=1, window_s=4),
        watch=lambda now_s, scheduler: leases.append(scheduler.kv.pool.num_leased_blocks),
    )
    assert leases and not any(leases)


def test_what_lmcache_costs_on_pcie_gen4_is_said_to_be_too_little() -> None:
    for gpu, is_said in (("A100-40", True), ("L40S", True), ("H100", False)):
        notes = build(Setup(gpu=gpu, policy="offload-sync", step_cost="roofline")).notes
        assert any("too fast on PCIe Gen4" in note for note in notes) == is_said


def test_the_record_names_the_preset() -> None:
    setup = Setup(gpu="H100", policy="priority", step_cost="roofline")
    record = run(setup, LoadOptions(jps=0.5, window_s=4)).record
    assert (record["policy"], build(setup).config.order) == ("priority", "priority")


@pytest.mark.slow
def test_its_settings_reach_the_engine_and_yield_to_the_user_s() -> None:
    config = build(Setup(gpu="H200", policy="stock-tuned")).config
    assert (config.long_prefill_token_threshold, config.kv.watermark, config.offload) == (512, 0.01, "async")
    given = Setup(
        gpu="H200", policy="stock-tuned", long_prefill_token_threshold=64, watermark=0.1, offload="none"
    )
    config = build(given).config
    assert (config.long_prefill_token_threshold, config.kv.watermark, config.offload) == (64, 0.1, None)


@pytest.mark.parametrize("name", get_policy_names())
def test_offloading_goes_with_any_policy(name: str) -> None:
    jobs = [make_job(f"job-{number}", [4] * 3, prompt=40) for number in range(6)]
    records = simulate(name, jobs, num_blocks=60, host_blocks=400, cost=PrefillSteps())
    assert len(records) == 18


def get_ends_with_cap(jobs: list[Job], threshold: int) -> list[float]:
    records = simulate("stock", jobs, threshold=threshold, num_blocks=3000, cost=PrefillSteps())
    return list(get_ends_s(records).values())


def test_the_cap_lets_a_short_prompt_pass_a_long_one() -> None:
    jobs = [make_job("long", [2], prompt=3000), make_job("short", [1], arrival_s=0.5, prompt=100)]
    # The first step has 2,048 tokens of the long prompt, alone: 21.48 s. Without a cap the second has its
    # other 952 and all of the short one: 11.52 s, then a second to decode. With the cap it has 512 + 100
    # tokens, 7.12 s, and a third the other 440, 5.4 s.
    assert get_ends_with_cap(jobs, 0) == pytest.approx([21.48 + 11.52 + 1, 21.48 + 11.52])
    assert get_ends_with_cap(jobs, 512) == pytest.approx([21.48 + 7.12 + 5.4 + 1, 21.48 + 7.12])


def test_weakness_the_cap_is_a_prompt_s_and_not_the_step_s() -> None:
    """Four long prompts fill each step as before, but now none of them is done early."""
    jobs = [make_job(f"job-{number}", [2], prompt=2000) for number in range(4)]
    uncapped, capped = get_ends_with_cap(jobs, 0), get_ends_with_cap(jobs, 512)
    # Three steps of 4 x 512 tokens, one of 4 x 464, and one to decode.
    assert capped == pytest.approx([3 * 21.48 + 19.56 + 1] * 4)
    assert max(uncapped) == pytest.approx(max(capped), abs=2)
    assert uncapped[0] < 43
    assert sum(capped) > 1.2 * sum(uncapped)

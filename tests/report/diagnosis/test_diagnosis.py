"""The shapes of the published sweeps are recognised, the healthy cells beside them are not."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.report.diagnosis import STORM, Evidence, diagnose


def make_evidence(latency_s: dict[int, float], **facts: Any) -> Evidence:
    return Evidence(
        **{"latency_s": latency_s, "last_turn": max(latency_s), "num_turns": 8 * len(latency_s), **facts}
    )


def get_modes(evidence: Evidence) -> list[str]:
    return [finding.mode for finding in diagnose(evidence)]


# Mean turn latencies, seconds: Llama-3.1-8B on one H200, jobs of 8 turns; only these turns were published.
PUBLISHED = [
    ("stock", 3, {1: 1.461, 8: 3.118}, []),
    ("continuum-fixed", 3, {1: 0.933, 8: 2.307}, []),
    ("offload-sync", 3, {1: 1.190, 8: 2.737}, []),
    ("stock", 6, {1: 6.804, 8: 30.812}, ["linear growth"]),
    ("continuum-fixed", 6, {1: 17.877, 8: 4.878}, ["turn-2 explosion"]),
    ("offload-sync", 6, {1: 3.655, 8: 7.538}, []),
    ("stock", 15, {1: 21.347, 8: 133.549}, ["linear growth"]),
    ("continuum-fixed", 15, {1: 27.922, 2: 110.600, 8: 5.225}, ["turn-2 explosion"]),
    ("offload-sync", 15, {1: 13.851, 8: 144.112}, ["link collapse"]),
]


@pytest.mark.parametrize(("policy", "jps", "latency_s", "modes"), PUBLISHED)
def test_published_cells(policy: str, jps: int, latency_s: dict[int, float], modes: list[str]) -> None:
    moved = 10**8 if policy == "offload-sync" else 0
    assert get_modes(make_evidence(latency_s, policy=policy, num_moved_tokens=moved)) == modes


# All eight turns, from our own simulation of the same machine.
SIMULATED = [
    ("stock", [1.044, 2.502, 2.716, 2.798, 2.829, 2.862, 2.782, 2.597], []),
    ("continuum-fixed", [1.113, 2.477, 2.716, 2.829, 2.852, 2.879, 2.793, 2.616], []),
    ("stock", [6.005, 10.973, 15.244, 20.132, 24.465, 27.534, 28.420, 25.608], ["linear growth"]),
    ("continuum-fixed", [9.788, 10.179, 4.528, 5.063, 4.486, 4.642, 4.245, 3.683], ["turn-2 explosion"]),
    ("tenuto", [88.15, 22.77, 2.09, 1.94, 1.67, 1.90, 1.69, 1.46], ["waiting for admission"]),
    ("stock", [21.309, 35.688, 54.414, 75.317, 94.573, 112.447, 126.244, 120.847], ["linear growth"]),
    ("continuum-fixed", [18.264, 77.050, 8.017, 7.909, 5.062, 4.915, 4.382, 4.306], ["turn-2 explosion"]),
]


@pytest.mark.parametrize(("policy", "latencies", "modes"), SIMULATED)
def test_simulated_cells(policy: str, latencies: list[float], modes: list[str]) -> None:
    assert get_modes(make_evidence(dict(enumerate(latencies, 1)), policy=policy)) == modes


def test_an_idle_server_with_a_short_first_prompt_is_well() -> None:
    latencies = [0.13, 0.5, 0.55, 0.6, 0.6, 0.65, 0.65, 0.7]  # T8/T1 is 5.4
    assert get_modes(make_evidence(dict(enumerate(latencies, 1)))) == []


def test_growth_without_a_link_is_no_collapse() -> None:
    assert get_modes(make_evidence({1: 13.9, 8: 144.1}, policy="stock")) == ["linear growth"]


def test_a_slow_first_turn_tells_a_collapse_from_growth() -> None:
    evidence = {"num_moved_tokens": 5, "policy": "offload-sync"}
    assert get_modes(make_evidence({1: 10.0, 8: 40.0}, **evidence)) == ["linear growth"]
    assert get_modes(make_evidence({1: 10.0, 8: 40.0}, light_first_s=1.0, **evidence)) == ["link collapse"]


def test_a_collapse_says_whether_the_tier_lost_what_it_stored() -> None:
    link, tier = (
        diagnose(make_evidence({1: 13.9, 8: 144.1}, policy="offload-sync", hit_share=hit, best_share=0.76))[0]
        for hit in (0.72, 0.17)
    )
    assert link.mode == tier.mode == "link collapse"
    assert "link to the host is full" in link.means
    assert "too small for these jobs" in tier.means
    assert "17% of prompt tokens were hit, 76% could be" in tier.seen


def test_waiting_before_the_first_turn_only_is_admission() -> None:
    latencies = [40.0, 3.0, 3.0, 3.2, 3.3, 3.4, 3.5, 3.6]
    assert get_modes(make_evidence(dict(enumerate(latencies, 1)))) == ["waiting for admission"]


def test_growth_says_whether_the_cache_is_the_reason() -> None:
    lost, kept = (
        diagnose(make_evidence({1: 1.0, 8: 9.0}, hit_share=hit, best_share=0.9))[0] for hit in (0.2, 0.85)
    )
    assert "lose their KV cache" in lost.means
    assert "20% of prompt tokens were hit, 90% could be" in lost.seen
    assert "not the reason" in kept.means


def test_the_slope_is_in_the_words() -> None:
    finding = diagnose(make_evidence({1: 2.0, 2: 4.0, 3: 6.0, 4: 8.0}))[0]
    assert "T4/T1 = 4.0" in finding.seen
    assert "2.0 s more with every turn" in finding.seen


def test_preemption_storm() -> None:
    calm, storm = int(STORM * 100) - 1, int(STORM * 100)
    assert get_modes(make_evidence({1: 1.0}, num_turns=100, num_preemptions=calm)) == []
    found = diagnose(make_evidence({1: 1.0}, num_turns=100, num_preemptions=storm))
    assert [finding.mode for finding in found] == ["preemption storm"]
    assert "25 preemptions in 100 turns, 0.25 a turn" in found[0].seen


def test_leases_that_end_without_a_hit() -> None:
    assert get_modes(make_evidence({1: 1.0}, lease_ends={"hit": 8, "expired": 2})) == []
    late = diagnose(make_evidence({1: 1.0}, lease_ends={"hit": 6, "expired": 4}, lease_p50_s=2, tool_p50_s=9))
    assert [finding.mode for finding in late] == ["leases too short"]
    assert "leases held 2.0 s, tool calls took 9.0 s" in late[0].seen
    assert get_modes(make_evidence({1: 1.0}, lease_ends={"hit": 5, "revoked": 5})) == ["leases reclaimed"]


def test_prompts_that_change() -> None:
    causes = {"prompt changed": 30, "never kept": 70}
    assert get_modes(make_evidence({1: 1.0}, missed_tokens_by_cause=causes)) == ["prompts that change"]


def test_nothing_known_is_nothing_found() -> None:
    assert diagnose(Evidence(latency_s={}, last_turn=None, num_turns=0)) == []

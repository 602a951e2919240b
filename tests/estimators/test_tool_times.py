"""Times of tools and pauses."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tenuto.core.turn_work import MAX_NAMES
from tenuto.core.types import Job
from tenuto.estimators.tool_times import MeanTimes, Pauses


def test_a_tool_not_seen_yet_takes_no_time() -> None:
    assert MeanTimes().get_mean_s("ls") == 0.0


def test_the_mean_is_over_all_calls_of_one_tool() -> None:
    times = MeanTimes()
    times.observe("ls", 1.0)
    times.observe("make", 60.0)
    times.observe("ls", 3.0)
    assert times.get_mean_s("ls") == 2.0  # (1 + 3) / 2
    assert times.get_mean_s("make") == 60.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_the_running_mean_is_the_mean(samples: list[float]) -> None:
    times = MeanTimes()
    for sample in samples:
        times.observe("ls", sample)
    assert times.get_mean_s("ls") == pytest.approx(sum(samples) / len(samples), rel=1e-9, abs=1e-9)


def test_memory_is_bounded_and_the_longest_unseen_tool_goes_first() -> None:
    times = MeanTimes()
    for number in range(MAX_NAMES):
        times.observe(f"tool-{number}", 1.0)
    times.observe("tool-0", 3.0)
    times.observe("one more", 5.0)
    assert times.get_mean_s("tool-0") == 2.0  # seen again, so it stays
    assert times.get_mean_s("tool-1") == 0.0
    assert times.get_mean_s("one more") == 5.0
    assert len(times._means) == MAX_NAMES


def test_what_is_learned_shows_in_its_repr() -> None:
    # check_policy tells a changed state by it.
    times = MeanTimes()
    before = repr(times)
    times.observe("ls", 1.0)
    assert repr(times) != before


def test_pauses_without_a_call_are_known_by_the_kind_of_the_job() -> None:
    pauses = Pauses()
    agent, person, nobody = (Job("j", 0.0, 1, None, kind) for kind in ("agent", "person", None))
    for _ in range(5):
        pauses.observe(agent, None, 0.5)
        pauses.observe(person, None, 30.0)
        pauses.observe(agent, "agent", 7.0)  # a tool of the same name is something else
    assert pauses.get_left_s(agent, None, 0.0, None) == 0.5
    assert pauses.get_left_s(person, None, 10.0, None) == 20.0
    assert pauses.get_left_s(person, "agent", 0.0, None) == 7.0
    stranger = Job("s", 0.0, 1, "another tenant", "agent")
    pauses.observe(stranger, None, 300.0)
    assert pauses.get_left_s(agent, None, 0.0, None) == 0.5
    # Nothing is known: what the client said, or as long again as it has been away.
    assert pauses.get_left_s(nobody, None, 3.0, 5.0) == 5.0
    assert pauses.get_left_s(agent, None, 40.0, None) == 40.0
    # Kinds are not kept across restarts.
    assert set(pauses.tools.get_state()["tools"]) == {repr((None, "agent"))}


def test_the_share_of_longer_pauses_is_that_of_the_kind_shrunk_towards_its_tenants() -> None:
    pauses = Pauses()
    agent, person, new = (Job("j", 0.0, 1, None, kind) for kind in ("agent", "person", "new"))
    assert pauses.get_share_longer(agent, None, 100.0) == 1.0
    for _ in range(6):
        pauses.observe(agent, None, 0.5)
        pauses.observe(person, None, 30.0)
    # Six of the tenant's twelve pauses took longer than 1 s, and four that count as such.
    of_tenant = (6 + 4) / (12 + 4)
    assert pauses.get_share_longer(new, None, 1.0) == of_tenant
    assert pauses.get_share_longer(agent, None, 1.0) == (0 + 4 * of_tenant) / (6 + 4)
    assert pauses.get_share_longer(person, None, 1.0) == (6 + 4 * of_tenant) / (6 + 4)
    # Strangers' pauses say nothing, whatever their prompts are.
    assert pauses.get_share_longer(Job("s", 0.0, 1, "another tenant", "agent"), None, 1.0) == 1.0
    pauses.observe(agent, "ls", 2.0)
    assert pauses.get_share_longer(agent, "ls", 1.0) == 1.0
    assert pauses.get_share_longer(agent, "ls", 2.0) == 4 / 5


def test_a_strangers_calls_of_a_tool_do_not_change_a_tenants_times() -> None:
    pauses = Pauses()
    ours, theirs = (Job("j", 0.0, 1, tenant, "agent") for tenant in ("us", "them"))
    for _ in range(3):
        pauses.observe(ours, "pytest", 60.0)
    for _ in range(1000):
        pauses.observe(theirs, "pytest", 0.01)
        pauses.observe(theirs, repr(("us", "pytest")), 0.01)
    assert pauses.get_left_s(ours, "pytest", 1.0, None) == 59.0
    assert pauses.get_share_longer(ours, "pytest", 1.0) == 1.0
    assert pauses.get_share_longer(theirs, "pytest", 1.0) < 0.01

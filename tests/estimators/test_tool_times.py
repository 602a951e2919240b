"""Times of tools and pauses."""

from __future__ import annotations

from tenuto.core.types import Job
from tenuto.estimators.tool_times import Pauses


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

"""Which requests are plain: by kind, by new kinds, and after changes."""

from __future__ import annotations

import dataclasses

from tenuto.core.turn_work import MAX_NAMES
from tenuto.core.types import Job, ToolCall, Turn
from tenuto.estimators.returns import PERSON_S, PlainKinds, PlainShare, Standing

LS = ToolCall("ls")


def make_turn(kind: str | None, tool: ToolCall | None = None, tenant: str | None = None) -> Turn:
    return Turn("t", Job("j", 0.0, 1, tenant, kind), 0.0, 100, tool=tool)


def is_plain(kinds: PlainKinds, kind: str | None, tenant: str | None = None) -> bool:
    return kinds.is_plain(make_turn(kind, tenant=tenant).job)


def test_a_kind_that_calls_tools_is_not_plain_and_another_is() -> None:
    kinds = PlainKinds()
    assert is_plain(kinds, "agent")
    for tool in (LS, None):  # an agent of two turns: half of its turns call a tool
        kinds.observe(make_turn("agent", tool))
        kinds.observe(make_turn("chat"))
    assert not is_plain(kinds, "agent") and is_plain(kinds, "chat")
    kinds.observe(make_turn("agent", tenant="somebody else"))
    assert is_plain(kinds, "agent", "somebody else")


def test_a_kind_whose_jobs_are_soon_back_is_not_plain_though_its_calls_are_not_recognised() -> None:
    standing = Standing()
    for kind, pause_s in (("agent", 0.5), ("person", 2 * PERSON_S)):
        standing.observe(make_turn(kind), fits_step=True)
        standing.come_back(make_turn(kind), None, pause_s)
    assert not standing.is_plain(make_turn("agent").job)
    assert standing.is_plain(make_turn("person").job)
    # Of a tool call, the turn itself tells; an id for unrelated prompts is no agent's.
    standing.observe(make_turn("other"), fits_step=True)
    standing.come_back(dataclasses.replace(make_turn("other"), is_parted=True), None, 0.5)
    assert standing.is_plain(make_turn("other").job)


def test_no_more_turns_are_marked_than_there_were() -> None:
    kinds = PlainKinds()
    kinds.observe(make_turn("k", LS))
    kinds.come_back(make_turn("k").job)
    kinds.come_back(make_turn("never seen").job)
    for _ in range(4):
        kinds.observe(make_turn("k"))
    assert is_plain(kinds, "k"), "one of five"


def test_new_kinds_go_by_the_first_turns_of_new_kinds() -> None:
    kinds = PlainKinds()
    for n in range(10):
        kinds.observe(make_turn(f"alone-{n}", LS))
    assert not is_plain(kinds, "alone-11")
    for n in range(100):
        kinds.observe(make_turn(f"probe-{n}"))
    assert is_plain(kinds, "another")
    assert not is_plain(kinds, "alone-3")


def test_a_kind_that_changes_is_seen_to_change() -> None:
    kinds = PlainKinds()
    for _ in range(500):
        kinds.observe(make_turn("k"))
    for _ in range(500):
        kinds.observe(make_turn("k", LS))
    assert not is_plain(kinds, "k")


def test_kinds_are_bounded_and_invented_ones_push_out_none_that_were_seen_often() -> None:
    kinds = PlainKinds()
    for _ in range(3):
        kinds.observe(make_turn("agent", LS))
    kinds.observe(make_turn("rare", LS))
    for n in range(2 * MAX_NAMES):
        kinds.observe(make_turn(f"probe-{n}"))
    assert len(kinds._kinds) <= MAX_NAMES
    assert not is_plain(kinds, "agent")
    assert is_plain(kinds, "rare")  # forgotten; most new kinds were plain


def test_plain_requests_that_have_more_than_half_of_the_work_are_a_flood() -> None:
    share = PlainShare()
    for _ in range(10):
        share.observe(1000.0, is_plain=True)
    assert not share.is_flood, "a few are none"
    for _ in range(100):
        share.observe(1000.0, is_plain=True)
    assert share.is_flood
    for _ in range(20):
        share.observe(1000.0, is_plain=False)
    assert share.is_flood
    for _ in range(40):
        share.observe(1000.0, is_plain=False)
    assert not share.is_flood
    for _ in range(100):
        share.observe(1000.0, is_plain=True)
        share.observe(1100.0, is_plain=False)
    assert not share.is_flood, "half each"

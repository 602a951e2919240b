"""Plain words for the reasons why leases are refused, end, and lose blocks."""

from __future__ import annotations

from collections.abc import Mapping

from tenuto.core.types import LeaseEnd, LeaseRefusal, TakenBy

REFUSALS: Mapping[LeaseRefusal, str] = {
    LeaseRefusal.LAST_TURN: "its client said that the job ends with it",
    LeaseRefusal.NO_TOOL_CALL: "its answer called no tool, and no hint said that the job goes on",
    LeaseRefusal.UNSUPPORTED: "nothing is kept of requests with images, audio or a streamed prompt",
    LeaseRefusal.POLICY: "the policy wanted no lease",
    LeaseRefusal.NOT_EXPECTED_BACK: "such jobs rarely come back",
    LeaseRefusal.IDLE: "the job was silent for too long",
    LeaseRefusal.PRICE: "other turns need the memory more",
    LeaseRefusal.TOO_LATE: "the deadline had already passed",
    LeaseRefusal.TURN_WAITING: "the job's older lease waits for another turn",
    LeaseRefusal.NOT_CACHED: "none of its blocks is in the cache",
    LeaseRefusal.ABORTED: "the client left, or the request failed",
    LeaseRefusal.OVER_SHARE: "it does not fit into limits.max_leased_share",
    LeaseRefusal.TENANT_SHARE: "it does not fit into limits.max_tenant_share",
    LeaseRefusal.TENANT_LEASES: "its tenant has limits.max_tenant_leases already",
}
ENDS: Mapping[LeaseEnd, str] = {
    LeaseEnd.HIT: "the job came back and uses the blocks",
    LeaseEnd.EXPIRED: "its deadline passed",
    LeaseEnd.TIME_LIMIT: "it lasted for limits.max_lease_s",
    LeaseEnd.IDLE: "given up: the job was silent for too long",
    LeaseEnd.PRICE: "given up: other turns need the memory more",
    LeaseEnd.NOT_EXPECTED_BACK: "given up: such jobs rarely come back",
    LeaseEnd.REVOKED: "all its blocks were taken back",
    LeaseEnd.SUPERSEDED: "the job came back with another prompt",
    LeaseEnd.REPLACED: "another turn of the job finished",
    LeaseEnd.JOB_ENDED: "the job ended",
    LeaseEnd.FORGOTTEN: "the job was forgotten (limits.max_remembered_jobs)",
    LeaseEnd.RESET: "the cache was reset, or the engine stopped",
    LeaseEnd.SWITCHED: "an operator changed the policy, or switched leases off",
}
TAKERS: Mapping[TakenBy, str] = {
    TakenBy.RUNNING: "a running turn needed its next blocks",
    TakenBy.WAITING: "the policy put a waiting turn before it",
    TakenBy.OVERDUE: "a turn had waited for too long",
    TakenBy.DEADLOCK: "nothing could run otherwise",
    TakenBy.FAIR_SHARE: "its tenant used more than its fair share",
    TakenBy.PRICE: "the policy found it not worth its memory",
    TakenBy.QUOTA: "it made room for a newer lease (limits)",
}
WORDS: Mapping[str, Mapping[str, str]] = {
    "not granted": {why.value: words for why, words in REFUSALS.items()},
    "ended": {why.value: words for why, words in ENDS.items()},
    "taken back": {by.value: words for by, words in TAKERS.items()},
}
"""By what happened to a lease: each reason as records and metrics name it, and what it means."""
_KINDS: Mapping[type, str] = {LeaseRefusal: "not granted", LeaseEnd: "ended", TakenBy: "taken back"}


def name_reason(reason: LeaseEnd | LeaseRefusal | TakenBy | None) -> tuple[str, str] | tuple[None, None]:
    """What happened to a lease and why, as `WORDS` has them; None for both if nothing did."""
    return (None, None) if reason is None else (_KINDS[type(reason)], reason.value)

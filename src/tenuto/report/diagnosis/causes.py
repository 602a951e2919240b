"""Why a turn did not hit all tokens that it could reuse of its job's turn before."""

from __future__ import annotations

from enum import Enum

from tenuto.records.run_data import LeaseRecord
from tenuto.records.schema import TurnRecord
from tenuto.report.diagnosis.history import Fate, TurnStory


class Cause(Enum):
    """Where the tokens went. The value is what tables and JSON say."""

    NONE = "none"
    """Nothing was missed, or less than a block."""
    EVICTED = "evicted"
    """A lease held them and was reclaimed, whole or from its tail, or dropped with the cache."""
    EXPIRED = "expired"
    """A lease held them and ended before the job came back; then they were evicted."""
    NEVER_KEPT = "never kept"
    """No lease was granted; what stayed in cache by itself was evicted."""
    NOT_STORED = "not yet stored"
    """Not in cache or tier: the copy was under way, or the tier lost it."""
    PARALLEL = "parallel turn"
    """Another turn of the job still ran: this one cannot extend its answer, and may share nothing with it."""
    CHANGED = "prompt changed"
    """The prompt does not extend the turn before: compacted, or the chat template dropped reasoning."""
    UNTOLD = "untold"
    """The records do not say; a trace of the scheduler does."""


MEANINGS = {
    Cause.EVICTED: "leased, but reclaimed for other turns",
    Cause.EXPIRED: "leased, but the job came back after the deadline",
    Cause.NEVER_KEPT: "no lease: evicted like any cached block",
    Cause.NOT_STORED: "not yet, or no more, in the cache or tier",
    Cause.PARALLEL: "another turn of the job still ran; their prompts may have nothing in common",
    Cause.CHANGED: "the prompt does not extend the turn before",
    Cause.UNTOLD: "these records do not tell; a trace of the scheduler does",
}

_LEASE_ENDS = {
    "expired": Cause.EXPIRED,
    "superseded": Cause.CHANGED,
    "revoked": Cause.EVICTED,
    "replaced": Cause.EVICTED,
    "reset": Cause.EVICTED,
    "job-ended": Cause.NEVER_KEPT,
}
_FATES = {
    Fate.UNTOLD: Cause.UNTOLD,
    Fate.RELEASED: Cause.NEVER_KEPT,
    Fate.OFFLOADED: Cause.NOT_STORED,
    Fate.RUNNING: Cause.PARALLEL,
}


def get_cause(turn: TurnStory, block_size: int) -> Cause:
    """Why a turn computed tokens again that the turn before had computed."""
    if turn.missed_tokens is None or turn.missed_tokens < block_size:
        return Cause.NONE
    if _left_at_the_answer(turn, block_size):
        return Cause.CHANGED
    if turn.lease is None:
        return _FATES.get(turn.fate, Cause.UNTOLD)
    if turn.lease.reason == "hit":
        return _explain_short_hit(turn.record, turn.lease, block_size)
    return _LEASE_ENDS.get(turn.lease.reason or "", Cause.UNTOLD)


def _left_at_the_answer(turn: TurnStory, block_size: int) -> bool:
    """Whether the hit ends just where the last prompt did: the answer came back with other tokens.

    So it is when a chat template drops reasoning; an eviction rarely ends just there. Answers of one or two
    blocks are too short to tell.
    """
    before = turn.before
    if before is None or before.prompt_tokens is None or before.output_tokens is None:
        return False
    num_hit = turn.record.hit_tokens or 0
    ends_there = before.prompt_tokens - block_size < num_hit <= before.prompt_tokens
    return ends_there and before.output_tokens > 2 * block_size


def _explain_short_hit(turn: TurnRecord, lease: LeaseRecord, block_size: int) -> Cause:
    """The lease served, yet the hit is short: the lease had become shorter, or never covered everything."""
    if lease.num_blocks is None or lease.num_blocks_left is None:
        return Cause.UNTOLD
    # A claim cuts the lease to what the prompt can hit, so a prompt that is short explains fewer blocks.
    num_usable = min(lease.num_blocks, ((turn.prompt_tokens or 1) - 1) // block_size)
    if lease.num_blocks_left < num_usable:
        return Cause.EVICTED if lease.was_pressed else Cause.CHANGED
    if (turn.hit_tokens or 0) < (lease.num_blocks_left - 1) * block_size:
        return Cause.CHANGED
    return Cause.NOT_STORED

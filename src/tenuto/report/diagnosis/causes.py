"""Finds why a turn did not hit all tokens that it could reuse from its job's previous turn."""

from __future__ import annotations

from enum import Enum

from tenuto.records.run_data import LeaseRecord
from tenuto.records.schema import TurnRecord
from tenuto.report.diagnosis.history import Fate, TurnStory


class Cause(Enum):
    """Why tokens were missed. The value is the name in tables and JSON."""

    NONE = "none"
    """No tokens were missed, or less than one block."""
    EVICTED = "evicted"
    """A lease held the tokens. It was reclaimed, wholly or from its tail, or dropped when the cache was
    reset."""
    EXPIRED = "expired"
    """A lease held the tokens and ended before the job came back. Then they were evicted."""
    GIVEN_UP = "given up"
    """A lease held the tokens, and the policy or an operator's limit ended it before the job came back."""
    NEVER_KEPT = "never kept"
    """No lease was granted, so the tokens were evicted from the cache."""
    SHORT_GROUP = "short group"
    """Full attention still had the tokens, and a sliding window or a state had not."""
    NOT_STORED = "not yet stored"
    """In neither the KV cache nor a tier: the copy was still running, or the tier had dropped it."""
    DECLINED = "not loaded"
    """A tier below the GPU had the tokens, and the policy computed them again: the link was busy, or slow."""
    PARALLEL = "parallel turn"
    """Another turn of the job was still running. This turn cannot extend that turn's answer, and may share no
    prefix with it."""
    CHANGED = "prompt changed"
    """The prompt does not extend the previous turn: it was compacted, or the chat template dropped
    reasoning."""
    UNTOLD = "untold"
    """The records do not contain the cause. A trace of the scheduler does."""


MEANINGS = {
    Cause.EVICTED: "leased, but reclaimed for other turns",
    Cause.EXPIRED: "leased, but the job came back after the deadline",
    Cause.GIVEN_UP: "leased, but given up before the job came back (idle, price, a limit)",
    Cause.NEVER_KEPT: "no lease: evicted like any cached block",
    Cause.SHORT_GROUP: "a sliding window or a state had them no more, while full attention had",
    Cause.NOT_STORED: "not yet, or no more, in the cache or tier",
    Cause.DECLINED: "a tier had them, and the policy did not wait for the link",
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
    "switched": Cause.EVICTED,
    "time-limit": Cause.GIVEN_UP,
    "idle": Cause.GIVEN_UP,
    "price": Cause.GIVEN_UP,
    "not-expected-back": Cause.GIVEN_UP,
    "forgotten": Cause.GIVEN_UP,
    "job-ended": Cause.NEVER_KEPT,
}
_FATES = {
    Fate.UNTOLD: Cause.UNTOLD,
    Fate.RELEASED: Cause.NEVER_KEPT,
    Fate.OFFLOADED: Cause.NOT_STORED,
    Fate.RUNNING: Cause.PARALLEL,
}


def get_cause(turn: TurnStory, block_size: int) -> Cause:
    """Return why a turn recomputed tokens of the previous turn."""
    if turn.missed_tokens is None or turn.missed_tokens < block_size:
        return Cause.NONE
    if turn.short_group is not None and (turn.lease is None or turn.lease.reason == "hit"):
        return Cause.SHORT_GROUP
    if turn.was_declined and not turn.record.loaded_tokens:
        return Cause.DECLINED
    if _left_at_the_answer(turn, block_size):
        return Cause.CHANGED
    if turn.lease is None:
        return _FATES.get(turn.fate, Cause.UNTOLD)
    if turn.lease.reason == "hit":
        return _explain_short_hit(turn.record, turn.lease, block_size)
    return _LEASE_ENDS.get(turn.lease.reason or "", Cause.UNTOLD)


def _left_at_the_answer(turn: TurnStory, block_size: int) -> bool:
    """Whether the hit ends exactly where the previous prompt ended.

    Then the answer came back with different tokens, for example because a chat template dropped reasoning. An
    eviction rarely ends exactly there. Answers of one or two blocks are too short to decide.
    """
    before = turn.before
    if before is None or before.prompt_tokens is None or before.output_tokens is None:
        return False
    num_hit = turn.record.hit_tokens or 0
    ends_there = before.prompt_tokens - block_size < num_hit <= before.prompt_tokens
    return ends_there and before.output_tokens > 2 * block_size


def _explain_short_hit(turn: TurnRecord, lease: LeaseRecord, block_size: int) -> Cause:
    """Explain a short hit on a lease: the lease was truncated, or never covered all tokens."""
    if lease.num_blocks is None or lease.num_blocks_left is None:
        return Cause.UNTOLD
    # A claim truncates the lease to the blocks that the prompt can hit. So a short prompt explains missing
    # blocks.
    num_usable = min(lease.num_blocks, ((turn.prompt_tokens or 1) - 1) // block_size)
    if lease.num_blocks_left < num_usable:
        return Cause.EVICTED if lease.was_pressed else Cause.CHANGED
    if (turn.hit_tokens or 0) < (lease.num_blocks_left - 1) * block_size:
        return Cause.CHANGED
    return Cause.NOT_STORED

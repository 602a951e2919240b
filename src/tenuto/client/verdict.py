"""What `tenuto verify` found: of each turn, and in all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tenuto.client.servers.metrics import CacheState, OwnJob
from tenuto.core.types import WORDS

Gap = Literal["held", "expired", "not granted", "yielded", "not held", "end"]
"""What became of a turn's blocks in its gap. expired: the lease lasted until the deadline that the policy
gave it. not granted: the policy asked for no lease. yielded: other turns, or a limit, took the memory. end:
after the last turn."""

_EXPIRED = ("expired", "time-limit", "idle", "price", "not-expected-back")
"""The policy, or the longest lease, ended it at its deadline (`tenuto.core.types.LeaseEnd`)."""
_NOT_GRANTED = ("policy-released", "too-late", "idle", "price", "not-expected-back")
"""The policy wanted none (`tenuto.core.types.LeaseRefusal`)."""
_YIELDED = ("over-share", "tenant-share", "tenant-leases")
"""There was no room beside the leases of others."""


@dataclass(frozen=True, slots=True)
class TurnCheck:
    """The result of one turn."""

    turn: int
    tool: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    min_cached_tokens: int
    """Full blocks of the previous prompt, in tokens. A smaller hit means that blocks were lost."""
    expected_blocks: int
    """Full blocks of the prompt and output, without the last token, which is never computed. 0 after the last
    turn."""
    held_blocks: int
    """The lowest number seen in the gap; after the last turn, the number still held when polling ended."""
    latency_s: float
    ok: bool
    gap: Gap = "not held"
    reason: str | None = None
    """Why it has no lease, or has lost blocks of it, in words."""
    rank: str | None = None
    """The data-parallel rank. None if there is only one engine."""
    short_group: str | None = None
    """The layer group that ended the hit, while another one still had more."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the whole check."""

    ok: bool
    model: str
    block_size: int
    num_blocks: int
    turns: list[TurnCheck]
    policy: str | None = None
    """The policy named by `tenuto:info`. None on stock vLLM."""
    num_faults: int = 0
    """Policy hooks that failed during the check."""
    engine_urls: tuple[str, ...] = ()
    """The engines behind a router. Empty if `url` is no router."""
    is_disturbed: bool = False
    """It is not ok only because the server's other work kept the memory from the job, as it may."""
    groups: tuple[str, ...] = ()
    """On a hybrid model: the kinds of layer groups that can end a hit, such as `window 1024`."""

    @property
    def num_answer_tokens(self) -> int:
        """Tokens hit beyond the prompts of the turns before: answers.

        With the default retention interval, stock vLLM computes them again on a hybrid model.
        """
        return sum(max(0, turn.cached_tokens - turn.min_cached_tokens) for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        return asdict(self)


def join(verdicts: Sequence[Verdict]) -> Verdict:
    """Combine the verdicts of all ranks into one."""
    return dataclasses.replace(
        verdicts[0],
        ok=all(each.ok for each in verdicts),
        is_disturbed=any(each.is_disturbed for each in verdicts)
        and all(each.ok or each.is_disturbed for each in verdicts),
        num_blocks=sum(each.num_blocks for each in verdicts),
        turns=[turn for each in verdicts for turn in each.turns],
        num_faults=sum(each.num_faults for each in verdicts),
    )


def judge_gap(job: OwnJob, held: int, expected: int) -> Gap:
    """Decide what happened to a turn's blocks in its gap; `held` of them were leased throughout."""
    if held >= expected:
        return "held"
    match job.news:
        case "ended" if job.reason in _EXPIRED:
            return "expired"
        case "not granted" if job.reason in _NOT_GRANTED:
            return "not granted"
        case "not granted" if job.reason in _YIELDED:
            return "yielded"
        case "taken back":
            return "yielded"
    return "not held"


def is_disturbed(turns: Sequence[TurnCheck]) -> bool:
    """Whether the server's other work explains each turn that is not ok: in its gap, or in the one before.

    Other turns take the memory, or the policy decides by what it saw of them.
    """
    learned = [WORDS["not granted"][why] for why in ("price", "not-expected-back")]
    lost = [turn.gap == "yielded" or (turn.gap == "not granted" and turn.reason in learned) for turn in turns]
    return all(
        turn.ok or own or (before and (turn.gap in ("held", "expired") or not turn.held_blocks))
        for turn, own, before in zip(turns, lost, [False, *lost], strict=False)
    )


def find_short_group(before: CacheState, after: CacheState) -> str | None:
    """The layer group that made the turn between two readings hit less than another group had."""
    new = {
        group: number - before.num_short_tokens.get(group, 0.0)
        for group, number in after.num_short_tokens.items()
    }
    group = max(new, key=lambda each: new[each], default=None)
    return group if group is not None and new[group] > 0 else None


def is_own_choice(turn: TurnCheck) -> bool:
    """Whether the policy asked for no lease, and nothing was lost."""
    return turn.gap == "not granted" and turn.cached_tokens >= turn.min_cached_tokens

"""What `tenuto verify` found: of each turn, and in all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tenuto.client.servers.server_metrics import CacheState

Gap = Literal["held", "expired", "not granted", "not held", "end"]
"""What became of a turn's blocks in its gap. expired: the lease lasted until the deadline that the policy
gave it. not granted: the policy asked for no lease. end: after the last turn."""


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
        num_blocks=sum(each.num_blocks for each in verdicts),
        turns=[turn for each in verdicts for turn in each.turns],
        num_faults=sum(each.num_faults for each in verdicts),
    )


def judge_gap(before: CacheState, after: CacheState, held: int, expected: int) -> Gap:
    """Decide what happened to a turn's blocks between two readings; `held` blocks were in use throughout."""
    if held >= expected:
        return "held"
    if after.num_expired > before.num_expired:
        return "expired"
    return "not granted" if after.num_granted == before.num_granted else "not held"


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

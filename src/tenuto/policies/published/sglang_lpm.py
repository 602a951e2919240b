"""sglang-lpm: SGLang's longest prefix match, the waiting turn with the most cached tokens goes first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tenuto.core.policy import Key, Needs, Policy
from tenuto.core.types import Turn


@dataclass
class SglangLpm(Policy):
    """Longest cached prefix first; first come, first served while more than 128 turns wait.

    Source: sglang/srt/managers/schedule_policy.py (`_sort_by_longest_prefix`, `_determine_active_policy`);
    arXiv 2312.07104. SGLang sorts before every step; here keys are up to 0.1 s old. One rule is left out: if
    several waiting turns share a prefix that is not cached yet, SGLang starts only the first of them. Known
    weakness: the time waited does not count, so a new job may starve while other jobs return.
    """

    # Looking up 128 prompts takes milliseconds in vLLM, too long for every step.
    needs: ClassVar[Needs] = Needs(max_waiting_with_hits=128, reorder_s=0.1)

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """The most cached tokens first; without look-ups, and among equals, the earliest arrival."""
        return (-(turn.num_cached_tokens or 0), turn.arrival_s)

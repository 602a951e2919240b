"""Writes the verdict of `tenuto verify` as text."""

from __future__ import annotations

from collections import Counter

from tenuto.client.promise import get_promise
from tenuto.client.verdict import Verdict


def format_verdict(verdict: Verdict) -> str:
    """The verdict as a table and a sentence."""
    policy = "stock vLLM" if verdict.policy is None else f"policy {verdict.policy}"
    lines = [
        f"{verdict.model}: {verdict.num_blocks} blocks of {verdict.block_size} tokens, {policy}",
        "turn  tool    prompt  output  cached (at least)  held in the gap (expected)  latency",
    ]
    rank: str | None = None
    for t in verdict.turns:
        if t.rank != rank:
            rank = t.rank
            lines.append(f"rank {rank}")
        lines.append(
            f"{t.turn:>4}  {t.tool:<6}  {t.prompt_tokens:>6}  {t.output_tokens:>6}  {t.cached_tokens:>6} "
            f"({t.min_cached_tokens:>8})  {t.held_blocks:>15} ({t.expected_blocks:>8})  {t.latency_s:>6.2f} s"
            f"  {'ok' if t.ok else 'FAILED'}{'' if t.gap in ('held', 'end') else f', {t.gap}'}"
            f"{'' if t.reason is None else f': {t.reason}'}"
        )
    return "\n".join([*lines, *_conclude(verdict), *_describe_groups(verdict)])


def _describe_groups(verdict: Verdict) -> list[str]:
    """On a hybrid model: which layer groups can end a hit, whether one did, and what stock would lose."""
    if not verdict.groups:
        return []
    names = ", ".join(verdict.groups)
    lines = [f"Hybrid model: beside full attention it has {names}. A hit needs all of them."]
    for turn in verdict.turns:
        if turn.short_group is not None and turn.cached_tokens < turn.min_cached_tokens:
            lines.append(
                f"Turn {turn.turn}: {turn.short_group} ended the hit at {turn.cached_tokens} tokens; its "
                "blocks before the prompt's end were not held. See docs/operating.md, models with windows."
            )
    if verdict.ok and verdict.num_answer_tokens:
        lines.append(
            f"{verdict.num_answer_tokens} tokens of answers were hit too. At vLLM's default retention "
            "interval stock vLLM computes them again, and the second job on a shared prefix hits nothing."
        )
    return lines


def _conclude(verdict: Verdict) -> list[str]:
    """Summarize the results of the turns in sentences."""
    lines = []
    if verdict.num_faults:
        lines.append(f"{verdict.num_faults} hooks of the policy FAILED; the server's log has the reason.")
    gaps = Counter(turn.gap for turn in verdict.turns)
    if verdict.is_disturbed:
        lines.append(
            "Not shown: the server's other work kept the memory from this job, as it may; the reasons are "
            "above. Run it again when the server has less to do."
        )
    elif not verdict.ok:
        if get_promise(verdict.policy) == "never" and verdict.policy is not None:
            lines.append(f"Policy {verdict.policy} holds nothing, by design.")
        lines.append(
            "NOT held: this server gives a job's KV cache away during its tool calls, or keeps it after."
        )
        if len(verdict.engine_urls) > 1:
            lines.append(
                "The turns went through a router, which may have sent them to different engines. Make sure "
                "that it pins sessions (X-Session-ID), and check each engine with its own --url."
            )
    elif not gaps["not granted"] and not gaps["expired"]:
        lines.append("Held in every gap, hit on return, released at the end.")
    else:
        lines.append("Healthy: hit on return, released at the end. But not shown in every gap:")
    if gaps["expired"]:
        lines.append(f"{gaps['expired']} leases ended in the gap, at the policy's own deadline; see --gap.")
    if verdict.ok and gaps["not granted"]:
        lines.append(
            f"{gaps['not granted']} times the policy asked for no lease. Holding is not shown on an idle "
            "server: nothing evicts the cache here, and some policies hold only under load."
        )
    return lines

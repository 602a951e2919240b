"""The README's picture: the same jobs under stock vLLM and Tenuto; each turn's wait, work and tool call.

    python -m experiments.figures.jobs_picture

One simulated GPU with more work than its cache holds: an example, not a measure of the gain. Writes
docs/figures/jobs.png. A turn's prefill is drawn in two parts, by its share of recomputed tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

import tenuto
from tenuto.records.schema import TurnRecord

OUT = Path(__file__).parents[2] / "docs" / "figures" / "jobs.png"
SETUP: dict[str, Any] = {"gpu": "A100-40", "jps": 1.0, "window_s": 16.0, "seed": 42, "host_gb": 0.0}
COLOURS = {"waits": "#c9ccd1", "computes again": "#d1495b", "works": "#30638e", "tool call": "#eceae4"}


def get_parts(turn: TurnRecord) -> list[tuple[str, float, float]]:
    """A turn's parts: what, from when, for how long (seconds)."""
    if turn.sent_s is None or turn.start_s is None or turn.first_token_s is None or turn.last_token_s is None:
        return []
    computed = max((turn.prompt_tokens or 0) - (turn.hit_tokens or 0), 1)
    again_s = (turn.first_token_s - turn.start_s) * min(1.0, (turn.recomputed_tokens or 0) / computed)
    return [
        ("waits", turn.sent_s, turn.start_s - turn.sent_s),
        ("computes again", turn.start_s, again_s),
        ("works", turn.start_s + again_s, turn.last_token_s - turn.start_s - again_s),
        ("tool call", turn.last_token_s, turn.tool_s or 0.0),
    ]


def main() -> None:
    """Draw both runs, one below the other, on one time axis."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharex=True, sharey=True)
    for axis, policy in zip(axes, ("stock", "tenuto"), strict=True):
        result = tenuto.simulate(policy, **SETUP)
        first = sorted((turn.due_s, turn.job) for turn in result.turns if turn.turn == 1)
        rows = {job: row for row, (_, job) in enumerate(first)}
        for turn in result.turns:
            for what, start_s, length_s in get_parts(turn):
                axis.barh(
                    rows[turn.job], length_s, left=start_s, color=COLOURS[what], height=0.8, linewidth=0
                )
        mean = result.record["job_s"]["mean"]
        axis.set_title(
            f"{'Stock vLLM' if policy == 'stock' else 'Tenuto'}: mean job time {mean:.0f} s", loc="left"
        )
        axis.set_xlabel("seconds")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("jobs, by arrival")
    axes[0].set_yticks([])
    axes[0].invert_yaxis()
    handles = [Patch(color=colour) for colour in COLOURS.values()]
    figure.legend(handles, COLOURS, loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(OUT, dpi=150)


if __name__ == "__main__":
    main()

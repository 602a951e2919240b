"""Converts a trace: reads it, writes it, reads the result, and reports what the new format cannot store."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from tenuto.core.types import ToolCall
from tenuto.workload.convert.losses import find_losses
from tenuto.workload.convert.options import ConvertOptions
from tenuto.workload.convert.write import FORMATS, write_trace
from tenuto.workload.formats.conversations import GUESSED
from tenuto.workload.formats.messages import get_plain_tool
from tenuto.workload.load import holds_text, load_workload
from tenuto.workload.schema import Job, TurnSpec


def run_convert(options: ConvertOptions) -> int:
    """Convert a trace; return 0. If the new format cannot store everything, the losses are reported."""
    jobs = load_workload(options.source).jobs
    if not options.keep_text and holds_text(options.source):
        jobs = drop_commands(jobs)
    chosen = FORMATS[options.to]
    written = write_trace(options.out, jobs, chosen, options.block_size or chosen.block_size)
    losses = find_losses(jobs, written, chosen.get_names(jobs))
    num_turns = sum(len(job.turns) for job in jobs)
    guessed = sum(bool(turn.extra.get(GUESSED)) for job in jobs for turn in job.turns)
    if guessed:
        losses.append(f"lengths of {guessed:,} of {num_turns:,} turns are guesses: 4 characters a token")
    for loss in losses:
        print(f"[convert] {loss}", file=sys.stderr)
    done = {"out": str(options.out), "format": options.to, "jobs": len(jobs), "turns": num_turns}
    text = f"{len(jobs):,} jobs, {num_turns:,} turns in {options.out}; {len(losses) or 'no'} losses"
    print(json.dumps({**done, "losses": losses}) if options.as_json else text)
    return 0


def drop_commands(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """The jobs without their agents' command lines; the tool names stay."""

    def drop(turn: TurnSpec) -> TurnSpec:
        if turn.tool is None:
            return turn
        return replace(turn, tool=get_plain_tool(ToolCall(turn.tool, turn.command)), command=None)

    return tuple(replace(job, turns=tuple(map(drop, job.turns))) for job in jobs)

"""`tenuto convert`: its options, and what it does."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tenuto.core.errors import ConfigError
from tenuto.core.types import ToolCall
from tenuto.workload.formats.messages import get_plain_tool
from tenuto.workload.schema import Job, TurnSpec

DESCRIPTION = """\
Change a trace's format, or import agents' logs.

IN is anything that `tenuto bench --workload` takes: Tenuto's JSONL (a recording, say), Mooncake, agentic
Mooncake, Weka, trajectories of mini-swe-agent (a file or a folder of *.traj.json), OpenAI-style chat logs
(JSONL of rows with messages). What was written is read again, and what the new format could not hold is
told on stderr, with --json on stdout too.
"""
EPILOG = """\
examples:
  tenuto convert recorded.jsonl recorded.weka.jsonl --to weka
  tenuto convert recorded.jsonl mooncake.jsonl --to mooncake
  tenuto convert runs/trajectories swe.jsonl
      mini-swe-agent's own logs as a workload; then: tenuto bench --workload swe.jsonl --url …
"""
NAMES = ("tenuto", "mooncake", "agentic-mooncake", "weka")


MAX_BLOCK_SIZE = 2**20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser."""
    parser.add_argument("source", metavar="IN", type=Path, help="the trace or log")
    parser.add_argument(
        "out",
        metavar="OUT",
        type=Path,
        help="the new file, packed if it ends with .gz; for Weka also a folder, with a file per session",
    )
    parser.add_argument("--to", choices=NAMES, default="tenuto", help="the new format (default tenuto)")
    parser.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help="tokens per block id (default 512 for Mooncake, whose files do not say it, else 64)",
    )
    parser.add_argument(
        "--keep-text",
        action="store_true",
        help="keep the commands found in trajectories and chat logs; else only the tools' names are",
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="print what was done as JSON")


def run(parsed: argparse.Namespace) -> int:
    """Convert; 0 also if the new format cannot hold everything: that is said, not failed."""
    from tenuto.workload.convert.losses import find_losses
    from tenuto.workload.convert.write import FORMATS, write_trace
    from tenuto.workload.formats.conversations import GUESSED
    from tenuto.workload.load import holds_text, load_workload

    if parsed.block_size is not None and not 1 <= parsed.block_size <= MAX_BLOCK_SIZE:
        raise ConfigError(f"--block-size must be from 1 to {MAX_BLOCK_SIZE}, got {parsed.block_size}")
    jobs = load_workload(parsed.source).jobs
    if not parsed.keep_text and holds_text(parsed.source):
        jobs = drop_commands(jobs)
    chosen = FORMATS[parsed.to]
    written = write_trace(parsed.out, jobs, chosen, parsed.block_size or chosen.block_size)
    losses = find_losses(jobs, written, chosen.get_names(jobs))
    num_turns = sum(len(job.turns) for job in jobs)
    guessed = sum(bool(turn.extra.get(GUESSED)) for job in jobs for turn in job.turns)
    if guessed:
        losses.append(f"lengths of {guessed:,} of {num_turns:,} turns are guesses: 4 characters a token")
    for loss in losses:
        print(f"[convert] {loss}", file=sys.stderr)
    done = {"out": str(parsed.out), "format": parsed.to, "jobs": len(jobs), "turns": num_turns}
    text = f"{len(jobs):,} jobs, {num_turns:,} turns in {parsed.out}; {len(losses) or 'no'} losses"
    print(json.dumps({**done, "losses": losses}) if parsed.as_json else text)
    return 0


def drop_commands(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """The jobs without what the agents' commands say beyond the tool's name."""

    def drop(turn: TurnSpec) -> TurnSpec:
        if turn.tool is None:
            return turn
        return replace(turn, tool=get_plain_tool(ToolCall(turn.tool, turn.command)), command=None)

    return tuple(replace(job, turns=tuple(map(drop, job.turns))) for job in jobs)

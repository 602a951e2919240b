"""Soaks Tenuto in random traffic and faults, and checks its invariants throughout.

    python -m experiments.soak scheduler --turns 1000000 [--seed N] [--workers N] [--out FILE]
    python -m experiments.soak scheduler --seed N --episode K      one episode again, such as one that failed

    python -m experiments.soak server --hours 2 --model FOLDER [--seed N] [--out FILE]

`scheduler` runs episodes on vLLM's real scheduler without workers. With `--out`, each episode becomes one
JSON line as soon as it ends, and a further run with the same file goes on after those that are there. The
exit status is 1 if any episode failed. `server` starts `tenuto serve` with a small model on this machine,
lets random clients and faults loose on it, checks it throughout, and prints a summary in JSON. On a machine
that does other work too: `--pace 0.2 --threads 1`. Its limits of time follow how busy the machine is.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from experiments.soak import episodes


def main() -> int:
    """Run a soak; 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    soaks = parser.add_subparsers(dest="soak", required=True)
    scheduler = soaks.add_parser("scheduler", help="random turns through vLLM's scheduler without workers")
    scheduler.add_argument("--turns", type=int, default=1_000_000, help="turns of all episodes together")
    scheduler.add_argument("--turns-per-episode", type=int, default=2000)
    scheduler.add_argument("--seed", type=int, default=1)
    scheduler.add_argument("--episode", type=int, help="run this episode only")
    scheduler.add_argument("--workers", type=int, default=1, help="processes")
    scheduler.add_argument(
        "--out", type=Path, help="JSON lines, one per episode; an existing file is gone on with"
    )
    scheduler.add_argument("--json", action="store_true", help="the summary as JSON")
    server = soaks.add_parser("server", help="a live server under random faults")
    server.add_argument("--model", required=True, help="folder of a small model")
    server.add_argument("--hours", type=float, default=2.0)
    server.add_argument("--policy", default="tenuto")
    server.add_argument("--seed", type=int, default=1)
    server.add_argument(
        "--cycle-s", type=float, default=120.0, help="seconds that clients work between rests"
    )
    server.add_argument(
        "--cycles", type=int, default=4, help="cycles until the server is ended and started anew"
    )
    server.add_argument(
        "--stock-every",
        type=int,
        default=4,
        metavar="N",
        help="one life in N is stock vLLM, to compare its memory; the second is the first; 0: none",
    )
    server.add_argument(
        "--pace", type=float, default=1.0, help="0.2: clients think five times as long, for a shared machine"
    )
    server.add_argument(
        "--host-gb", type=float, default=0.5, help="host memory below the GPU's, except for stock; 0: none"
    )
    server.add_argument("--threads", type=int, help="threads that compute, default: vLLM's choice")
    server.add_argument("--out", type=Path, help="JSON lines: rests, failures, notes")
    parsed = parser.parse_args()
    if parsed.soak == "server":
        if parsed.pace <= 0 or parsed.hours <= 0 or parsed.cycle_s <= 0 or parsed.cycles < 1:
            parser.error("--pace, --hours and --cycle-s must be positive, --cycles at least 1")
        if min(parsed.stock_every, parsed.host_gb) < 0 or (parsed.threads is not None and parsed.threads < 1):
            parser.error("--stock-every and --host-gb must not be negative, --threads at least 1")
        from experiments.soak.server import run_soak

        return run_soak(parsed)
    if min(parsed.turns, parsed.turns_per_episode, parsed.workers) < 1:
        parser.error("--turns, --turns-per-episode and --workers must be at least 1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return episodes.run_all(parsed)


if __name__ == "__main__":
    sys.exit(main())

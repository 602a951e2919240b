"""Your own logs as a workload: write them as a trace file, then simulate the same jobs under two policies.

    python examples/replay_trace.py [TRACE]

A trace is JSONL, one row per turn; docs/traces.md has all fields and the other formats that can be read.
`tenuto record` writes such a file from a server's live traffic.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import tenuto


def write_trace(path: Path, num_jobs: int = 40, num_turns: int = 6) -> None:
    """Stands in for your logs: coding agents whose conversations grow by a tool's output in each turn."""
    rng = random.Random(0)
    rows = []
    for job in range(num_jobs):
        num_tokens = rng.randrange(2000, 6000)
        for turn in range(num_turns):
            row = {
                "session": f"job-{job}",
                "input_length": num_tokens,
                "output_length": 150,
                "tool": "pytest",
            }
            if turn == 0:
                row["timestamp"] = job * 500  # when the job begins, milliseconds
            else:
                row["delay"] = rng.randrange(500, 8000)  # how long the tool ran, milliseconds
            rows.append(row)
            num_tokens += 150 + rng.randrange(500, 4000)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "trace.jsonl"
        if len(sys.argv) == 1:
            write_trace(path)
        for policy in ("stock", "tenuto"):
            record = tenuto.simulate(policy=policy, gpu="A100-40", workload=str(path)).record
            print(
                f"{policy:>8}: mean job {record['job_s']['mean']:.1f} s, "
                f"{record['recomputed_tokens']} of {record['prompt_tokens']} prompt tokens computed again"
            )


if __name__ == "__main__":
    main()

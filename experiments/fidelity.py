"""Hold the simulator against published sweeps: the tables of docs/fidelity.md.

    python experiments/fidelity.py [--published experiments/published/ab8_h200.json] [--json]

Nothing is fitted: every constant has a source where it stands (src/tenuto/sim).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from tenuto.sim.run import get_versions, run
from tenuto.sim.setup import Setup
from tenuto.workload.load_options import LoadOptions

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--published", type=Path, default=HERE / "published" / "ab8_h200.json")
    parser.add_argument("--json", action="store_true", help="print the rows instead of the tables")
    parsed = parser.parse_args()
    published = json.loads(parsed.published.read_text(encoding="utf-8"))
    rows = list(map(dict, make_rows(published)))
    if parsed.json:
        print(json.dumps({"versions": get_versions(), "rows": rows}, indent=1))
    else:
        print(format_job_times(rows))
        print()
        print(format_turns(published, rows))
    return 0


def make_rows(published: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for policy, figures in published["avg_duration_s"].items():
        for jps, expected_s in zip(published["jps"], figures, strict=True):
            # The sweeps were made with vLLM 0.10.2, which scheduled a step after the one before.
            setup = Setup(gpu=published["gpu"], policy=policy, async_scheduling=False)
            record = run(setup, LoadOptions(jps=jps)).record
            print(f"{policy} {jps}/s: {record['job_s']['mean']:.2f} s", file=sys.stderr, flush=True)
            rows.append(
                {
                    "policy": policy,
                    "jps": jps,
                    "published_s": expected_s,
                    "simulated_s": record["job_s"]["mean"],
                    "error": record["job_s"]["mean"] / expected_s - 1,
                    "turn_latency_ms": {
                        turn: 1000 * means["latency_s"] for turn, means in record["by_turn"].items()
                    },
                }
            )
    return rows


def format_job_times(rows: list[dict[str, Any]]) -> str:
    lines = ["| policy | jobs/s | published, s | simulated, s | error |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['policy']} | {row['jps']} | {row['published_s']:.2f} | {row['simulated_s']:.2f} "
        f"| {row['error']:+.1%} |"
        for row in rows
    ]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        errors = [abs(row["error"]) for row in rows if row["policy"] == policy]
        lines.append(
            f"| **{policy}** | | | | median {statistics.median(errors):.1%}, worst {max(errors):.1%} |"
        )
    return "\n".join(lines)


def format_turns(published: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [
        "| policy | jobs/s | turn | published, ms | simulated, ms | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        expected = published["turn_latency_ms"].get(str(row["jps"]), {}).get(row["policy"], {})
        for turn, latency_ms in expected.items():
            simulated_ms = row["turn_latency_ms"][turn]
            lines.append(
                f"| {row['policy']} | {row['jps']} | {turn} | {latency_ms:,} | {simulated_ms:,.0f} "
                f"| {simulated_ms / latency_ms - 1:+.0%} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())

"""How many agent jobs a second can one GPU take, if 95 of 100 jobs must end within a limit?

    python examples/plan_capacity.py

`tenuto plan` answers the question for a fleet. This script shows the curve behind the answer.
"""

from __future__ import annotations

import tenuto

LIMIT_S = 60.0
GPUS = ["A100-40", "H100"]
LOADS = [0.5, 1.0, 2.0]


def main() -> None:
    result = tenuto.compare(
        policies=["stock", "tenuto"], gpu=GPUS, workload="ab8", jps=LOADS, seeds=[1], window_s=120.0
    )
    print(f"{'GPU':>8} {'policy':>8}   P95 job time, seconds, at so many jobs a second")
    for gpu in GPUS:
        for policy in ("stock", "tenuto"):
            records = [r for r in result.records if r["gpu"] == gpu and r["policy"] == policy]
            # An overloaded GPU has no such time: the longer the load lasts, the longer its jobs take.
            keeps_up = {r["jps"]: r["finished_jps"] >= 0.9 * r["offered_jps"] for r in records}
            p95_s = {r["jps"]: r["job_s"]["p95"] for r in records}
            fits = [jps for jps in LOADS if keeps_up[jps] and p95_s[jps] <= LIMIT_S]
            curve = "  ".join(
                f"{jps:g}: {f'{p95_s[jps]:.1f}' if keeps_up[jps] else 'overloaded':>10}" for jps in LOADS
            )
            print(
                f"{gpu:>8} {policy:>8}   {curve}   up to {max(fits, default=0):g} jobs/s within {LIMIT_S:g} s"
            )


if __name__ == "__main__":
    main()

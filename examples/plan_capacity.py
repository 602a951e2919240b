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
        policies=["stock", "tenuto"], gpu=GPUS, workload="ab8", jps=LOADS, seeds=[1], window_s=20.0
    )
    print(f"{'GPU':>8} {'policy':>8}   P95 job time, seconds, at so many jobs a second")
    for gpu in GPUS:
        for policy in ("stock", "tenuto"):
            records = [r for r in result.records if r["gpu"] == gpu and r["policy"] == policy]
            p95_s = {r["jps"]: r["job_s"]["p95"] for r in records}
            fits = [jps for jps in LOADS if p95_s[jps] <= LIMIT_S]
            curve = "  ".join(f"{jps:g}: {p95_s[jps]:6.1f}" for jps in LOADS)
            print(
                f"{gpu:>8} {policy:>8}   {curve}   up to {max(fits, default=0):g} jobs/s within {LIMIT_S:g} s"
            )


if __name__ == "__main__":
    main()

"""How the time and the memory of a fleet's simulation grow with the number of sessions.

    python -m experiments.fleet.scale                       256 engines, 500 to 2,000 sessions
    python -m experiments.fleet.scale --sessions 100000     the real thing: half an hour on one quiet core

Each size runs in a process of its own. Seconds are the processor's; the columns per turn should not grow.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time

from tenuto.sim.run import run
from tenuto.sim.setup import Fleet, Setup
from tenuto.workload import LoadOptions

JPS_EACH = 1.5
"""Jobs per second and engine: about two thirds of what it can do."""


def measure(num_engines: int, num_sessions: int, router: str, policy: str) -> tuple[int, float, float]:
    """Turns, seconds and peak megabytes of one run."""
    setup = Setup(
        policy=policy,
        step_cost="roofline",
        host_gb=0.0,
        offload="none",
        fleet=Fleet(servers=("",) * num_engines, router=router),
    )
    jps = JPS_EACH * num_engines
    started_s = time.process_time()
    outcome = run(setup, LoadOptions(jps=jps, window_s=num_sessions / jps, arrival="fixed"))
    cpu_s = time.process_time() - started_s
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return len(outcome.turns), cpu_s, peak_mb


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--sessions", default="500,1000,2000")
    parser.add_argument("--router", default="tenuto")
    parser.add_argument("--policy", default="stock")
    given = parser.parse_args()
    print(f"{given.engines} engines, router {given.router}, policy {given.policy}")
    print(f"{'sessions':>8} {'turns':>8} {'s':>8} {'ms/turn':>8} {'MB':>7} {'kB/turn':>8}")
    context = multiprocessing.get_context("spawn")
    first: tuple[int, float] | None = None
    for size in map(int, given.sessions.split(",")):
        with context.Pool(1) as pool:
            turns, cpu_s, peak_mb = pool.apply(measure, (given.engines, size, given.router, given.policy))
        first = first or (turns, peak_mb)
        grown = (peak_mb - first[1]) * 1024 / (turns - first[0]) if turns > first[0] else float("nan")
        print(
            f"{size:8} {turns:8} {cpu_s:8.1f} {1000 * cpu_s / turns:8.2f} {peak_mb:7.0f} {grown:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""The first published comparison of the Continuum prototype (RTX 5090), simulated: docs/fidelity.md.

    python -m experiments.tables.first_ab

Published are lengths of prompts, times of tools, and mean job times; not the answers' lengths, and not
whether jobs share their text. So each is tried. Where jobs share it, their answers are the same too, as those
of a model without sampling are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.command_line import make_parser
from experiments.results.tables import format_markdown
from tenuto.sim.hardware.gpus import get_gpu
from tenuto.sim.run import Extras, run
from tenuto.sim.setup import Setup
from tenuto.workload.generators.fixed_lengths import (
    ANSWER_TOKENS,
    MAX_ANSWER_TOKENS,
    TRACE8_PROMPT_TOKENS,
    trace8_jobs,
)
from tenuto.workload.load import LoadOptions
from tenuto.workload.schema import Workload
from tenuto.workload.transform import arrival_times, within

PUBLISHED = json.loads(
    (Path(__file__).parents[1] / "published" / "trace8_rtx5090.json").read_text(encoding="utf-8")
)
SYSTEMS = {"stock": "stock", "continuum-fixed": "continuum-fixed"}
"""What simulates each published system: the model's answers there are bash blocks, so the prototype pins."""
LATENCIES_MS = PUBLISHED["turn_latency_ms"]["8"]["stock"]
LONGEST_MS = max(LATENCIES_MS)
ANSWERS = {
    "10 tokens": ANSWER_TOKENS,
    "30 tokens": (30,) * len(TRACE8_PROMPT_TOKENS),
    "as the turns' times": [round(MAX_ANSWER_TOKENS * each_ms / LONGEST_MS) for each_ms in LATENCIES_MS],
    "150 tokens": (MAX_ANSWER_TOKENS,) * len(TRACE8_PROMPT_TOKENS),
}
"""The third: as if a turn's published time at 8/s were its answer's, and the longest the longest allowed."""
ROWS = [(False, "10 tokens"), (False, "30 tokens"), *((True, answers) for answers in ANSWERS)]
"""Whether jobs share their text, and their answers."""
PARAMETERS = 8.03e9
"""Of Llama-3.1-8B. A token's matrices take two operations for each."""


def simulate(
    system: str, jps: float, window_s: float, answer_tokens: Sequence[int], *, shares_text: bool
) -> float:
    """The mean job time in seconds."""
    arrivals = within(arrival_times("poisson", jps, 42), window_s)
    jobs = trace8_jobs(arrivals, 42, answer_tokens=answer_tokens, shares_text=shares_text)
    setup = Setup(
        gpu="RTX5090", policy=SYSTEMS[system], host_gb=0.0, max_model_len=4096, async_scheduling=False
    )
    load = LoadOptions(workload="trace8", jps=jps, window_s=window_s)
    record = run(setup, load, extras=Extras(workload=Workload("trace8", tuple(jobs)))).record
    mean_s = record["job_s"]["mean"]
    print(
        f"{system} {jps}/s, {answer_tokens} tokens, {shares_text=}: {mean_s:.2f} s",
        file=sys.stderr,
        flush=True,
    )
    return float(mean_s)


def main() -> int:
    parser = make_parser(__doc__)
    parser.parse_args()
    rates = list(zip(PUBLISHED["jps"], PUBLISHED["window_s"], strict=True))
    heads = ["text", "answers", *(f"{system}, {jps}/s" for jps, _ in rates for system in SYSTEMS)]
    means_s = PUBLISHED["avg_duration_s"]
    lines = [
        ["published", "at most 150", *(f"{means_s[s][i]:.2f}" for i in range(len(rates)) for s in SYSTEMS)]
    ]
    for shares_text, answers in ROWS:
        found = [
            simulate(system, jps, window_s, ANSWERS[answers], shares_text=shares_text)
            for jps, window_s in rates
            for system in SYSTEMS
        ]
        text = "the same in all jobs" if shares_text else "each job's own"
        lines.append([text, answers, *(f"{mean_s:.2f}" for mean_s in found)])
    print(format_markdown(heads, lines))
    peak = get_gpu("RTX5090").flops
    for jps, _ in rates:
        needed = 2 * PARAMETERS * TRACE8_PROMPT_TOKENS[-1] * jps
        print(
            f"\nAt {jps}/s, prompts that are computed once each take {needed / 1e12:.0f} TFLOP/s; "
            f"the card does {peak / 1e12:.0f} at most."
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The tables of docs/results.md: their rows, and who competes."""

from __future__ import annotations

from experiments.results.agents import (
    BFCL_LOADS,
    SWE_LOADS,
    make_70b,
    make_ab8,
    make_ablation,
    make_agents,
    make_weka,
)
from experiments.results.mixed import make_mixed
from experiments.results.row import OUT, ROOT, Row, Table
from experiments.results.sensitivity import make_sensitivity
from experiments.results.settings import BOUND, STEPS

__all__ = ["DEFAULTS", "FACTORS", "OPTIONS", "OUT", "ROOT", "TABLES", "Row", "Table"]

LAYERED = (
    *("stock", "stock-tuned", "offload-async", "continuum/async", "contextserve/async", "infercept/asked"),
    *("autellix+", "sglang-lpm/async", "thunderagent/async", "concur/async", "break-even/asked", "tenuto"),
)
"""With the host tier, where the row has one, also for those whose authors left it out: POLICY/OFFLOAD."""
RACE = (*LAYERED[:-1], BOUND, "tenuto")
"""The competitors of the tables where everybody stands at its best size of steps, and the bound."""
FEW = ("stock", "stock-tuned", "continuum/async", "thunderagent/async", "concur/async", "tenuto")
FACTORS = (0.25, 4.0)
DEFAULTS = {"stretch": 500.0, "max_idle_s": 600.0, "patience": 4.0}
"""The options of `tenuto`; a test holds them against the policy."""
OPTIONS = (
    "tenuto",
    *(f"tenuto?{key}={value * factor:g}" for key, value in DEFAULTS.items() for factor in FACTORS),
)
PARTS = ("FirstJobFirst", "FullSteps", "NoRetention", "NoPrice", "AnyoneTakes", "NoTier", "AlwaysLoads")

TABLES = {
    "mixed": Table(
        "Traffic that no agent benchmark was made for, on an H100 unless said",
        "`--workload` has a generator of each (see [workloads](workloads.md)); bursts are `swe-bench` with "
        "`--arrival gamma:4`.",
        RACE,
        make_mixed,
        STEPS,
    ),
    "ab8": Table(
        "ab8: 8 turns, 45 s of arrivals",
        "Each GPU with the KV cache and the host memory of the published sweeps.",
        RACE,
        make_ab8,
        STEPS,
    ),
    "swe-bench": Table(
        "swe-bench, 90 s of arrivals",
        "From an engine that is hardly busy to about three times what it can do.",
        RACE,
        lambda: make_agents("swe-bench", SWE_LOADS),
        STEPS,
    ),
    "bfcl": Table(
        "bfcl, 90 s of arrivals", "As before.", RACE, lambda: make_agents("bfcl", BFCL_LOADS), STEPS
    ),
    "70b": Table("Llama-3.1-70B on 4 H100s, ab8", "200 GiB of host memory.", RACE, make_70b, STEPS),
    "weka": Table(
        "Real Claude Code sessions (Weka), 300 s of arrivals",
        "150 sessions in their order; turns longer than the model's context are left out.",
        (*FEW[:-1], BOUND, "tenuto"),
        make_weka,
        STEPS,
    ),
    "sensitivity": Table(
        "Sensitivity: swe-bench on an H100 at 2 jobs/s, 60 s, no host tier",
        "Hints: `job` the job's id alone, `none` nothing (jobs are recognised by content), `tool-time` the "
        "true tool time, `wrong` ten times too long and too short in turns; without a word the job's id and "
        "its last turn. Turns: texts stay, so prompts grow with their number. Chats: people who answer "
        "after half a minute, with no tool and no hint but the id.",
        FEW,
        make_sensitivity,
    ),
    "options": Table(
        "The options of `tenuto`, a quarter and four times their defaults",
        "Results should not hang on them: in the figure each option's ratio to its default, the mean over "
        "the rows and the range.",
        OPTIONS,
        make_ablation,
    ),
    "ablation": Table(
        "What each part of `tenuto` is worth",
        "`experiments/ablation.py` has the parts: `FirstJobFirst` orders by arrival, `FullSteps` leaves the "
        "step budget alone, `NoRetention` frees a finished turn, `NoPrice` never gives up a lease for its "
        "tool's time, `AnyoneTakes` lets any turn take any lease, `NoTier` has no host memory, `AlwaysLoads` "
        "waits for every load. The figures beside a part say what the job takes without it.",
        ("tenuto", *(f"experiments.ablation:{part}" for part in PARTS)),
        make_ablation,
    ),
}

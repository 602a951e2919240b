"""The tables of docs/lab.md: their rows, and who competes."""

from __future__ import annotations

from experiments.results.agents import (
    AB8_LOADS,
    BFCL_LOADS,
    CONTEXT_LOADS,
    SWE_LOADS,
    make_70b,
    make_ab8,
    make_ablation,
    make_agents,
    make_sessions,
    make_small,
    make_weka,
)
from experiments.results.hybrid import make_hybrid
from experiments.results.mixed import make_mixed
from experiments.results.published import GEN4, format_published
from experiments.results.row import Table
from experiments.results.sensitivity import make_sensitivity
from experiments.results.settings import BOUND, STEPS
from experiments.results.step_costs import RIVALS, Races, make_step_costs

LAYERED = (
    *("stock", "stock-tuned", "offload-async", "continuum/async", "contextserve/async", "infercept/asked"),
    *("autellix+", "sglang-lpm/async", "thunderagent/async", "concur/async", "break-even/asked", "tenuto"),
)
"""With the host tier, where the row has one, also for those whose authors left it out: POLICY/OFFLOAD."""
RACE = (*LAYERED[:-1], BOUND, "tenuto")
"""The competitors of the tables where every policy has its best step size, and the bound."""
FEW = (
    *("stock", "stock-tuned", "continuum/async", "sglang-lpm/async", "thunderagent/async", "concur/async"),
    "tenuto",
)
FACTORS = (0.25, 4.0)
DEFAULTS = {"stretch": 500.0}
"""The options of `tenuto` that may be a quarter and four times as large; a test holds them against the
policy. `plain_share` is at most 1, and matters where people ask: docs/tried.md."""
OPTIONS = (
    "tenuto",
    *(f"tenuto?{key}={value * factor:g}" for key, value in DEFAULTS.items() for factor in FACTORS),
)
PARTS = (
    *("FirstJobFirst", "NoPauses", "NoPlainFirst", "NoStanding", "NoLookUps", "FullSteps"),
    *("NoRetention", "NoPrice", "AnyoneTakes", "OrderedTier", "NoTier", "AlwaysLoads"),
)

TABLES = {
    "mixed": Table(
        "Traffic outside the agent benchmarks, on an H100 unless said otherwise",
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
        notes=format_published(AB8_LOADS),
    ),
    "swe-bench": Table(
        "swe-bench, 90 s of arrivals",
        "The loads go from a hardly busy engine to about three times what it can do.",
        RACE,
        lambda: make_agents("swe-bench", SWE_LOADS),
        STEPS,
        notes=GEN4,
    ),
    "bfcl": Table(
        "bfcl, 90 s of arrivals",
        "As before.",
        RACE,
        lambda: make_agents("bfcl", BFCL_LOADS),
        STEPS,
        notes=GEN4,
    ),
    "bfcl-contexts": Table(
        "bfcl, read as contexts, 90 s of arrivals",
        "`bfcl` reads the paper's tokens per job as the sum over all turns. Here they are those of the last "
        "context, scaled by 0.4 as in the paper (see [workloads](workloads.md)).",
        RACE,
        lambda: make_agents("bfcl-contexts", CONTEXT_LOADS),
        STEPS,
        notes=GEN4,
    ),
    "70b": Table("Llama-3.1-70B on 4 H100s, ab8", "200 GiB of host memory.", RACE, make_70b, STEPS),
    "small": Table(
        "GPUs with little memory, 60 s of arrivals",
        "An RTX 5090 holds one to four of these jobs at a time. Steps of 256 tokens compete, too.",
        RACE,
        make_small,
        (*STEPS[:3], 256),
    ),
    "weka": Table(
        "Real Claude Code sessions (Weka), 300 s of arrivals",
        "150 sessions in their order; turns longer than the model's context are left out.",
        (*FEW[:-1], "contextserve/async", "infercept/asked", FEW[-1]),
        make_weka,
        STEPS,
    ),
    "sessions": Table(
        "Real Claude Code sessions (Weka), at their own times and in a small cache",
        "No constant of `tenuto` is chosen without these rows: a change of two of them made no difference on "
        "the random scenarios, and more than doubled what is computed again in the first row.",
        ("stock", "continuum", "tenuto"),
        make_sessions,
        on_screen=False,
    ),
    "hybrid": Table(
        "Models with windows or states: swe-bench, 120 s of arrivals, no host tier",
        "Each at vLLM's default retention interval (0), at an intermediate one, and caching everything "
        "(dense, None); `stock` at its best interval is the best of its three. Step times are a roofline's.",
        ("stock", "continuum", "tenuto"),
        make_hybrid,
        on_screen=False,
    ),
    "sensitivity": Table(
        "Sensitivity: swe-bench on an H100 at 2 jobs/s, 60 s, no host tier",
        "These rows change the machine, the texts, the hints or the jobs. Hints: `none` (jobs are recognised "
        "by content), or `wrong` (tool times ten times too long and too short in turns); without a word the "
        "job's id and its last turn. Turns: texts stay, so prompts grow with their number.",
        FEW,
        make_sensitivity,
        STEPS,
        on_screen=False,
    ),
    "options": Table(
        "The options of `tenuto`, a quarter and four times their defaults",
        "Results should not depend on them: in the figure each option's ratio to its default, the mean over "
        "the rows and the range.",
        OPTIONS,
        make_ablation,
    ),
    "ablation": Table(
        "What each part of `tenuto` is worth",
        "`experiments/ablation.py` has the parts: `FirstJobFirst` orders by arrival, `NoPauses` ignores that "
        "a short turn may be its job's last, `NoPlainFirst` orders plain requests as jobs, `NoStanding` sees "
        "no floods and no crowds and holds everybody's KV, `NoLookUps` ignores what first turns hit, "
        "`FullSteps` leaves the step budget alone, `NoRetention` frees a finished turn, `NoPrice` never "
        "gives up a lease for its tool's time, `AnyoneTakes` lets any turn take any lease, "
        "`OrderedTier` gives up the last job in host "
        "memory first, `NoTier` has no host memory, `AlwaysLoads` waits for every load. The "
        "figures beside a part say what the job takes without it.",
        ("tenuto", *(f"experiments.ablation:{part}" for part in PARTS)),
        make_ablation,
    ),
}

RACES: Races = {
    name: table.make_rows
    for name, table in TABLES.items()
    if table.on_screen and table.is_race and name not in ("weka", "small", "bfcl-contexts")
}
"""The races that run again under other step costs."""
TABLES["step-costs"] = Table(
    "If mixed steps cost less or more",
    "Some rows of each race, under both bounds of what steps cost that mix prefill with decoding (see "
    "[fidelity](fidelity.md#steps-that-mix-prefill-with-decoding)). `tenuto` with adaptive steps over the "
    "best other, and over each rival, each at its best step size under that cost: the geometric mean of "
    "the ratios of mean job times, and in brackets the worst row.",
    (*RIVALS, "tenuto"),
    lambda: make_step_costs(RACES),
    STEPS,
    on_screen=False,
)

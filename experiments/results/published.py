"""What was published of the rows of `ab8`, and what about their machines is not understood."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.results.row import ROOT
from experiments.results.tables import format_markdown

_SWEEPS = [
    json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "experiments" / "published").glob("ab8_*.json"), reverse=True)
]
PUBLISHED: Mapping[str, Mapping[str, Any]] = {sweep["gpu"]: sweep for sweep in _SWEEPS}
"""The sweeps of ab8, by GPU."""
SYSTEMS = {"stock": "stock", "continuum-fixed": "Continuum prototype", "offload-sync": "LMCache 0.3.7"}
RIDDLES: Mapping[tuple[str, float], str] = {
    ("H200", 3): "The prototype took 20.7 s and LMCache 24.3 s where stock took 28.1 s, though nothing is "
    "evicted there, so all three compute the same. Nothing in the simulator makes such a difference. In "
    "another run of theirs stock took 24.5 s and the prototype 23.2 s.",
    ("H100", 6): "One published LMCache job lost its host copies from its sixth turn on. No simulated job "
    "does.",
    ("A100-40", 1): "Stock is simulated 2.5 times too slow, and LMCache 2.1 times too fast: the published "
    "verdict between the two comes out reversed. The cell does not repeat: in other runs of theirs LMCache "
    "took 69.4 s and 27.9 s.",
    ("A100-40", 3): "LMCache is simulated 1.9 times too fast.",
}
"""By machine and jobs/s."""
GEN4 = (
    "**What is not understood.** On the A100-40, whose link is PCIe Gen4, the published LMCache took 1.5 to "
    "2.1 times the simulated time, and lost to stock at two of three loads ([fidelity]"
    "(fidelity.md#what-lmcache-costs)). The rows of A100 and L40S with a host tier may be too good for the "
    "tier in the same way, for every policy that uses it, `tenuto` included."
)


def format_published(loads: Mapping[str, Sequence[float]]) -> str:
    """The published mean job times of these machines at these jobs/s, and the riddles beside them."""
    lines = []
    for gpu, jps in ((gpu, jps) for gpu, rates in loads.items() if gpu in PUBLISHED for jps in rates):
        place = PUBLISHED[gpu]["jps"].index(jps)
        figures = PUBLISHED[gpu]["avg_duration_s"]
        cells = [f"{figures[system][place]:.1f}" if system in figures else "–" for system in SYSTEMS]
        lines.append([f"{gpu}, {jps}/s", *cells, RIDDLES.get((gpu, jps), "")])
    about = (
        "As published, on the same machines: mean job time in seconds, with vLLM 0.10.2, synchronous "
        "scheduling, the default step size, and each system as its authors ran it. These systems are "
        "simulated in [fidelity](fidelity.md#times), beside the same figures. The policies of the table "
        "above are their rules in today's engine."
    )
    heads = ["published, s", *SYSTEMS.values(), "not understood"]
    return "\n\n".join([about, format_markdown(heads, lines), GEN4])

"""Every experiment under one help: `python -m experiments` lists them; a name after it runs one.

A name is the module's, so `python -m experiments tables.fidelity` and `python -m experiments.tables.fidelity`
are the same. The list says what an experiment needs beyond the simulator.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

ROOM = Path(__file__).parent
VLLM = "vLLM"
MODEL = "vLLM and a small model (make demo gets both)"
GROUPS: dict[str, dict[str, str]] = {
    "Results: tables and figures of the docs, simulated": {
        "random_scenarios": "",
        "results": "",
        "results.held_out": "",
        "fleet": "",
        "fleet.scale": "",
        "figures": "",
        "figures.jobs_picture": "",
        "figures.life_picture": "",
        "figures.operator_pictures": "Prometheus (make promtool)",
        "figures.report_picture": "playwright and Chromium",
        "tables.fidelity": "",
        "tables.field_results": "",
        "tables.first_ab": "",
        "tables.mixed_steps": "",
        "tables.tier_pressure": "",
        "tables.shared_prefixes": "",
        "tables.engine_steps": VLLM,
    },
    "Live: real servers with a small model": {
        "live.demo": MODEL,
        "live.cpu_fidelity": MODEL,
        "live.prefetch_ttft": MODEL,
        "attacks.live": MODEL,
    },
    "Routers": {
        "routers": "vllm-router",
        "routers.chats": "vllm-router",
        "routers.fleet_page": "vllm-router, Prometheus and Grafana",
        "routers.ray_fleet": "ray[serve]",
        "routers.mini_swe": MODEL + ", vllm-router, mini-swe-agent",
    },
    "Attacks, soaks, fuzzing: what must hold under hostile clients and faults": {
        "attacks": "",
        "attacks.tenants": VLLM,
        "soak": VLLM,
        "soak.leases": VLLM,
        "fuzz": "",
        "planted_faults": "vLLM for some",
    },
    "Guards of a change": {
        "same_decisions": "",
        "differential": VLLM,
    },
    "Benchmarks: what the hook, the simulator, the bench and the proxy cost, beside a peer": {
        "benchmarks.scheduler_step": VLLM,
        "benchmarks.growth": "",
        "benchmarks.tier_step": VLLM,
        "benchmarks.breakpoints": VLLM,
        "benchmarks.policy_decisions": "",
        "benchmarks.server_throughput": MODEL,
        "benchmarks.client_lag": "",
        "benchmarks.proxy_delay": "",
        "benchmarks.peers": "AISimulate",
        "benchmarks.peer_agreement": "AISimulate",
        "benchmarks.vllm_bench_agreement": VLLM,
        "benchmarks.harnesses": "those of AIPerf, AgentX, GuideLLM and vLLM that are to run",
        "benchmarks.harness_delay": "AIPerf, and vLLM",
    },
    "Tool times: how well they are predicted, and the training of ContextServe's predictor": {
        "tool_times.accuracy": "",
        "tool_times.recorded": "",
        "tool_times.measure_commands": "",
        "tool_times.command_trees": "",
        "tool_times.train_command_times": "scikit-learn",
    },
}


def get_file(name: str) -> Path:
    """The file that runs under this name."""
    path = ROOM.joinpath(*name.split("."))
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def get_summary(name: str) -> str:
    """The first line of its docstring."""
    text = ast.get_docstring(ast.parse(get_file(name).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def show() -> str:
    """All experiments, by what they are for."""
    lines = [(__doc__ or "").partition("\n")[0], "`python -m experiments NAME --help` explains one."]
    for title, names in GROUPS.items():
        lines += ["", title]
        for name, needs in names.items():
            lines.append(f"  {name:<32}{get_summary(name)}" + (f" Needs {needs}." if needs else ""))
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run the command line."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(show())
        return 0
    name = arguments[0]
    known = {each for names in GROUPS.values() for each in names}
    if name not in known:
        near = [each for each in sorted(known) if name.replace("-", "_") in each]
        hint = f"; is it {' or '.join(near)}?" if near else "; `python -m experiments` lists all"
        print(f"experiments: there is no {name!r}{hint}", file=sys.stderr)
        return 2
    sys.argv = [f"python -m experiments {name}", *arguments[1:]]
    module = f"experiments.{name}" + (".__main__" if get_file(name).name == "__main__.py" else "")
    return import_module(module).main() or 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

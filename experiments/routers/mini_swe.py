"""mini-swe-agent, unchanged, through vllm-router to two real vLLM servers: stock, then with Tenuto's plugin.

    make test-clients                       # once: an environment with mini-swe-agent, .venv-clients
    .venv-clients/bin/python -m experiments.routers.mini_swe --vllm .venv/bin/vllm \\
        --router .venv/bin/vllm-router --model .demo/smollm2 [--agents 6] [--steps 5] [--json]

Each agent works on a copy of a tiny project: it sends its conversation, runs the command that the model
answers, and sends the output back. The model is far too small to work on code, so its answers are forced
into the agent's format and choose one of a few commands. Answers are greedy. The clients send no id: for both
arms, `tenuto record --name-jobs` before the router finds the job's name, by which the router pins it.

It prints, for both arms: mean and longest job time, how much of each prompt was cached, and whether every
turn's answer is the same text. An agent's pass rate hangs on nothing else than these answers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from experiments.command_line import make_parser
from experiments.routers.processes import (
    CPU_ENV,
    ON_CPU,
    Running,
    get_free_port,
    run_naming,
    run_router,
    start_all,
)
from tenuto.client.ab import run_server

NAME = "small"
COMMANDS = (
    "sleep 1; ls", "sleep 1; cat parser.py", "sleep 1; cat test_parser.py", "sleep 2; wc -l parser.py",
    "sleep 2; grep -n def parser.py", "sleep 1; head -n 5 test_parser.py",
)  # fmt: skip
FORMAT = (
    r"THOUGHT: [a-z ,]{20,60}\n\n```mswea_bash_command\n("
    + "|".join(command.replace(".", r"\.") for command in COMMANDS)
    + r")\n```"
)
SYSTEM = "You are an engineer. Answer with one thought and one command.\n" + "Work carefully. " * 20
TASK = "{{task}}\n" + "The parser fails on empty input. Find out why and mend it. " * 8
TENUTO = ("--scheduler-cls", "tenuto.vllm.Scheduler", "--middleware", "tenuto.vllm.Middleware")
ARMS = {"stock": (), "tenuto": TENUTO}
PARSER = "def parse(text):\n    head, _, rest = text.partition(':')\n    return head, rest.split(',')\n" * 3
TEST = "from parser import parse\n\ndef test_empty():\n    assert parse('') == ('', [])\n"


def run_vllm(args: argparse.Namespace, folder: Path, arm: str) -> Running:
    port = get_free_port()
    command = [
        args.vllm, "serve", args.model, "--served-model-name", NAME, "--port", str(port), *ON_CPU,
        "--num-gpu-blocks-override", str(args.blocks), "--max-num-seqs", "8",
        "--enable-prompt-tokens-details", *ARMS[arm],
    ]  # fmt: skip
    env = {**CPU_ENV, "OMP_NUM_THREADS": "1"}
    return run_server(command, port, folder / f"{arm}-{port}.log", env=env, limit_s=args.start_limit)


def work(url: str, number: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One agent's job: its time, and of each turn the answer, the prompt tokens and the cached ones."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    project = folder / f"project-{number}"
    project.mkdir()
    (project / "parser.py").write_text(PARSER)
    (project / "test_parser.py").write_text(TEST)
    asked = {"structured_outputs": {"regex": FORMAT}}
    model = LitellmTextbasedModel(
        model_name=f"openai/{NAME}",
        model_kwargs={
            "api_base": f"{url}/v1",
            "api_key": "any",
            "temperature": 0,
            "max_tokens": 120,
            "extra_body": asked,
            "timeout": 900,
        },
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=str(project), timeout=60),
        system_template=SYSTEM,
        instance_template=TASK,
        step_limit=args.steps,
    )
    began_s = time.monotonic()
    agent.run(f"Task {number}.")
    took_s = time.monotonic() - began_s
    answers = [each for each in agent.messages if each["role"] == "assistant"]
    usages = [each["extra"]["response"]["usage"] for each in answers]
    return {
        "job_s": took_s,
        "answers": [each["content"] for each in answers],
        "prompt_tokens": [usage["prompt_tokens"] for usage in usages],
        "cached_tokens": [
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") for usage in usages
        ],
    }


def run_arm(arm: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All agents' jobs on one arm; the agents begin half a second apart."""
    folder = folder / arm
    folder.mkdir()
    with ExitStack() as stack, ThreadPoolExecutor(args.agents) as pool:
        servers = start_all(stack, [run_vllm(args, folder, arm) for _ in range(2)])
        urls = [server.url for server in servers]
        router = stack.enter_context(run_router(folder, urls, "--policy", "consistent_hash"))
        front = stack.enter_context(run_naming(folder, router.url))

        def begin(number: int) -> dict[str, Any]:
            time.sleep(0.5 * number)
            return work(front.url, number, args, folder)

        return list(pool.map(begin, range(args.agents)))


def compare(arms: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The figures of both arms, and how many turns have the same answer."""
    figures: dict[str, Any] = {}
    for arm, jobs in arms.items():
        later = [
            (cached or 0, prompt)
            for job in jobs
            for cached, prompt in zip(job["cached_tokens"][1:], job["prompt_tokens"][1:], strict=True)
        ]
        figures[arm] = {
            "jobs": len(jobs),
            "turns": sum(len(job["answers"]) for job in jobs),
            "mean_job_s": statistics.mean(job["job_s"] for job in jobs),
            "longest_job_s": max(job["job_s"] for job in jobs),
            "cached_share_after_first_turn": sum(c for c, _ in later) / max(1, sum(p for _, p in later)),
        }
    stock, tenuto = ([each for job in jobs for each in job["answers"]] for jobs in arms.values())
    same = sum(a == b for a, b in zip(stock, tenuto, strict=False))
    figures["same_answers"] = {"same": same, "of": max(len(stock), len(tenuto))}
    return figures


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--vllm", required=True, help="the `vllm` command, with Tenuto in its environment")
    parser.add_argument("--router", help="the `vllm-router` command")
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--agents", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=80, help="KV blocks of 32 tokens of each server")
    parser.add_argument("--start-limit", type=float, default=600.0, help="seconds for a server to start")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if args.router:
        os.environ["VLLM_ROUTER"] = args.router
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # litellm reads no other word
    with tempfile.TemporaryDirectory() as name:
        os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", name)
        figures = compare({arm: run_arm(arm, args, Path(name)) for arm in ARMS})
    if args.json:
        print(json.dumps(figures))
    else:
        for arm in ARMS:
            each = figures[arm]
            print(
                f"{arm}: {each['turns']} turns of {each['jobs']} jobs; "
                f"job time mean {each['mean_job_s']:.1f} s, longest {each['longest_job_s']:.1f} s; "
                f"cached {each['cached_share_after_first_turn']:.1%} of the prompts after the first turn"
            )
        print("same answers: {same} of {of} turns".format(**figures["same_answers"]))
    return 0 if figures["same_answers"]["same"] == figures["same_answers"]["of"] else 1


if __name__ == "__main__":
    sys.exit(main())

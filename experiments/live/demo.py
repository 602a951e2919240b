"""The demo: a few agent jobs on real vLLM with a small KV cache, stock and with Tenuto, side by side.

    make demo

Each job is a conversation of several turns through the OpenAI client. After each answer the agent runs a
tool, then sends the whole conversation back. The tool is a sleep and a canned output, because the demo's
model is too small to write tool calls that one could run. The two servers differ only in the scheduler.

Both servers start at the same time, because a start is mostly imports. The jobs then run on one server after
the other; the server that is not measured is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from tenuto.client.ab import run_server
from tenuto.client.address import ServerError
from tenuto.core.reuse import count_computed_tokens, count_missed_tokens, count_reusable_tokens
from tenuto.records.metrics import get_percentile

BLOCK_SIZE = 32
JOB_GAP_S = 0.6
TOOLS = ("ls", "cat", "grep", "git", "find")


@dataclass(frozen=True)
class TurnResult:
    """One turn as its client saw it."""

    job: int
    turn: int
    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    latency_s: float


Arms = dict[str, tuple[list[TurnResult], list[float]]]
"""For each arm: its turns, and how long each job took."""


def say(text: str) -> None:
    # With its newline in one piece: two servers start at the same time.
    print(f"[demo] {text}\n", end="", flush=True)


# The agents.


def make_tool_output(job: int, turn: int, num_words: int) -> str:
    """What the tool printed: text of no other job or turn."""
    rng = random.Random(job * 1000 + turn)
    return " ".join(f"file_{rng.randrange(10000)}.py" for _ in range(num_words // 6))


async def run_job(client: AsyncOpenAI, model: str, job: int, args: argparse.Namespace) -> list[TurnResult]:
    await asyncio.sleep(job * JOB_GAP_S)
    messages: list[Any] = [{"role": "system", "content": "You are a careful software engineer with a shell."}]
    results = []
    for turn in range(args.turns):
        messages.append({"role": "user", "content": make_tool_output(job, turn, args.words)})
        started_s = time.monotonic()
        is_last = turn == args.turns - 1
        answer = await client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=args.output_tokens,
            extra_body={
                "min_tokens": args.output_tokens,
                "vllm_xargs": {
                    "job_id": f"demo-{job}",
                    "tool": TOOLS[turn % len(TOOLS)],
                    "is_last_step": int(is_last),
                },
            },
        )
        usage = answer.usage
        assert usage is not None
        details = usage.prompt_tokens_details
        results.append(
            TurnResult(
                job=job,
                turn=turn + 1,
                prompt_tokens=usage.prompt_tokens,
                hit_tokens=(details.cached_tokens or 0) if details else 0,
                output_tokens=usage.completion_tokens,
                latency_s=time.monotonic() - started_s,
            )
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        if not is_last:
            await asyncio.sleep(args.tool_seconds)
    return results


async def run_jobs(url: str, args: argparse.Namespace) -> tuple[list[TurnResult], list[float]]:
    """All jobs at once; their turns, and each job's completion time."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        model = (await client.models.list()).data[0].id
        # One request outside the measurement: the first forward pass of a process is slow.
        await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Say hello to the operator."}], max_tokens=4
        )
        num_done = 0

        async def run_one(job: int) -> tuple[list[TurnResult], float]:
            nonlocal num_done
            started_s = time.monotonic() + job * JOB_GAP_S
            results = await run_job(client, model, job, args)
            num_done += 1
            say(f"  job {num_done} of {args.jobs} done")
            return results, time.monotonic() - started_s

        done = await asyncio.gather(*(run_one(job) for job in range(args.jobs)))
    return [turn for turns, _ in done for turn in turns], [jct_s for _, jct_s in done]


# The servers.


@contextmanager
def serve(arm: str, extra: list[str], port: int, args: argparse.Namespace) -> Iterator[str]:
    """A vLLM server for one arm; its URL."""
    command = [
        args.vllm, "serve", args.model, "--served-model-name", "demo", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE),
        "--num-gpu-blocks-override", str(args.blocks), "--max-model-len", "2048", "--max-num-seqs", "8",
        "--max-num-batched-tokens", "512", "--enable-prompt-tokens-details", *extra, *args.vllm_arg,
    ]  # fmt: skip
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    say(f"{arm}: {shlex.join(command)}")
    with run_server(
        command, port, args.out / f"{arm}.log", env=env, say=lambda text: say(f"{arm}: {text}")
    ) as server:
        yield server.url


# What is shown.


def count_recomputed(turns: list[TurnResult]) -> int:
    """Tokens that were computed a second time. Every prompt extends the job's turn before."""
    total = 0
    for before, after in itertools.pairwise(turns):
        if after.job == before.job:
            computed = count_computed_tokens(before.prompt_tokens, before.output_tokens)
            reusable = count_reusable_tokens(computed, computed, after.prompt_tokens, BLOCK_SIZE)
            total += count_missed_tokens(reusable, after.hit_tokens)
    return total


def print_tables(arms: Arms, num_turns: int) -> None:
    print("\nPer turn, mean over the jobs:")
    print(f"{'':>6}{'prompt':>9}" + "".join(f"{arm + ' cached':>16}{arm + ' latency':>17}" for arm in arms))
    for turn in range(1, num_turns + 1):
        row = f"turn {turn}"
        for index, (turns, _) in enumerate(arms.values()):
            these = [t for t in turns if t.turn == turn]
            if index == 0:
                row += f"{statistics.mean(t.prompt_tokens for t in these):>9.0f}"
            row += f"{statistics.mean(t.hit_tokens for t in these):>16.0f}"
            row += f"{statistics.mean(t.latency_s for t in these):>15.2f} s"
        print(row)
    print("\nPer arm:")
    print(f"{'':>8}{'mean job':>12}{'P95 job':>12}{'recomputed tokens':>20}{'prompt tokens':>16}")
    for arm, (turns, jcts) in arms.items():
        print(
            f"{arm:>8}{statistics.mean(jcts):>10.2f} s{get_percentile(jcts, 95):>10.2f} s"
            f"{count_recomputed(turns):>20}"
            f"{sum(t.prompt_tokens for t in turns):>16}"
        )


def print_timeline(trace: Path, job: str) -> None:
    """The blocks of one job, from the scheduler's own trace."""
    print(f"\nBlocks of job {job}, as Tenuto's scheduler recorded them:")
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    events = [e for e in events if e["kind"] == "job" and e["job"] == job]
    start_s = events[0]["now_s"]
    held = 0
    for event in events:
        at = f"{event['now_s'] - start_s:7.2f} s"
        match event["event"]:
            case "started":
                print(f"  {at}  turn {event['turn_number']} starts, {event['num_hit_tokens']} tokens hit")
            case "lease-granted":
                held = event["num_blocks"]
                print(f"  {at}  tool call: {held:>3} blocks held {'█' * held}")
            case "lease-ended":
                lost = held - event["num_blocks"]
                note = f", {lost} taken back for others meanwhile" if lost else ""
                print(f"  {at}  lease ends ({event['reason']}) after {event['held_s']:.2f} s{note}")
                held = 0
            case "finished":
                print(f"  {at}  turn {event['turn_number']} finished")
    print(f"  at the end: {held} blocks held")


def run_arms(extras: dict[str, list[str]], args: argparse.Namespace) -> Arms:
    """Start all servers together, then run the same jobs on one after the other."""
    with ExitStack() as servers:
        with ThreadPoolExecutor() as pool:
            starts = {
                arm: pool.submit(servers.enter_context, serve(arm, extra, args.port + index, args))
                for index, (arm, extra) in enumerate(extras.items())
            }
        urls = {arm: start.result() for arm, start in starts.items()}
        arms = {}
        for arm, url in urls.items():
            say(f"{arm}: {args.jobs} jobs of {args.turns} turns, tools of {args.tool_seconds:g} s")
            arms[arm] = asyncio.run(run_jobs(url, args))
        return arms


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".demo/smollm2", help="model folder or name")
    parser.add_argument("--vllm", default=str(Path(sys.executable).parent / "vllm"), help="the vllm to run")
    parser.add_argument("--vllm-arg", action="append", default=[], help="one more argument for vLLM")
    parser.add_argument("--policy", default="tenuto", help="Tenuto's policy (see `tenuto policies`)")
    parser.add_argument(
        "--port", type=int, default=8077, help="port of the first server; the second has the next"
    )
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--words", type=int, default=130, help="length of each tool output")
    parser.add_argument("--output-tokens", type=int, default=12)
    parser.add_argument("--tool-seconds", type=float, default=1.0)
    parser.add_argument("--blocks", type=int, default=86, help=f"KV cache blocks of {BLOCK_SIZE} tokens")
    parser.add_argument("--out", type=Path, default=Path(".demo/out"), help="folder for logs and records")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    trace = (args.out / "tenuto-trace.jsonl").resolve()
    trace.unlink(missing_ok=True)
    config = json.dumps({"tenuto": {"policy": args.policy, "trace": str(trace)}})
    extras: dict[str, list[str]] = {
        "stock": [],
        "tenuto": ["--scheduler-cls", "tenuto.vllm.Scheduler", "--additional-config", config],
    }
    try:
        arms = run_arms(extras, args)
    except ServerError as error:
        raise SystemExit(f"[demo] {error}") from None
    print_tables(arms, args.turns)
    print_timeline(trace, "demo-0")
    records = {
        arm: {"job_durations_s": jcts, "turns": [asdict(t) for t in turns]}
        for arm, (turns, jcts) in arms.items()
    }
    (args.out / "records.json").write_text(json.dumps(records, indent=1))
    print(f"\nAll figures: {args.out / 'records.json'}; logs and the scheduler's trace are beside it.")


if __name__ == "__main__":
    main()

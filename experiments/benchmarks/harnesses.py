"""Load harnesses that others wrote, against a server with Tenuto: does each report what the server counted?

    python -m experiments.benchmarks.harnesses                              # a simulated server, slowed down
    python -m experiments.benchmarks.harnesses --url http://localhost:8000 --tokenizer .demo/smollm2

docs/harnesses.md says how to install them and what each cannot see. Commands are looked for in the folders of
$TENUTO_TEST_HARNESSES, then on the PATH; a harness that is not there is left out. Each sends a few sessions.
Its own report is put beside the growth of the server's counters: requests, tokens, sessions, and the means of
TTFT and of whole requests. Leases that were hit show that the server knew each session's turns. Exit status 0
if all counts are equal and all times agree within 2 %.

The simulated server is slow, so that first tokens take some ten seconds. Beside them,
what a busy machine adds is small.

A server that has other clients counts their requests too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from experiments.command_line import make_parser
from experiments.json_lines import read_lines
from experiments.routers.processes import run_engine
from tenuto.client.metrics import Page, parse_page, try_get_sim_speed
from tenuto.workload.convert import FORMATS, write_trace
from tenuto.workload.load import LoadOptions, make_workload

ENGINE = (
    *("--gpu", "H100", "--model", "llama-3.1-8b", "--step-cost", "roofline", "--kv-tokens", "200000"),
    *("--policy", "continuum-fixed", "--option", "ttl_s=600", "--answer-tokens", "16"),
)
"""Room for everything, and leases that outlast every pause: only what is known of a session decides."""
SPEED = 0.002
"""Of the simulated server: first tokens take some ten seconds, beside which a busy machine is quick."""
TOLERANCE = 0.02
"""By which a mean time of a harness may be off."""
HINT = {"vllm_xargs": {"tool": "bash"}}
"""No harness's answers call tools, so each request says that its answer will."""
TURNS, STREAMS, OUTPUT_TOKENS = 4, 3, 5


class HarnessError(Exception):
    """A harness did not run to its end."""


@dataclass(frozen=True)
class Server:
    """What the harnesses talk to."""

    url: str
    model: str
    tokenizer: str
    speed: float = 1.0
    """Simulated seconds per real second."""


@dataclass(frozen=True)
class Figures:
    """What was sent and answered, as one side says; times are means in real seconds."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    latency_s: float
    hits: int
    """Turns that came back to what was kept for them; of a harness, those after a session's first."""


@dataclass(frozen=True)
class Harness:
    """One way to run one command."""

    command: str
    run: Callable[[str, Server, Path], Figures]
    """Run it; what it says. Raises HarnessError with its output if it fails."""
    knows_sessions: bool = True
    """Whether the server can tell which of its requests follow each other."""
    streams: bool = True
    """Whether first tokens are seen. The simulated server sends a tool's call whole, with its last token."""


# AIPerf, and AgentX, which is built on it.


def run_aiperf_turns(command: str, server: Server, folder: Path) -> Figures:
    """Made-up conversations, recognised by what they say."""
    more = [
        "--conversation-num", str(STREAMS), "--conversation-turn-mean", str(TURNS),
        "--conversation-turn-stddev", "1", "--conversation-turn-delay-mean", "100",
        "--synthetic-input-tokens-mean", "300",
        "--output-tokens-mean", str(OUTPUT_TOKENS), "--random-seed", "7",
    ]  # fmt: skip
    return _run_aiperf(command, server, folder, more)


def run_aiperf_agentx(command: str, server: Server, folder: Path) -> Figures:
    """AIPerf's agentic scenario on a folder that `tenuto convert --to weka` wrote."""
    return run_agentx(command, server, folder, "--scenario", "inferencex-agentx-mvp")


def run_agentx(command: str, server: Server, folder: Path, *more: str) -> Figures:
    """The same sessions in AgentX's own command, whose scenario is on by itself."""
    trace = _write_sessions(folder / "sessions")
    all_options = [
        *more, "--unsafe-override", "--benchmark-duration", "60", "--input-file", str(trace),
        "--custom-dataset-type", "weka-trace", "--session-header", "X-Session-ID",
    ]  # fmt: skip
    return _run_aiperf(command, server, folder, all_options)


def _run_aiperf(command: str, server: Server, folder: Path, more: Sequence[str]) -> Figures:
    out = folder / "aiperf"
    _run(
        [
            command, "profile", "--model", server.model, "--url", server.url, "--endpoint-type", "chat",
            "--streaming", "--tokenizer", server.tokenizer, "--use-server-token-count",
            "--extra-inputs", json.dumps({"ignore_eos": True, **HINT}), "--concurrency", str(STREAMS),
            "--ui", "none", "--artifact-dir", str(out), "--no-gpu-telemetry", "--no-server-metrics", *more,
        ]
    )  # fmt: skip
    rows = read_lines(out / "profile_export.jsonl")
    return _make_figures(
        sessions=[row["metadata"]["x_correlation_id"] for row in rows],
        prompts=[row["metrics"]["input_sequence_length"]["value"] for row in rows],
        outputs=[row["metrics"]["output_sequence_length"]["value"] for row in rows],
        ttfts_s=[row["metrics"]["time_to_first_token"]["value"] / 1000 for row in rows],
        latencies_s=[row["metrics"]["request_latency"]["value"] / 1000 for row in rows],
    )


# GuideLLM.


def run_guidellm_turns(command: str, server: Server, folder: Path) -> Figures:
    """Made-up conversations, recognised by what they say."""
    data = {"kind": "synthetic_text", "prompt_tokens": 300, "output_tokens": OUTPUT_TOKENS, "turns": TURNS}
    profile = f"kind=concurrent,streams={STREAMS}"
    return _run_guidellm(command, server, folder, data, profile, num_requests=STREAMS * TURNS)


def run_guidellm_weka(command: str, server: Server, folder: Path) -> Figures:
    """Sessions that `tenuto convert --to weka` wrote, into one file."""
    trace = _write_sessions(folder / "sessions.jsonl")
    data = {"kind": "weka", "source": {"kind": "json_file", "path": str(trace)}}
    num_requests = sum(len(each["requests"]) for each in read_lines(trace))
    return _run_guidellm(command, server, folder, data, "kind=replay", num_requests=num_requests)


def _run_guidellm(
    command: str, server: Server, folder: Path, data: Mapping[str, Any], profile: str, *, num_requests: int
) -> Figures:
    out = folder / "guidellm.json"
    backend = {
        "kind": "openai_http",
        "target": server.url,
        "model": server.model,
        "request_format": "/v1/chat/completions",
        "extras": {"body": HINT},
    }
    _run(
        [
            command, "run", "--backend", json.dumps(backend), "--profile", profile,
            "--constraint", f"kind=max_requests,count={num_requests}", "--data", json.dumps(data),
            "--tokenizer", f"kind=hf_auto,model={server.tokenizer}", "--output", f"kind=json,path={out}",
            "--disable-console",
        ]
    )  # fmt: skip
    rows = json.loads(out.read_text(encoding="utf-8"))["benchmarks"][0]["requests"]["successful"]
    return _make_figures(
        sessions=[row["info"]["conversation_id"] for row in rows],
        prompts=[row["prompt_tokens"] for row in rows],
        outputs=[row["output_tokens"] for row in rows],
        ttfts_s=[row["time_to_first_token_ms"] / 1000 for row in rows],
        latencies_s=[row["request_latency"] for row in rows],
    )


# vllm bench serve.


def run_vllm_bench(command: str, server: Server, folder: Path) -> Figures:
    """Single requests of random text: it has no conversations."""
    _run(
        [
            command, "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
            "--base-url", server.url, "--model", server.model, "--tokenizer", server.tokenizer,
            "--dataset-name", "random", "--random-input-len", "300",
            "--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(2 * STREAMS),
            "--max-concurrency", str(STREAMS), "--ignore-eos",
            "--disable-tqdm", "--percentile-metrics", "ttft,e2el", "--save-result", "--save-detailed",
            "--result-dir", str(folder), "--result-filename", "vllm.json",
        ]
    )  # fmt: skip
    said = json.loads((folder / "vllm.json").read_text(encoding="utf-8"))
    return _make_figures(
        sessions=range(said["completed"]),
        prompts=said["input_lens"],
        outputs=said["output_lens"],
        ttfts_s=said["ttfts"],
        latencies_s=[said["mean_e2el_ms"] / 1000],
    )


HARNESSES = {
    "AIPerf, conversations": Harness("aiperf", run_aiperf_turns),
    "AIPerf, AgentX scenario": Harness("aiperf", run_aiperf_agentx),
    "AgentX": Harness("agentx", run_agentx),
    "GuideLLM, conversations": Harness("guidellm", run_guidellm_turns),
    "GuideLLM, Weka": Harness("guidellm", run_guidellm_weka, knows_sessions=False, streams=False),
    "vllm bench serve": Harness("vllm", run_vllm_bench),
}


def _make_figures(
    *,
    sessions: Sequence[Any],
    prompts: Sequence[int],
    outputs: Sequence[int],
    ttfts_s: Sequence[float],
    latencies_s: Sequence[float],
) -> Figures:
    return Figures(
        requests=len(sessions),
        prompt_tokens=sum(map(int, prompts)),
        output_tokens=sum(map(int, outputs)),
        ttft_s=fmean(ttfts_s),
        latency_s=fmean(latencies_s),
        hits=len(sessions) - len(Counter(sessions)),
    )


def _write_sessions(out: Path) -> Path:
    load = LoadOptions(workload="ab8", jps=2, max_jobs=6, max_turns=3, scale_lengths=0.1, scale_tools=0.1)
    chosen = FORMATS["weka"]
    write_trace(out, make_workload(load).jobs, chosen, chosen.block_size)
    return out


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=_make_environment(), timeout=1500
    )
    if done.returncode:
        raise HarnessError(
            f"{command[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )


def _make_environment() -> dict[str, str]:
    # A harness has an environment of its own, in which nothing of ours may be found.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # GuideLLM starts a process per stream, and gives up if they take long.
    return {**kept, "GUIDELLM__MAX_WORKER_PROCESSES": "1"}


# The server's side.


def measure(harness: Harness, command: str, server: Server, folder: Path) -> tuple[Figures, Figures]:
    """Run a harness; what it says, and what the server counted meanwhile."""
    before = _read_metrics(server)
    said = harness.run(command, server, folder)
    after = _read_metrics(server)

    def count(name: str, **labels: str) -> float:
        return (after.total(name, **labels) or 0.0) - (before.total(name, **labels) or 0.0)

    def get_mean(name: str) -> float:
        return count(f"{name}_sum") / max(1.0, count(f"{name}_count")) / server.speed

    counted = Figures(
        requests=round(count("vllm:e2e_request_latency_seconds_count")),
        prompt_tokens=round(count("vllm:prompt_tokens_total")),
        output_tokens=round(count("vllm:generation_tokens_total")),
        ttft_s=get_mean("vllm:time_to_first_token_seconds"),
        latency_s=get_mean("vllm:e2e_request_latency_seconds"),
        hits=round(count("tenuto:leases_ended_total", reason="hit")),
    )
    return said, counted


def _read_metrics(server: Server) -> Page:
    return parse_page(httpx.get(f"{server.url}/metrics").text, time.time())


def agree(harness: Harness, said: Figures, counted: Figures) -> bool:
    """Whether all counts are equal, and the times close. Hits count only where a server can tell sessions."""
    names = ["requests", "prompt_tokens", "output_tokens", *(["hits"] if harness.knows_sessions else [])]
    return all(getattr(said, name) == getattr(counted, name) for name in names) and all(
        abs(ratio - 1) <= TOLERANCE for ratio in compare_times(harness, said, counted).values()
    )


def compare_times(harness: Harness, said: Figures, counted: Figures) -> dict[str, float]:
    """The ratio of each mean time that both sides see; infinite if the server timed nothing."""
    names = ["latency_s", *(["ttft_s"] if harness.streams else [])]
    return {
        name: getattr(said, name) / getattr(counted, name) if getattr(counted, name) else math.inf
        for name in names
    }


def find_command(name: str) -> str | None:
    """A harness's command: in the folders of $TENUTO_TEST_HARNESSES, beside this Python, or on the PATH."""
    folders = [os.environ.get("TENUTO_TEST_HARNESSES", ""), str(Path(sys.executable).parent)]
    return shutil.which(name, path=os.pathsep.join(folders)) or shutil.which(name)


def make_tokenizer(folder: Path) -> str:
    """A small tokenizer with a chat template, made here: harnesses want one, and look for others online."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 7))) for _ in range(3000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|end|>")
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(folder)


@contextmanager
def run_simulated(folder: Path, speed: float) -> Iterator[Server]:
    """Run a simulated server with a tokenizer that harnesses can load."""
    tokenizer = make_tokenizer(folder / "tokenizer")
    with run_engine(folder, *ENGINE, "--speed", str(speed), "--tokenizer", tokenizer) as server:
        yield look_at(server.url, tokenizer)


def look_at(url: str, tokenizer: str) -> Server:
    """The server at a URL."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    return Server(url, model, tokenizer, try_get_sim_speed(httpx.get(f"{url}/metrics").text) or 1.0)


# Words.


def format_row(name: str, said: Figures, counted: Figures) -> str:
    """One line of the table: what both count, and the ratios of what both timed."""
    cells = [
        str(one) if one == other else f"{one} / {other}"
        for one, other in (
            (said.requests, counted.requests),
            (said.prompt_tokens, counted.prompt_tokens),
            (said.output_tokens, counted.output_tokens),
            (said.hits, counted.hits),
        )
    ]
    for one, other in ((said.ttft_s, counted.ttft_s), (said.latency_s, counted.latency_s)):
        cells.append(f"{other:.3f} s ({one / other:.3f})")
    return f"| {name} | {' | '.join(cells)} |"


HEAD = """\
| harness | requests | prompt tokens | output tokens | later turns, hits | TTFT (ratio) | request (ratio) |
|---|---|---|---|---|---|---|"""


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--url", help="a server with Tenuto; default: a simulated one")
    parser.add_argument("--tokenizer", help="the model's folder; needed with --url")
    parser.add_argument("--speed", type=float, default=SPEED, help="of the simulated server (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=HARNESSES, default=list(HARNESSES), metavar="NAME")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if args.url is not None and args.tokenizer is None:
        raise SystemExit("--url: give --tokenizer too, the folder of the server's model")
    results: dict[str, Any] = {}
    are_equal = True
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        simulated = run_simulated(folder, args.speed)
        given = None if args.url is None else look_at(args.url, str(Path(args.tokenizer).resolve()))
        with simulated if given is None else nullcontext(given) as server:
            for number, chosen in enumerate(args.only):
                harness = HARNESSES[chosen]
                command = find_command(harness.command)
                if command is None:
                    print(f"{chosen}: left out, there is no {harness.command} here", file=sys.stderr)
                    continue
                own = folder / str(number)
                own.mkdir()
                try:
                    said, counted = measure(harness, command, server, own)
                except (HarnessError, subprocess.TimeoutExpired) as error:
                    print(error, file=sys.stderr, flush=True)
                    are_equal = False
                    continue
                print(format_row(chosen, said, counted), flush=True)
                are_equal = are_equal and agree(harness, said, counted)
                results[chosen] = {"harness": asdict(said), "server": asdict(counted)}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if are_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())

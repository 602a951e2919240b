"""The `tenuto` command: argument parsing only; each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from tenuto import __version__
from tenuto.core.errors import TenutoError

Command = Callable[[argparse.Namespace, list[str]], int]
"""Runs a command with its options and what it does not know; returns the exit status."""

DESCRIPTION = """\
Hold an LLM agent's KV cache through its tool calls, inside stock vLLM.

  tenuto serve MODEL              run vLLM with Tenuto's scheduler
  tenuto serve --engine sim       the same server on a simulated GPU
  tenuto verify --url URL         check that a server really holds a job's cache
  tenuto bench --url URL          run agent jobs against any OpenAI-compatible server
  tenuto ab --arm A=… --arm B=…   compare servers or policies under the same load
  tenuto top --url URL            watch a server: leases, countdowns, cache, hits
  tenuto analyze FILE             what happened in a run, what was lost and why
  tenuto simulate                 one workload on a simulated GPU
  tenuto compare                  GPUs x policies x loads x seeds, simulated
  tenuto report RECORDS           one HTML page of what came out, with figures and a timeline
  tenuto record --url URL         write down what agents ask of a server, without their text
  tenuto replay TRACE --url URL   run a recording again, or a scheduler's decisions
  tenuto convert IN OUT           change a trace's format, or import agents' logs
  tenuto plan                     the fewest GPUs for a load
  tenuto profile --url URL        fit how long a server's steps take, for the simulator
  tenuto policies                 what there is to choose from
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors made on purpose are one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What is shown may hold characters that the terminal's encoding has not: names in traces, say.
            stream.reconfigure(errors="backslashreplace")
    parser = build_parser()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["serve"] and "sim" in _get_engines(arguments):
        # A command of its own: it names no model first, and passes nothing on.
        parser, arguments = _make_sim_serve_parser(), arguments[1:]
    first = arguments[1] if arguments[:1] == ["serve"] and len(arguments) > 1 else ""
    if first.startswith("-") and first not in ("-h", "--help"):
        # Options of vLLM's take values that cannot be told from a model that comes later.
        parser.error("name the model first: tenuto serve MODEL [options]")
    parsed, rest = parser.parse_known_args(arguments)
    if rest and parsed.command is not run_serve:
        parser.error(f"unknown argument: {' '.join(rest)}")
    try:
        status = int(parsed.command(parsed, rest))
        sys.stdout.flush()
        return status
    except TenutoError as error:
        print(f"tenuto: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough (`| head`); what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="tenuto", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"tenuto {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_verify(commands)
    _add_clients(commands)
    _add_simulations(commands)
    _add_readers(commands)
    _add_policies(commands)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="run vLLM with Tenuto's scheduler",
        description="Prints the `vllm serve` line and becomes it. Options it does not know go to vLLM.",
        epilog="example: tenuto serve Qwen/Qwen3-8B --policy continuum-fixed --option ttl_s=3 --port 8000; "
        "a simulated GPU instead, without vLLM: tenuto serve --engine sim --help",
        allow_abbrev=False,
    )
    serve.add_argument("model", help="model name or folder, as for vllm serve")
    serve.add_argument("--policy", help="policy name (see `tenuto policies`) or my.module:Class")
    serve.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a policy's option; may be repeated",
    )
    serve.add_argument("--trace", metavar="FILE", help="write a JSONL trace of steps and decisions")
    serve.add_argument("--state", metavar="FILE", help="keep what the policy learned across restarts")
    serve.add_argument("--dry-run", action="store_true", help="print the line and stop")
    serve.set_defaults(command=run_serve)


def _get_engines(arguments: Sequence[str]) -> list[str]:
    """What `--engine` is given, as NAME or =NAME."""
    after = [value for option, value in pairwise(arguments) if option == "--engine"]
    return after + [each.partition("=")[2] for each in arguments if each.startswith("--engine=")]


def _make_sim_serve_parser() -> argparse.ArgumentParser:
    from tenuto.cli.simulation_options import add_machine_options
    from tenuto.sim.server import options

    serve = argparse.ArgumentParser(
        prog="tenuto serve",
        description=options.DESCRIPTION,
        epilog=options.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("--engine", choices=["sim"], required=True, help="the simulated engine")
    options.add_options(serve)
    add_machine_options(serve)
    serve.set_defaults(command=run_sim_serve)
    return serve


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="check that a live server holds a job's KV cache",
        description="Runs one job of five turns against an idle server: exit status 0 only if its KV cache "
        "was held in every tool gap, hit on return, and released at the end.",
        epilog="example: tenuto verify --url http://localhost:8000",
    )
    verify.add_argument("--url", required=True, help="the server, e.g. http://localhost:8000")
    verify.add_argument(
        "--gap", type=float, default=1.0, metavar="S", help="length of each gap (default 1 s)"
    )
    verify.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY"
    )
    verify.add_argument("--json", action="store_true", help="print JSON instead of a table")
    verify.set_defaults(command=run_verify)


def _add_clients(commands: Any) -> None:
    """What talks to a live server."""
    from tenuto.client.ab import options as ab
    from tenuto.client.load import options as bench
    from tenuto.client.profile import options as profile
    from tenuto.proxy import options as record
    from tenuto.report.top import options as top

    add = partial(_add, commands)
    add("bench", "run agent jobs against any OpenAI-compatible server", bench, run_bench)
    add("ab", "compare servers or policies under the same load", ab, lambda parsed, _: ab.run(parsed))
    add("top", "watch a live server", top, lambda parsed, _: top.run(parsed))
    add("record", "write down what agents ask of a server, without their text", record, run_record)
    add("profile", "fit how long a server's steps take, for the simulator", profile, run_profile)


def _add_simulations(commands: Any) -> None:
    """What runs on simulated GPUs."""
    from tenuto.cli.simulation_options import COMPARE, PLAN, SIMULATE

    add = partial(_add, commands)
    add("simulate", "run a workload on a simulated GPU", SIMULATE, run_simulate)
    add("compare", "simulate GPUs x policies x loads x seeds", COMPARE, run_compare)
    add("plan", "the fewest GPUs for a load, simulated", PLAN, run_plan)


def _add_readers(commands: Any) -> None:
    """What reads records and traces."""
    from tenuto.cli import replay
    from tenuto.report.diagnosis import options as analyze
    from tenuto.report.html import options as report
    from tenuto.workload.convert import options as convert

    add = partial(_add, commands)
    text = "say what happened in a run, what was lost and why"
    add("analyze", text, analyze, lambda parsed, _: analyze.run(parsed))
    add("report", "one HTML page from the records of runs", report, run_report)
    text = "run a recording again, or a scheduler's decisions"
    add("replay", text, replay, lambda parsed, _: replay.run(parsed))
    text = "change a trace's format, or import agents' logs"
    add("convert", text, convert, lambda parsed, _: convert.run(parsed))


def _add(commands: Any, name: str, help: str, options: Any, run: Command) -> None:
    """One command; `options` says what it does, gives examples and adds its options."""
    command = commands.add_parser(
        name,
        help=help,
        description=options.DESCRIPTION,
        epilog=options.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_options(command)
    command.set_defaults(command=run)


def _add_policies(commands: Any) -> None:
    policies = commands.add_parser("policies", help="list the policies and their options")
    policies.add_argument("--json", action="store_true", help="print JSON instead of text")
    policies.set_defaults(command=run_policies)


def run_serve(parsed: argparse.Namespace, rest: list[str]) -> int:
    """Become `vllm serve`."""
    from tenuto.core.settings import parse_option
    from tenuto.vllm.launch import build_command, get_environment, get_hints, redact

    settings: dict[str, Any] = {}
    if parsed.policy:
        settings["policy"] = parsed.policy
    if parsed.option:
        settings["options"] = dict(map(parse_option, parsed.option))
    for name in ("trace", "state"):
        if getattr(parsed, name):
            settings[name] = getattr(parsed, name)
    command = build_command(parsed.model, settings, rest)
    print(shlex.join(redact(command)), flush=True)
    for hint in get_hints(command):
        print(f"[serve] {hint}", file=sys.stderr, flush=True)
    if parsed.dry_run:
        return 0
    try:
        os.execvpe(command[0], command, {**os.environ, **get_environment(rest)})
    except FileNotFoundError:
        raise TenutoError(
            "there is no `vllm` command here; install it with: pip install 'tenuto[vllm]'"
        ) from None


def run_sim_serve(parsed: argparse.Namespace, rest: list[str]) -> int:
    """Serve a simulated engine."""
    from tenuto.cli.simulation_options import read_setup
    from tenuto.sim.machine import build
    from tenuto.sim.server.options import read_options

    options = read_options(parsed)
    try:
        from tenuto.sim.server.serve import run_server
    except ImportError as error:
        raise TenutoError(f"{error}; install it with: pip install 'tenuto[sim]'") from error
    if parsed.step_cost == "auto":
        parsed.step_cost = None
    setup = read_setup(parsed, parsed.gpu, parsed.policy)
    setup = dataclasses.replace(setup, block_size=parsed.block_size)
    return run_server(build(setup), options)


def run_verify(parsed: argparse.Namespace, rest: list[str]) -> int:
    """Check a server; 0 if it holds, 1 if it does not, 2 if it could not be checked."""
    import httpx

    from tenuto.client.verify import format_verdict, verify

    def say(text: str) -> None:
        print(f"[verify] {text}", file=sys.stderr, flush=True)

    try:
        verdict = verify(parsed.url, gap_s=parsed.gap, api_key=parsed.api_key, say=say)
    except httpx.HTTPError as error:
        raise TenutoError(f"{parsed.url}: {error or type(error).__name__}") from error
    print(json.dumps(verdict.to_json(), indent=2) if parsed.json else format_verdict(verdict))
    return 0 if verdict.ok else 1


def run_bench(parsed: argparse.Namespace, rest: list[str]) -> int:
    """Measure a server."""
    from tenuto.client.load.options import read_options

    options = read_options(parsed)
    try:
        from tenuto.client.load import run
    except ImportError as error:
        raise TenutoError(f"{error}; install it with: pip install 'tenuto[bench]'") from error
    return run.run_bench(options)


def run_simulate(parsed: argparse.Namespace, rest: list[str]) -> int:
    """Simulate one run."""
    from tenuto.cli import simulations as commands

    return commands.run_simulate(parsed)


def run_compare(parsed: argparse.Namespace, rest: list[str]) -> int:
    """Simulate a sweep."""
    from tenuto.cli import simulations as commands

    return commands.run_compare(parsed)


def run_report(parsed: argparse.Namespace, rest: list[str]) -> int:
    """Draw what came out of runs."""
    from tenuto.report.html.options import read_options

    options = read_options(parsed)
    try:
        from tenuto.report.html import run
    except ImportError as error:
        raise TenutoError(f"{error}; install it with: pip install 'tenuto[report]'") from error
    return run.run_report(options)


def run_record(parsed: argparse.Namespace, rest: list[str]) -> int:
    """Record a server's traffic."""
    from tenuto.proxy.options import read_options

    options = read_options(parsed)
    try:
        from tenuto.proxy.run import run_recording
    except ImportError as error:
        raise TenutoError(f"{error}; install it with: pip install 'tenuto[bench]'") from error
    return run_recording(options)


def run_plan(parsed: argparse.Namespace, rest: list[str]) -> int:
    """Find the fewest GPUs for a load."""
    from tenuto.cli import simulations as commands

    return commands.run_plan(parsed)


def run_profile(parsed: argparse.Namespace, rest: list[str]) -> int:
    """Time a server's steps, fit them, or both."""
    from tenuto.client.profile.options import get_save_path, read_options
    from tenuto.sim.cost.fit import run_fit

    options = read_options(parsed)
    paths = list(parsed.observations)
    if options is not None:
        try:
            from tenuto.client.profile.run import run_profile
        except ImportError as error:
            raise TenutoError(f"{error}; install it with: pip install 'tenuto[bench]'") from error
        paths.append(get_save_path(parsed))
        run_profile(options, paths[-1])
    return run_fit(parsed, paths)


def run_policies(parsed: argparse.Namespace, rest: list[str]) -> int:
    """List the policies."""
    from tenuto.core.policy_list import format_policies, list_policies

    listed = list_policies()
    print(json.dumps(listed, indent=2) if parsed.json else format_policies(listed))
    return 0

"""`tenuto serve`: run vLLM with Tenuto's scheduler. `serve --engine sim` is in `simulations`."""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import MISSING, dataclass
from typing import Any

from tenuto.cli.command import Command, Given, Part, get_flags, policy_options
from tenuto.core.console import say
from tenuto.core.engine import StepTokens, check_step_tokens, read_step_tokens
from tenuto.core.errors import ConfigError, TenutoError, redact, suggest
from tenuto.core.settings import MAX_TIER_GB, Options, option, parse_policy_options


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Options):
    """The options that do not belong to vLLM."""

    model: str = option(
        MISSING, "model name or folder, as for vllm serve", metavar="MODEL", is_positional=True
    )
    policy: str | None = option(
        None,
        "see `tenuto policies`, or file.py:Class, or my.module:Class",
        metavar="NAME",
        shown_default="tenuto",
    )
    options: tuple[str, ...] = policy_options("a policy's option; may be repeated")
    step_tokens: StepTokens | None = option(
        None,
        "most tokens in a step, within vLLM's --max-num-batched-tokens: a number, or adaptive; adaptive:X "
        "weighs a second of a prompt's wait X times as much as one of a decoding turn (1)",
        metavar="adaptive[:X]|N",
        read=read_step_tokens,
        shown_default="what the policy wants: adaptive for tenuto, the whole budget for others",
    )
    trace: str | None = option(None, "write a JSONL trace of steps and decisions", metavar="FILE")
    state: str | None = option(None, "keep what the policy learned across restarts", metavar="FILE")
    host_gb: float | None = option(
        None,
        "also keep KV in this much host memory, for all GPUs of an engine together; the policy decides what "
        "is evicted first",
        metavar="GIB",
        above=0,
        maximum=MAX_TIER_GB,
    )
    disk: str | None = option(
        None, "also keep KV in files in this folder, below host memory", metavar="FOLDER"
    )
    disk_gb: float | None = option(
        None,
        "most disk space that --disk takes",
        metavar="GIB",
        above=0,
        maximum=MAX_TIER_GB,
        shown_default="no limit",
    )
    dry_run: bool = option(False, "print the line and stop")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_step_tokens(self.step_tokens, "--step-tokens")
        if self.disk is None and self.disk_gb is not None:
            raise ConfigError("--disk-gb needs --disk, the folder, and --host-gb, the memory above it")
        if self.host_gb is None and self.disk is not None:
            raise ConfigError("--disk needs host memory above it: add --host-gb")

    def get_settings(self) -> dict[str, Any]:
        """The given options, as the plugin's settings."""
        options = parse_policy_options(self.options, self.policy or "tenuto")
        settings = {
            "policy": self.policy,
            "options": options,
            "step_tokens": self.step_tokens,
            "trace": self.trace,
            "state": self.state,
        }
        return {name: value for name, value in settings.items() if value}


def run(given: Given) -> int:
    """Replace this process with `vllm serve`."""
    from tenuto.vllm.launch import (
        Tiers,
        build_command,
        check_files,
        check_model,
        get_environment,
        get_hints,
    )

    options = given.read(ServeOptions)
    for flag in given.passed_on:
        if near := suggest(flag.partition("=")[0], _FLAGS, cutoff=0.85):
            say("serve", f"{flag} goes to vLLM{near}")
    host_gb = options.host_gb
    tiers = None if host_gb is None else Tiers(host_gb, options.disk, options.disk_gb)
    command = build_command(options.model, options.get_settings(), given.passed_on, tiers)
    print(shlex.join(redact(command)), flush=True)
    if not options.dry_run:
        if shutil.which(command[0]) is None:
            raise TenutoError("there is no `vllm` command here; install it with: pip install 'tenuto[vllm]'")
        check_model(options.model)
        check_files(command)
        if tiers is not None:
            tiers.check()
    for hint in get_hints(command):
        say("serve", hint)
    if not options.dry_run:
        os.execvpe(command[0], command, {**os.environ, **get_environment(given.passed_on)})
    return 0


_FLAGS = [flag.name for flag in get_flags(ServeOptions) if flag.name.startswith("-")]
SERVE = Command(
    summary="""\
Run vLLM with Tenuto's scheduler: print the `vllm serve` line, then become it.
MODEL comes first. Options that are not listed here go to vLLM as they are.
""",
    examples="""\
  tenuto serve Qwen/Qwen3-8B --port 8000
  tenuto serve Qwen/Qwen3-8B --policy continuum-fixed --option ttl_s=3 --trace trace.jsonl
  tenuto serve Qwen/Qwen3-8B --host-gb 200 --disk /mnt/kv --disk-gb 1000
  tenuto serve --engine sim --help
      a simulated GPU instead, without vLLM
""",
    options=(Part(ServeOptions),),
    run=run,
    passes_on=True,
)

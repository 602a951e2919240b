"""What an operator sets: `--additional-config '{"tenuto": {...}}'`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, cast

from tenuto.core.control import MODES
from tenuto.core.engine import check_step_tokens
from tenuto.core.errors import ConfigError
from tenuto.core.limits import Canary, Limits, read_canary
from tenuto.core.settings import check_settings, setting
from tenuto.records.trace import COMMANDS, Commands, TraceOptions

TRACE_VARIABLE = "SCHED_TRACE_PATH"
"""Turns on the Continuum prototype's trace. The environment variable's value is the prefix of its file
names."""

OUTPUT_VARIABLE = "RUN_OUTPUT_DIR"
"""The prototype's variable for the folder of `scheduler_timestamps`, which is written along with a trace."""


@dataclass(frozen=True)
class Settings:
    """Everything under `tenuto` in vLLM's additional config."""

    policy: str = setting("tenuto", "policy name, or my.module:Class")
    options: dict[str, Any] = field(default_factory=dict)
    """The policy's own parameters."""
    limits: Limits = field(default_factory=Limits)
    """Bounds on any policy, hint or client (see `tenuto.core.limits.Limits`)."""
    mode: str = setting(
        "on", "on, off (as stock vLLM), or shadow (decide and count, change nothing)", choices=MODES
    )
    canary: Canary = field(default_factory=Canary)
    """The jobs that the policy applies to (see `tenuto.core.limits.Canary`); all by default."""
    own_policies: list[str] | None = None
    """Policies, as my.module:Class, to which an operator may switch besides those that ship with Tenuto."""
    step_tokens: str | int | None = setting(
        None,
        "most tokens in a step: a number within vLLM's budget, or adaptive; adaptive:X weighs a second of a "
        "prompt's wait X times as much as one of a decoding turn (1); unset: what the policy wants",
    )
    offload: str | None = setting(
        None,
        "with Tenuto's host memory: store all that a job may come back for (async), or what the policy says "
        "(asked); unset: what the policy wants",
        choices=("async", "asked"),
    )
    tenants: str = setting(
        "server",
        "who says whose a request is: the server (the API key, or a trusted proxy's header), or its client",
        choices=("server", "client"),
    )
    tenant_labels: bool = setting(
        False, "show the names of tenants on /metrics, to everybody who can read that page"
    )
    trace: str | None = setting(
        None,
        f"file for the JSONL trace of steps and decisions; unset: ${TRACE_VARIABLE}.steps.jsonl, or none",
    )
    trace_commands: str = setting(
        "hash", "what the trace has of the commands that tools run", choices=COMMANDS
    )
    trace_max_mb: int = setting(
        256, "size at which the trace is set aside as FILE.1 and begins anew, in MB; 0: never", minimum=0
    )
    state: str | None = setting(None, "file that keeps what the policy learned; forgotten when unset")
    save_every_s: float = setting(60.0, "seconds between two savings of `state`", minimum=1)
    strict: bool = setting(False, "a policy that raises or answers wrongly stops the server; for tests")
    on_mismatch: str = setting(
        "stop", "what to do when this vLLM does not fit: stop, or run stock", choices=("stop", "stock")
    )
    allow_untested: bool = setting(False, "run on a vLLM release Tenuto was not checked on")

    def __post_init__(self) -> None:
        """Check the names of `own_policies`. Raises ConfigError."""
        if not all(isinstance(each, str) for each in self.own_policies or ()):
            raise ConfigError(f"tenuto: key 'own_policies' must be a list of names, got {self.own_policies}")

    @property
    def trace_options(self) -> TraceOptions:
        """The trace's settings, in the form that its writer takes."""
        max_bytes = self.trace_max_mb * 1_000_000 or None
        return TraceOptions(cast(Commands, self.trace_commands), max_bytes)


def read_settings(additional_config: Any) -> Settings:
    """Read the settings out of vLLM's additional config.

    Raises ConfigError naming the key that is unknown, of the wrong type or out of range.
    """
    given = additional_config.get("tenuto", {}) if isinstance(additional_config, dict) else {}
    if not isinstance(given, dict):
        raise ConfigError(f"tenuto: must be an object of settings, got {given!r}")
    given = dict(given)
    limits = check_settings(Limits, given.pop("limits", {}), "tenuto.limits")
    canary = read_canary(given.pop("canary", None))
    if prefix := os.environ.get(TRACE_VARIABLE):
        given.setdefault("trace", f"{prefix}.steps.jsonl")
    checked = check_settings(Settings, given, "tenuto")
    settings = Settings(**checked, limits=Limits(**limits), canary=canary)
    check_step_tokens(settings.step_tokens, "tenuto: key 'step_tokens'")
    return settings

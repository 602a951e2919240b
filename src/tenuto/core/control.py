"""The operator's control of a running engine: show its settings, and change them without a restart.

Each engine process (data-parallel rank) has one `Control`, which the engine calls between two steps. So no
change happens inside a step, and no request waits for it. A change is checked completely before it is
applied. A bad change is refused, and the old settings stay.

Requests and answers are JSON texts. Authentication and URLs are in `tenuto.vllm.control_http` and
`tenuto.sim.server.control`.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from tenuto.core.errors import ConfigError, TenutoError
from tenuto.core.ledger import OWN_FIGURES
from tenuto.core.limits import Canary, Limits, read_canary
from tenuto.core.loader import PRESETS, get_engine_settings, get_policy_names, load_policy
from tenuto.core.policy import Learns, Oracle, Policy
from tenuto.core.requests import parse_hints
from tenuto.core.settings import check_settings

ADMIN_VARIABLE = "TENUTO_ADMIN_KEY"
"""Environment variable with the operator's key. Without it, nothing can be changed over HTTP."""
OPERATOR_HEADER = "x-tenuto-operator"
"""A header with the operator's name, for the log. Only the key is checked, not the name."""
UNKNOWN_JOB = (
    "no job of this name is known here: it sent nothing yet, or its last answer ended it, because it called "
    "no tool or the client said so (tenuto:lease_refusals_total counts both)"
)
"""The note in an answer about an unknown job. Jobs that end are forgotten."""
MAX_LISTED_JOBS = 1000
"""Most jobs in an answer about the ledger, the latest ones. More would delay the next step."""
MODES = ("on", "off", "shadow")
CHANGEABLE = ("mode", "policy", "options", "limits", "canary")
"""The settings that an operator may change while the server runs."""


def check_operator(authorization: str) -> tuple[int, str] | None:
    """Check the `Authorization` header of an operator's call; the status and the reason of a refusal."""
    key = os.environ.get(ADMIN_VARIABLE, "").strip()
    if not key:
        return 403, (
            f"control is off: start the server with the environment variable {ADMIN_VARIABLE} "
            "set to a secret of the operator's, and send it as `Authorization: Bearer …`"
        )
    if not (key.isascii() and key.isprintable()):
        # Clients and servers disagree on the bytes of such a header, so no key would ever be the same.
        return 403, f"control is off: {ADMIN_VARIABLE} has characters that no header can hold; use ASCII"
    scheme, _, given = authorization.partition(" ")
    is_same = hmac.compare_digest(given.strip().encode(errors="replace"), key.encode())
    if scheme.lower() == "bearer" and is_same:
        return None
    return 401, f"this needs the operator's key ({ADMIN_VARIABLE} of the server)"


class ConflictError(TenutoError):
    """Two operators changed the settings at the same time; the second change is not applied."""


class Controlled(Protocol):
    """What a `Control` changes: an engine's scheduler, or a stand-in for it."""

    @property
    def driver(self) -> Any:
        """The driver that decides now."""

    @property
    def settings(self) -> Any:
        """The settings in force: a dataclass with at least the fields of `CHANGEABLE` and `own_policies`."""

    @property
    def configured_policy(self) -> Policy:
        """The configured policy, even while the mode is off."""

    def prepare(self, settings: Any, policy: Policy) -> Any:
        """Make what these settings need, without changing anything. Any error in the settings raises here."""

    def switch(self, prepared: Any) -> None:
        """Use from now on what `prepare` returned."""

    def count_changes(self, changed: Iterable[str]) -> None:
        """Count that an operator changed these settings."""

    def release(self, job_id: str) -> bool:
        """End a job that its client says is complete; return whether it was known."""

    def get_now_s(self) -> float:
        """The time on the engine's clock."""


class Control:
    """One engine's answers to its operator, and to clients that ask about their jobs or end them."""

    def __init__(
        self,
        scheduler: Controlled,
        rank: int,
        *,
        by_priority: bool,
        read_fields: Callable[[Any], Any],
        logger: logging.Logger,
    ) -> None:
        """`by_priority`: the engine serves requests by their own priority.

        `read_fields` takes the fields of a client's release and returns those that can be trusted.
        """
        self._scheduler = scheduler
        self._rank = rank
        self._by_priority = by_priority
        self._read_fields = read_fields
        self._logger = logger
        self._initial = scheduler.settings
        self._learned: dict[str, Any] = {}
        """What each policy had learned when another one replaced it."""
        self._last: dict[str, Any] = {"changes": 0, "changed_by": None, "changed_unix_s": None}
        self._number = 0
        """Of the latest change that a server sent and that was accepted, even if it changed nothing here."""
        self._by = "another operator"
        self._accepted_s = 0.0
        """When it was accepted, on the machine's monotonic clock."""

    def answer(self, text: str) -> str:
        """Do what a request says. The answer has `ok`, and either the status or an `error`."""
        try:
            request = json.loads(text)
            result = self._do(request)
        except ConflictError as error:
            result = {"ok": False, "error": str(error), "conflict": True}
        except TenutoError as error:
            result = {"ok": False, "error": str(error)}
        except Exception as error:  # an error must not stop the engine
            self._logger.exception("control: a request failed")
            result = {"ok": False, "error": f"failed, see the server's log: {error!r}"}
        return json.dumps({"rank": self._rank, **result})

    def change(self, change: Any, by: str) -> dict[str, Any]:
        """Apply a change, and return the status. Raises ConfigError or PolicyError; then nothing changed."""
        settings = self._read(change)
        before = self._scheduler.settings
        changed = [name for name in CHANGEABLE if getattr(settings, name) != getattr(before, name)]
        if not changed:
            return self.get_status()
        policy = self._make_policy(settings)
        self._scheduler.switch(self._scheduler.prepare(settings, policy))
        self._scheduler.count_changes(changed)
        self._last = {
            "changes": self._last["changes"] + 1,
            "changed_by": by,
            "changed_unix_s": round(time.time(), 3),
        }
        words = ", ".join(
            _describe_change(name, getattr(before, name), getattr(settings, name)) for name in changed
        )
        self._logger.info("control: %s changed %s", by, words)
        return self.get_status()

    def get_status(self) -> dict[str, Any]:
        """The mode, the settings and the policy in force, in JSON types."""
        settings, driver = self._scheduler.settings, self._scheduler.driver
        return {
            "mode": settings.mode,
            "policy": settings.policy,
            "options": settings.options,
            "limits": dataclasses.asdict(settings.limits),
            "canary": dataclasses.asdict(settings.canary) if settings.canary.is_on else None,
            "leases": 0 if settings.mode == "shadow" else len(driver.leases),
            "leased_blocks": 0 if settings.mode == "shadow" else driver.get_num_leased_blocks(),
            "tenants": {} if settings.mode == "shadow" else driver.get_tenant_blocks(),
            **self._last,
        }

    def _do(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "status":
                return {"ok": True, **self.get_status()}
            case "check":
                settings = self._read(request["change"])
                self._scheduler.prepare(settings, self._make_policy(settings))
                return {"ok": True, "number": self._number, "age_s": time.monotonic() - self._accepted_s}
            case "change":
                self._check_unchanged(request.get("after", {}))
                status = self.change(request["change"], request["by"])
                self._number, self._by = request.get("number", self._number), request["by"]
                self._accepted_s = time.monotonic()
                return {"ok": True, **status}
            case "release":
                return {"ok": True, "known": bool(self._scheduler.release(self._read_job(request["fields"])))}
            case "job":
                job_id, now_s = self._read_job(request["fields"]), self._scheduler.get_now_s()
                return {"ok": True, "job": self._scheduler.driver.describe_job(job_id, now_s)}
            case "ledger":
                driver, now_s = self._scheduler.driver, self._scheduler.get_now_s()
                return {"ok": True, **driver.describe_ledger(now_s, MAX_LISTED_JOBS)}
        raise ConfigError(f"there is no request {request['do']!r}")

    def _check_unchanged(self, after: Mapping[str, int]) -> None:
        """Refuse a change if another operator has changed the settings since it was checked.

        `after`: by rank, the number of the latest change when this one was checked.
        """
        if after.get(str(self._rank), self._number) != self._number:
            raise ConflictError(f"{self._by} changed the settings at the same time; look, and ask again")

    def _read(self, change: Any) -> Any:
        """The settings after a change. Raises ConfigError or PolicyError."""
        now = self._scheduler.settings
        if not isinstance(change, dict) or not change:
            raise ConfigError(f"a change is an object with some of: {', '.join(CHANGEABLE)}")
        unknown = sorted(set(change) - set(CHANGEABLE))
        if unknown:
            raise ConfigError(f"cannot change {', '.join(unknown)}; only {', '.join(CHANGEABLE)}")
        given = dict(change)
        limits = check_settings(Limits, given.pop("limits", {}), "tenuto.limits")
        canary = read_canary(given.pop("canary")) if "canary" in given else now.canary
        given = check_settings(type(now), given, "tenuto")
        if "policy" in given:
            given.setdefault("options", {})
        elif "options" in given:
            given["options"] = {**now.options, **given["options"]}
        return dataclasses.replace(
            now, **given, limits=dataclasses.replace(now.limits, **limits), canary=canary
        )

    def _make_policy(self, settings: Any) -> Policy:
        """A new policy object, with what the policy of that name learned on this engine before.

        If only limits change, it is the present policy: no state has all that a policy knows.
        """
        now = self._scheduler.settings
        if dataclasses.replace(settings, limits=now.limits) == now:
            return self._scheduler.configured_policy
        name = settings.policy
        self._check_name(name)
        policy = load_policy(name, settings.options)
        if isinstance(policy, Oracle):
            raise ConfigError(f"policy {name} knows the future; it works only in the simulator")
        if get_engine_settings(name, policy).order == "priority" and not self._by_priority:
            raise ConfigError(f"policy {name} needs vLLM's --scheduling-policy priority, set at start")
        self._keep_learned()
        state = self._learned.get(name)
        if isinstance(policy, Learns) and state is not None:
            policy.set_state(state)
        return policy

    def _keep_learned(self) -> None:
        policy, name = self._scheduler.configured_policy, self._scheduler.settings.policy
        if isinstance(policy, Learns):
            try:
                self._learned[name] = policy.get_state()
            except Exception as error:  # a policy may be user code
                self._logger.error("control: what policy %s learned is lost: %r", name, error)

    def _check_name(self, name: str) -> None:
        """Refuse a policy whose code the operator did not name at start."""
        initial = self._initial
        if name in (initial.policy, *(initial.own_policies or ())):
            return
        if ":" in name:
            raise ConfigError(
                f"policy {name!r} is not one of Tenuto's; name it in the setting own_policies at start"
            )
        if name in PRESETS:
            raise ConfigError(f"{name} is a preset of engine settings, which are fixed at start")
        if name not in get_policy_names():
            load_policy(name)  # raises an error that lists the known names

    def _read_job(self, fields: Any) -> str:
        """The id of a client's job. `fields`: those of a request's `vllm_xargs`, with the signed tenant."""
        job_id = parse_hints(self._read_fields(fields)).job_id
        if job_id is None:
            raise ConfigError("the job's id is unusable")
        return job_id


def leave_out_hits(job: Mapping[str, Any]) -> dict[str, Any]:
    """What a tenant may know of its job. Of hits, only those on what a lease of the job held.

    `job`: as `Driver.describe_job` describes it. The rest would show what other tenants have in the cache. So
    would all hits on what the job computed before: others may have computed it again since.
    """
    hidden = ("reused_tokens", "short_tokens", "ledger")
    own = {name: value for name, value in job.items() if name not in hidden}
    return {**own, "ledger": {name: job["ledger"][name] for name in OWN_FIGURES}}


def _describe_change(name: str, before: Any, after: Any) -> str:
    """A change as text, for the log. For limits and canary, it has only the fields that differ."""
    if isinstance(before, Limits | Canary):
        old, new = dataclasses.asdict(before), dataclasses.asdict(after)
        before, after = ({key: each[key] for key in old if old[key] != new[key]} for each in (old, new))
    return f"{name} {json.dumps(before)} -> {json.dumps(after)}"

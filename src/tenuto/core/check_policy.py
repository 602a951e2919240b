"""Whether a policy keeps the contract of its interface."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

from tenuto.core.errors import PolicyError
from tenuto.core.policy import Learns, Policy
from tenuto.core.policy_caller import is_key, to_json
from tenuto.core.types import (
    Decision,
    EngineView,
    Job,
    Keep,
    Lease,
    LoadOffer,
    Offload,
    Release,
    StepView,
    TierView,
    ToolCall,
    Turn,
)


def check_policy(policy: Policy) -> None:
    """Check that a policy keeps its contract on a grid of views.

    Asked hooks are pure (as far as `repr` shows the policy's state) and deterministic, no hook raises,
    answers have the right type, a hook's keys are of one shape, parameters and answers are JSON. Raises
    PolicyError naming the hook.
    """
    shapes: dict[str, tuple[bool, ...]] = {}
    for turn, view in itertools.product(_get_turns(), _get_views()):
        lease = Lease(turn, view.now_s - 1, view.now_s, 0.0, 3, next_turn_waiting=False)
        _check_asked(policy, "queue_key", tuple, turn, view.now_s)
        _check_asked(policy, "admit", bool, turn, view)
        _check_asked(policy, "retain", Decision, turn, view)
        _check_asked(policy, "reconsider", Decision, lease, view)
        _check_asked(policy, "evict_key", tuple, lease, view)
        _check_asked(policy, "preempt_key", tuple, turn, view)
        _check_asked(policy, "step_budget", (int, type(None)), view)
        _check_asked(policy, "may_reclaim", bool, lease, turn, view)
        _check_asked(policy, "may_preempt", bool, turn, turn, view)
        _check_asked(policy, "load", bool, turn, LoadOffer(64, 0.5), view)
        if turn.job.num_turns > 1:
            _call(policy, "on_tool_returned", turn, ToolCall("ls"), 0.5)
        _call(policy, "on_turn_arrived", turn, view.now_s)
        for hook in ("admitted", "started", "preempted", "started"):
            _call(policy, f"on_turn_{hook}", turn, view.now_s)
        _call(policy, "on_tick", view)
        _call(policy, "on_step", StepView(view.now_s, 0.05, 300, 4))
        ended = dataclasses.replace(turn, is_aborted=view.num_running > 0)
        _call(policy, "on_turn_finished", ended, view.now_s)
        _call(policy, "on_job_ended", turn.job, view.now_s)
        for hook, key in (
            ("queue_key", policy.queue_key(turn, view.now_s)),
            ("evict_key", policy.evict_key(lease, view)),
            ("preempt_key", policy.preempt_key(turn, view)),
        ):
            _check_key(hook, key, shapes)
    _check_state(policy)
    _check_json("parameters", {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy) if f.init})


def _call(policy: Policy, hook: str, *inputs: Any) -> Any:
    try:
        return getattr(policy, hook)(*inputs)
    except Exception as error:
        raise PolicyError(f"{hook} raised {error!r}") from error


def _check_key(hook: str, key: Any, shapes: dict[str, tuple[bool, ...]]) -> None:
    shape = tuple(isinstance(part, str) for part in key)
    if not is_key(key) or shapes.setdefault(hook, shape) != shape:
        raise PolicyError(f"{hook}: its keys cannot be ordered, among them {key!r}")


def _check_asked(policy: Policy, hook: str, kind: Any, *inputs: Any) -> None:
    before = repr(vars(policy))
    first = _call(policy, hook, *inputs)
    if repr(vars(policy)) != before:
        raise PolicyError(f"{hook} changed the policy's state; only told hooks may")
    kind = (Keep, Offload, Release) if kind is Decision else kind
    if not isinstance(first, kind):
        raise PolicyError(f"{hook} answered {first!r}, which is not a {kind}")
    if _call(policy, hook, *inputs) != first:
        raise PolicyError(f"{hook} answered differently when asked the same again")
    _check_json(hook, to_json(first))


def _check_state(policy: Policy) -> None:
    if not isinstance(policy, Learns):
        return
    state = _call(policy, "get_state")
    _check_json("get_state", state)
    again = json.loads(json.dumps(state))
    _call(policy, "set_state", again)
    if json.loads(json.dumps(_call(policy, "get_state"))) != again:
        raise PolicyError("set_state did not take up what get_state gave")


def _check_json(what: str, value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{what}: {value!r} is not JSON: {error}") from error


def _get_turns() -> list[Turn]:
    tools = (None, ToolCall("ls"), ToolCall("pytest", "pytest -x tests"))
    return [
        Turn(
            turn_id=f"turn-{n}",
            job=Job(f"job-{n % 3}", float(n % 3), 1 + n % 4, "tenant" if n % 2 else None),
            arrival_s=float(n),
            num_prompt_tokens=100 * (n + 1),
            num_output_tokens=20,
            num_preemptions=n % 2,
            has_lease=n % 3 == 1,
            is_last=(None, True, False)[n % 3],
            tool=tools[n % 3],
            expected_tool_s=None if n % 2 else 2.0,
        )
        for n in range(12)
    ]


def _get_views() -> list[EngineView]:
    idle = EngineView(20.0, 16, 1000, 999, 0, 0, 2048)
    busy = EngineView(21.0, 16, 1000, 10, 64, 30, 2048, num_leases=20, num_leased_blocks=400)
    full = EngineView(22.0, 16, 1000, 0, 1, 1, 8192, num_leases=1, num_leased_blocks=990)
    tiers = (TierView("host", 5000, 4000, 4e-5, 0.2),)
    offloading = EngineView(23.0, 16, 1000, 50, 8, 3, 8192, num_leases=2, num_leased_blocks=90, tiers=tiers)
    return [idle, busy, full, offloading]

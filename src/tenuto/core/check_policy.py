"""Whether a policy keeps the contract of its interface."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

from tenuto.core.errors import PolicyError
from tenuto.core.policy import ANSWERS, Learns, Policy
from tenuto.core.policy_caller import check_answer, describe_fault, to_json
from tenuto.core.types import (
    EngineView,
    Job,
    Lease,
    LoadOffer,
    StepView,
    TierView,
    ToolCall,
    Turn,
)


def check_contract(policy: Policy) -> None:
    """Check that a policy keeps its contract on a grid of views.

    Asked hooks are pure (as far as `repr` shows the policy's state) and deterministic, no hook raises,
    answers have the right type, a hook's keys are of one shape, parameters and answers are JSON. Raises
    PolicyError naming the hook and its inputs.
    """
    shapes: dict[str, tuple[bool, ...]] = {}
    for turn, view in itertools.product(_get_turns(), _get_views()):
        lease = Lease(turn, view.now_s - 1, view.now_s, 0.0, 3, next_turn_waiting=False)
        asked: dict[str, tuple[Any, ...]] = {
            "wants_hits": (turn,),
            "queue_key": (turn, view.now_s),
            "admit": (turn, view),
            "load": (turn, LoadOffer(64, 0.5), view),
            "retain": (turn, view),
            "reconsider": (lease, view),
            "evict_key": (lease, view),
            "may_reclaim": (lease, turn, view),
            "tier_key": (turn, view),
            "preempt_key": (turn, view),
            "may_preempt": (turn, turn, view),
            "step_budget": (view,),
        }
        for hook in ANSWERS:
            _check_asked(policy, hook, *asked[hook])
        _tell_all(policy, turn, view)
        for hook, kinds in ANSWERS.items():
            if kinds == (tuple,):
                _check_key(policy, hook, asked[hook], shapes)
    _check_state(policy)
    _check_json("parameters", {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy) if f.init})


def _tell_all(policy: Policy, turn: Turn, view: EngineView) -> None:
    """Every told hook, in an order in which they happen."""
    if turn.job.num_turns > 1:
        _call(policy, "on_tool_returned", turn, ToolCall("ls"), 0.5)
    for hook in ("arrived", "admitted", "started", "preempted", "started"):
        _call(policy, f"on_turn_{hook}", turn, view.now_s)
    _call(policy, "on_tick", view)
    _call(policy, "on_step", StepView(view.now_s, 0.05, 300, 4))
    _call(policy, "on_turn_finished", dataclasses.replace(turn, is_aborted=view.num_running > 0), view.now_s)
    _call(policy, "on_job_ended", turn.job, view.now_s)


def _call(policy: Policy, hook: str, *inputs: Any) -> Any:
    try:
        return getattr(policy, hook)(*inputs)
    except Exception as error:
        raise PolicyError(describe_fault(policy, hook, inputs, error)) from error


def _check_asked(policy: Policy, hook: str, *inputs: Any) -> None:
    before = repr(vars(policy))
    first = _call(policy, hook, *inputs)
    if repr(vars(policy)) != before:
        raise PolicyError(f"{hook} changed the policy's state; only told hooks may")
    try:
        check_answer(hook, first)
    except TypeError as error:
        raise PolicyError(describe_fault(policy, hook, inputs, error)) from None
    if _call(policy, hook, *inputs) != first:
        raise PolicyError(f"{hook} answered differently when asked the same again: first {first!r}")
    _check_json(hook, to_json(first))


def _check_key(
    policy: Policy, hook: str, inputs: tuple[Any, ...], shapes: dict[str, tuple[bool, ...]]
) -> None:
    key = _call(policy, hook, *inputs)
    shape = tuple(isinstance(part, str) for part in key)
    if shapes.setdefault(hook, shape) != shape:
        raise PolicyError(f"{hook}: its keys cannot be ordered, as their shapes differ, among them {key!r}")


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

"""The policy interface, and how a policy is found by name.

A policy is *asked* and *told*. Asked hooks return a decision and change nothing; told hooks update the
policy's own estimates. Every default is what stock vLLM does, so a policy overrides what it decides and
nothing else. The driver (`tenuto.core.driver`) is the only caller.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from tenuto.core.errors import PolicyError
from tenuto.core.settings import check_settings, setting
from tenuto.core.types import (
    Decision,
    EngineView,
    Job,
    Lease,
    LoadOffer,
    Release,
    StepView,
    ToolCall,
    Turn,
)

POLICIES_PACKAGE = "tenuto.policies"

WANTS = {
    "offload": "sync or async: the engine copies KV below the GPU as it is computed, and loads it back; "
    "asked: it copies what `retain` and `reconsider` say",
    "long_prefill_token_threshold": "most tokens of one prompt in a step while others run",
    "watermark": "share of the blocks that starting a request leaves free",
    "unbounded_kv": "a KV cache without end (yardsticks in the simulator)",
}
"""Engine settings that a policy may want, and what they mean."""

__all__ = ["TOLD_HOOKS", "Key", "Policy", "describe_policy", "get_policy_names", "load_policy", "setting"]

Key = tuple[float | int | str, ...]
"""What orders turns and leases: smaller first; all keys of one hook have the same shape."""


@dataclasses.dataclass
class Policy:
    """Stock vLLM's behaviour; every policy is a subclass that overrides some hooks.

    A subclass is a dataclass: its fields are its parameters (see `setting`), and state it learns goes
    into fields with `init=False`.
    """

    engine_order: ClassVar[Literal["fcfs", "priority"]] = "fcfs"
    """The engine's own scheduling mode, in force for every hook that is not overridden."""
    admits: ClassVar[Literal["jobs", "turns"]] = "jobs"
    """What `admit` is asked for: the turns of jobs that have not started, or every turn."""
    sees_hits: ClassVar[bool] = False
    """Whether the turns that `queue_key` is asked for come with `num_cached_tokens`; a look-up each."""
    max_waiting_for_hits: ClassVar[int | None] = None
    """While more turns than this wait, they come without: look-ups would cost more than they bring."""
    rekey_s: ClassVar[float | None] = None
    """How often `on_tick` is told and all waiting turns are asked for their `queue_key` again, in seconds of
    an engine at work; None where a key stays right."""
    wants: ClassVar[Mapping[str, Any]] = {}
    """Engine settings it is meant to run with, by the names of `tenuto.core.policy.WANTS`."""

    # Asked: return a decision, change nothing.

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """Order of waiting turns, smallest first; ties go by turn id. Stock: preempted first, then FCFS.

        Asked when a turn arrives or is preempted and when its job's lease is granted or ends.
        """
        return (0 if turn.num_preemptions else 1, turn.arrival_s)

    def admit(self, turn: Turn, view: EngineView) -> bool:
        """Whether a job that has not started (see `admits`) may start now; asked again while False.

        Not asked when nothing else could run: the driver never lets the engine idle over a waiting job.
        """
        return True

    def load(self, turn: Turn, offer: LoadOffer, view: EngineView) -> bool:
        """Whether a turn about to start waits for what a tier has of it, or computes that again."""
        return True

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        """What to do with the cached blocks of a turn that finished and is not its job's last."""
        return Release()

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        """What to do with a lease whose deadline has passed; `Keep` must name a later deadline."""
        return Release()

    def evict_key(self, lease: Lease, view: EngineView) -> Key:
        """Which lease yields first under pressure, smallest first; asked when granted or renewed."""
        return (lease.until_s,)

    def may_reclaim(self, lease: Lease, turn: Turn, view: EngineView) -> bool:
        """Whether the lease that yields first does so for a turn that waits for its first start.

        If not, the turn waits. Not asked for running turns, nor when nothing could run otherwise.
        """
        return True

    def preempt_key(self, turn: Turn, view: EngineView) -> Key:
        """Which running turn yields first, smallest first; asked only when no lease can yield."""
        return (-turn.arrival_s,)

    def may_preempt(self, turn: Turn, running: Turn, view: EngineView) -> bool:
        """Whether a waiting turn that does not fit preempts this running one, the first by `preempt_key`."""
        return False

    def step_budget(self, view: EngineView) -> int | None:
        """Token budget of the next step, or None for the engine's own; never more than that."""
        return None

    # Told: update own estimates.

    def on_turn_arrived(self, turn: Turn, now_s: float) -> None:
        """A turn arrived and waits."""

    def on_tool_returned(self, turn: Turn, tool: ToolCall | None, tool_s: float) -> None:
        """The tool call before this new turn took `tool_s` seconds: its arrival − the last finish."""

    def on_turn_admitted(self, turn: Turn, now_s: float) -> None:
        """A turn that `admit` was to be asked for may start: it said so, or the engine was idle."""

    def on_turn_started(self, turn: Turn, now_s: float) -> None:
        """A turn got its first step; `num_hit_tokens` of its prompt came from cache."""

    def on_turn_preempted(self, turn: Turn, now_s: float) -> None:
        """A running turn lost its blocks and waits again."""

    def on_turn_resumed(self, turn: Turn, now_s: float) -> None:
        """A preempted turn got its first step since."""

    def on_turn_finished(self, turn: Turn, now_s: float) -> None:
        """A turn finished; told before `retain` is asked."""

    def on_turn_aborted(self, turn: Turn, now_s: float) -> None:
        """A turn went away unfinished, from the queue or while it ran: its client left, or it failed."""

    def on_job_ended(self, job: Job, now_s: float) -> None:
        """A job will not come back, or was silent for so long that it is forgotten."""

    def on_tick(self, view: EngineView) -> None:
        """The engine's state every `rekey_s` seconds, before the waiting turns are asked for their keys."""

    def on_step(self, step: StepView) -> None:
        """The engine computed a step; told only to policies that override it."""

    def set_oracle(self, jobs: Sequence[Any]) -> None:
        """For yardsticks alone: all jobs of a simulation (`tenuto.sim.clients.Job`), before it starts."""

    # Kept across restarts, by engines that have a file for it (see `tenuto.vllm.state`).

    def get_state(self) -> dict[str, Any] | None:
        """What it learned, as JSON can hold it; None if there is nothing to keep. The caller may keep it."""
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        """Take up what `get_state` gave in an earlier run; whatever it raises, nothing has changed then."""

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """Whether this policy has its own version of a hook; engines skip the work of the others."""
        return getattr(cls, hook) is not getattr(Policy, hook)


TOLD_HOOKS = tuple(hook for hook in vars(Policy) if hook.startswith("on_"))


def get_policy_names() -> list[str]:
    """Names of the policies that ship with Tenuto: one file each, the file's name is the policy's."""
    return sorted(_find_modules())


def load_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Make a policy from its name (`continuum-fixed`) or path (`my.module:Class`) and its options.

    Raises PolicyError if it cannot be loaded, ConfigError for an unknown option or a bad value.
    """
    cls = _import_class(name) if ":" in name else _find_class(name)
    return cls(**check_settings(cls, options or {}, f"policy {name!r}"))


def describe_policy(policy: Policy) -> dict[str, Any]:
    """A policy's name or path, its options and what it has learned: enough to make one like it."""
    cls = type(policy)
    options = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy) if field.init}
    described = {"policy": _get_name(cls), "options": options}
    try:
        state = policy.get_state()
    except Exception:  # it is code from outside; who keeps its state says what is wrong with it
        state = None
    return described if state is None else {**described, "state": state}


def _get_name(cls: type[Policy]) -> str:
    """What `load_policy` finds this class by."""
    if cls.__module__.startswith(f"{POLICIES_PACKAGE}."):
        return _get_policy_name(cls.__module__)
    return f"{cls.__module__}:{cls.__qualname__}"


def _find_modules() -> dict[str, str]:
    """The module of each policy that ships with Tenuto, by the policy's name."""
    package = importlib.import_module(POLICIES_PACKAGE)
    modules = pkgutil.walk_packages(package.__path__, f"{POLICIES_PACKAGE}.")
    return {_get_policy_name(each.name): each.name for each in modules if not each.ispkg}


def _get_policy_name(module: str) -> str:
    return module.rpartition(".")[2].replace("_plus", "+").replace("_", "-")


def _find_class(name: str) -> type[Policy]:
    modules = _find_modules()
    if name not in modules:
        known = ", ".join(sorted(modules))
        raise PolicyError(f"no policy {name!r}; choose one of: {known}; or name your own as my.module:Class")
    module_name = modules[name]
    module = importlib.import_module(module_name)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Policy) and value.__module__ == module_name
    ]
    if len(found) != 1:
        raise PolicyError(f"{module_name} must define exactly one Policy subclass, found {len(found)}")
    return found[0]


def _import_class(path: str) -> type[Policy]:
    module_name, _, class_name = path.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # importing runs the module, and anything can go wrong in it
        raise PolicyError(f"policy {path!r} cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise PolicyError(f"{path!r} is not a subclass of tenuto.core.policy.Policy")
    if "__dataclass_fields__" not in vars(cls):  # Policy's own are inherited
        raise PolicyError(f"{path!r} must be a dataclass, so that its parameters can be checked")
    return cls

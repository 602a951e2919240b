"""The policy interface: the hooks, what a policy needs from its engine, and the check of hooks' names.

The driver (`tenuto.core.driver`) calls the hooks; `tenuto.core.loader` finds policies by name.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from tenuto.core.engine import StepTokens
from tenuto.core.errors import PolicyError, suggest
from tenuto.core.settings import setting as setting
from tenuto.core.types import (
    Decision,
    DecodeSteps,
    EngineView,
    Job,
    Lease,
    LoadOffer,
    Release,
    StepView,
    ToolCall,
    Turn,
)

Key = tuple[float | int | str, ...]
"""A sort key; the smallest goes first. All keys of one hook have the same length and types."""


OffloadMode = Literal["async", "sync", "serial", "asked"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Engine settings that a policy or a preset asks for. The user's own settings override them."""

    order: Literal["fcfs", "priority"] = "fcfs"
    """vLLM's `--scheduling-policy`. With "priority", a request's own priority comes before every key."""
    offload: OffloadMode | None = None
    """How the KV cache is copied to the tiers below the GPU: in parallel with the steps (async), inside each
    step (sync), before and after each step's computation (serial), or when `retain` and `reconsider` ask for
    it (asked)."""
    long_prefill_token_threshold: int | None = None
    """The most tokens of one prompt in a step, while other requests wait or run."""
    watermark: float | None = None
    """Share of the KV cache blocks that must stay free when a request starts."""
    step_tokens: StepTokens | None = None
    """The most tokens of a step: "adaptive", or a number; None for the engine's own budget."""
    unbounded_kv: bool = False
    """Whether the KV cache is unlimited; only the simulator supports this."""
    scheduler: Literal["vllm", "continuum-fork"] = "vllm"
    """Which scheduler the simulator imitates: vLLM's, or that of the Continuum prototype, a fork of vLLM
    0.10.2. Only the simulator supports this."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """What a policy needs from the engine, in addition to the hooks that it overrides."""

    admit: Literal["jobs", "turns"] = "jobs"
    """Whether `admit` is asked only for new jobs or for every turn."""
    reorder_s: float | None = None
    """Every this many seconds, call `on_tick` and ask again for the `queue_key` of every waiting turn.

    None means never.
    """
    max_waiting_with_hits: int = 0
    """Set `Turn.num_cached_tokens` for `queue_key` while at most this many turns wait.

    Each turn costs one cache look-up; see `Policy.wants_hits`.
    """
    steady_reclaim: bool = False
    """Whether `may_reclaim` answers the same question alike until a turn comes, starts or ends, or `on_tick`.

    Such a hook reads no times and no free memory, and it does not depend on what the policy learns from steps
    that only decode. The simulator then skips the steps in which it would ask again.
    """
    commands: bool = False
    """Whether the policy reads `ToolCall.command`.

    If so, its decisions can be replayed only from a trace that contains whole commands.
    """
    engine: EngineSettings = dataclasses.field(default_factory=EngineSettings)


@dataclasses.dataclass
class Policy:
    """Stock vLLM's behaviour. A subclass is a dataclass that overrides only the hooks that it decides.

    Fields made with `setting` are the policy's parameters. Fields with `init=False` hold what it learns.
    *Asked* hooks return a decision and change nothing. *Told* hooks (`on_…`) update what the policy learns.
    """

    needs: ClassVar[Needs] = Needs()

    # Asked.

    def wants_hits(self, turn: Turn) -> bool:
        """Whether the key of this waiting turn depends on its hits (`Needs.max_waiting_with_hits`)."""
        return True

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """The key that orders a waiting turn: the smallest goes first, then the turn that arrived first."""
        return (0 if turn.num_preemptions else 1, turn.arrival_s)

    def admit(self, turn: Turn, view: EngineView) -> bool:
        """Whether a job may start now. If not, it is asked again later. An idle engine starts any job."""
        return True

    def load(self, turn: Turn, offer: LoadOffer, view: EngineView) -> bool | int:
        """Whether a starting turn loads KV from a lower tier instead of computing it again.

        A number: load that many of the offer's first tokens, in whole chunks, and compute the others.
        """
        return True

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        """What to do with the KV cache of a finished turn that is not its job's last turn."""
        return Release()

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        """What to do with a lease after its deadline; `Keep` must set a later one, by 1 ms at least."""
        return Release()

    def evict_key(self, lease: Lease, view: EngineView) -> Key:
        """The key that orders leases under memory pressure: the smallest yields first.

        It is asked when the lease is granted or renewed.
        """
        return (lease.until_s,)

    def tier_key(self, turn: Turn, view: EngineView) -> Key:
        """The key that orders KV in the tiers below the GPU: the smallest is evicted first.

        It is asked when a turn begins to use a tier and when it ends. Among equal keys, the least recently
        used is evicted first. A chunk is never evicted before one that continues it. If a policy overrides
        this hook, chunks that only one job used are dropped when the job ends.
        """
        return ()

    def may_reclaim(self, lease: Lease, turn: Turn, view: EngineView) -> bool:
        """Whether a lease yields to a turn that waits for its first start. If not, the turn waits."""
        return True

    def preempt_key(self, turn: Turn, view: EngineView) -> Key:
        """The key that orders running turns; the smallest is preempted first.

        It is asked only when no lease can yield.
        """
        return (-turn.arrival_s,)

    def may_preempt(self, turn: Turn, running: Turn, view: EngineView) -> bool:
        """Whether a waiting turn that does not fit preempts this running turn. Only the simulator asks."""
        return False

    def step_budget(self, view: EngineView) -> int | None:
        """The maximum number of tokens in the next step, at least 1; None keeps the engine's own budget.

        A policy that always wants the same size sets `needs.engine.step_tokens` instead.
        """
        return None

    # Told.

    def on_turn_arrived(self, turn: Turn, now_s: float) -> None:
        """A turn arrived and waits."""

    def on_tool_returned(self, turn: Turn, tool: ToolCall | None, tool_s: float) -> None:
        """The job's tool call before this turn took `tool_s` seconds. Called before `on_turn_arrived`."""

    def on_turn_admitted(self, turn: Turn, now_s: float) -> None:
        """The turn was admitted by `admit`, or because the engine was idle or the wait was too long."""

    def on_turn_started(self, turn: Turn, now_s: float) -> None:
        """The turn got its first step, or its first after a preemption if `turn.num_preemptions` > 0."""

    def on_turn_preempted(self, turn: Turn, now_s: float) -> None:
        """The turn lost its blocks and waits again."""

    def on_turn_finished(self, turn: Turn, now_s: float) -> None:
        """The turn ended. `retain` is asked next, unless the turn is the job's last or `turn.is_aborted`."""

    def on_job_ended(self, job: Job, now_s: float) -> None:
        """The job ended, or the driver forgets it because it was idle for too long."""

    def on_tick(self, view: EngineView) -> None:
        """`needs.reorder_s` seconds have passed; next, `queue_key` is asked for every waiting turn."""

    def on_step(self, step: StepView) -> None:
        """The engine computed a step."""

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """Whether this policy overrides a hook; engines skip the work for hooks that are not overridden."""
        return getattr(cls, hook) is not getattr(Policy, hook)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the names and the arguments of the hooks. Raises PolicyError."""
        super().__init_subclass__(**kwargs)
        _check_names(cls)


class Learns(ABC):
    """A policy that saves what it learned across restarts: `class Mine(Policy, Learns)`.

    See `tenuto.vllm.state`.
    """

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """What the policy learned, in JSON types. The caller may keep the result: it never changes later."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned in an earlier run. If it raises, it must change nothing."""


class LearnsDecodes(ABC):
    """A policy that can learn from many steps at once: `class Mine(Policy, LearnsDecodes)`.

    Most steps of a simulation only decode, and many of them follow each other.
    """

    @abstractmethod
    def learn_decodes(self, steps: DecodeSteps) -> None:
        """Learn exactly what `on_step` would learn from each of these steps in turn, bit for bit."""


class Reports(ABC):
    """A policy that shows what it learned on `/metrics`: `class Mine(Policy, Reports)`."""

    @abstractmethod
    def get_figures(self) -> dict[str, float]:
        """A few figures by name. Every call returns the same names."""


class Oracle(ABC):
    """A policy that knows the future: `class Mine(Policy, Oracle)`. It works only in the simulator."""

    @abstractmethod
    def set_oracle(self, jobs: Sequence[Any]) -> None:
        """Receive all jobs of a simulation (`tenuto.workload.Job`) before it starts."""


def _get_answer_types(hook: Any) -> tuple[type, ...]:
    hint = get_type_hints(hook)["return"]
    if get_origin(hint) is tuple:
        return (tuple,)
    return get_args(hint) or (hint,)


_HOOKS = {name: hook for name, hook in vars(Policy).items() if inspect.isfunction(hook) and name[0] != "_"}
TOLD_HOOKS = tuple(name for name in _HOOKS if name.startswith("on_"))
"""The told hooks; they return nothing."""
ANSWERS: Mapping[str, tuple[type, ...]] = {
    name: _get_answer_types(hook) for name, hook in _HOOKS.items() if name not in TOLD_HOOKS
}
"""The asked hooks, and the types that each may return."""

_OF_0_1 = {
    "gives_way": "may_reclaim",
    "displaces": "may_preempt",
    "on_turn_resumed": "on_turn_started, with turn.num_preemptions",
    "on_turn_aborted": "on_turn_finished, with turn.is_aborted",
    "know": "set_oracle of tenuto.core.policy.Oracle",
    "rekey_s": "needs = Needs(reorder_s=…)",
    **dict.fromkeys(("admits", "sees_hits", "wants", "engine_order"), "needs = Needs(…)"),
}
"""Hook names of version 0.1, and their replacements."""


_MIXINS = (Learns, LearnsDecodes, Oracle, Reports)


def _check_names(cls: type[Policy]) -> None:
    mixins = [base for base in _MIXINS if issubclass(cls, base)]
    check_hooks(cls, _HOOKS, [name for base in mixins for name in base.__abstractmethods__], _explain)


def _explain(name: str) -> str | None:
    if name in _OF_0_1:
        return f"is now {_OF_0_1[name]}"
    for base in _MIXINS:
        if name in base.__abstractmethods__:
            return f"is for policies that also inherit from tenuto.{base.__name__}"
    return None


def check_hooks(
    cls: type,
    hooks: Mapping[str, Callable[..., Any]],
    further: Iterable[str] = (),
    explain: Callable[[str], str | None] = lambda name: None,
) -> None:
    """Refuse public names of a class that are neither hooks nor fields, and hooks with the wrong arguments.

    `further`: allowed names that are not hooks. `explain`: returns the message for an unknown name, or None.
    Raises PolicyError.
    """
    annotations = vars(cls).get("__annotations__", {})
    fields = {name for name, kind in annotations.items() if "ClassVar" not in str(kind)}
    known = {*hooks, "needs", "overrides", *further}
    for name in {**vars(cls), **annotations}:
        if name.startswith("_") or name in fields:
            continue
        if name not in known:
            what = explain(name) or (
                f"no hook has this name{suggest(name, known)}; begin the name of a helper with an underscore"
            )
            raise PolicyError(f"{cls.__qualname__}.{name}: {what}")
        if name in hooks:
            wanted = list(inspect.signature(hooks[name]).parameters)
            try:
                inspect.signature(vars(cls)[name]).bind(*wanted)
            except (TypeError, ValueError):
                raise PolicyError(
                    f"{cls.__qualname__}.{name} must be a method {name}({', '.join(wanted)})"
                ) from None

"""What does a server's policy promise on an idle server? Asked of a fresh instance of the same policy."""

from __future__ import annotations

from typing import Literal

from tenuto.core.errors import TenutoError
from tenuto.core.policy_loader import get_policy_names, load_policy
from tenuto.core.types import EngineView, Job, Keep, ToolCall, Turn

Promise = Literal["never", "may", "idle"]
"""never: it holds nothing, as stock vLLM. may: it may hold, but not on an idle server, or nobody knows.
idle: it holds on an idle server too, unless what it learned speaks against it."""

_IDLE = EngineView(
    now_s=0.0,
    block_size=16,
    num_blocks=1000,
    num_free_blocks=1000,
    num_running=0,
    num_waiting=0,
    max_num_batched_tokens=2048,
)
_TURN = Turn("turn", Job("job", 0.0, 1), 0.0, 200, 7, tool=ToolCall("ls", "ls"), is_last=False)


def get_promise(policy: str | None) -> Promise:
    """By the name that `tenuto:info` says; None where the server has no such metric.

    Only policies that ship with Tenuto are made: a server's word must not run code here.
    """
    if policy is None:
        return "never"
    if policy not in get_policy_names():
        return "may"
    try:
        made = load_policy(policy)
        if not made.overrides("retain"):
            return "never"
        return "idle" if isinstance(made.retain(_TURN, _IDLE), Keep) else "may"
    except TenutoError:
        return "may"

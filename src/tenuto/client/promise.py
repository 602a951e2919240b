"""Finds out what a server's policy promises on an idle server. It asks a new instance of that policy."""

from __future__ import annotations

from typing import Literal

from tenuto.core.errors import TenutoError
from tenuto.core.loader import get_policy_names, load_policy
from tenuto.core.types import EngineView, Job, Keep, ToolCall, Turn

Promise = Literal["never", "may", "idle"]
"""never: the policy holds nothing, like stock vLLM. may: it may hold blocks, but not on an idle server,
or this is unknown. idle: it also holds blocks on an idle server, unless it learned a reason against it."""

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
    """The promise of the policy named by `tenuto:info`. `policy` is None if the server has no such metric.

    Only policies that ship with Tenuto are created: a name sent by a server must not run code here.
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

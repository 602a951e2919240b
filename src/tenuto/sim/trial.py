"""A policy tried out: its contract on a grid of views, then short simulations in which memory is short."""

from __future__ import annotations

import copy

from tenuto.core.check_policy import check_contract
from tenuto.core.errors import PolicyError
from tenuto.core.policy import Policy
from tenuto.core.policy_loader import get_policy_name
from tenuto.sim.run import Extras, run
from tenuto.sim.setup import Setup
from tenuto.workload import LoadOptions

TRIALS = {
    "little memory, host memory below": (
        Setup(step_cost="roofline", kv_tokens=60_000, host_gb=32.0, offload="async"),
        LoadOptions(jps=2.0, window_s=8.0, seed=1),
    ),
    "little memory, no hints, leases as inside vLLM": (
        Setup(step_cost="roofline", kv_tokens=40_000, host_gb=0.0, offload="none", limits="plugin"),
        LoadOptions(jps=2.0, window_s=6.0, seed=2, hints="none"),
    ),
    "so little memory that turns are preempted, times of tools said": (
        Setup(step_cost="roofline", kv_tokens=14_000, host_gb=0.0, offload="none"),
        LoadOptions(workload="bfcl", jps=8.0, window_s=4.0, seed=1, hints="tool-time"),
    ),
}
"""What each trial is about, its machine and its load; a trial takes less than a second."""


def check(policy: Policy) -> None:
    """Raise PolicyError if the policy breaks its contract, fails in a simulation or is not deterministic."""
    check_contract(copy.deepcopy(policy))
    extras = Extras(policy=policy, strict=True)
    name = get_policy_name(type(policy))
    for about, (setup, load) in TRIALS.items():
        try:
            first, second = (
                [(turn.job, turn.turn, turn.last_token_s) for turn in run(setup, load, extras=extras).turns]
                for _ in range(2)
            )
        except PolicyError as error:
            raise PolicyError(f"in a simulation ({about}): {error}") from error
        if first != second:
            raise PolicyError(
                f"policy {name}: the same simulation ({about}) came out differently the second time; a "
                "policy may use no clock and no random numbers but those that it seeds itself"
            )

"""The cases: configurations with a policy and the traffic that they get.

A case's name has its kind, its configuration, and how many steps are in flight.

    scheduler   stock vLLM
    leases      Tenuto's plugin, with policies that hold KV, delay jobs or bound steps
    tenants     the same for several tenants, whose clients often leave
    tiers       host memory: Tenuto's, and vLLM's own
    aborts      the same, with clients that leave
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from tests.differential.setups import RELEASE, Setup
from tests.vllm.layouts import LAYOUTS
from tests.vllm.workerless import MAX_MODEL_LEN

KEEP_ALL = "tests.vllm.policies:KeepAll"
TTL = {"ttl_s": 20.0}
STOCK = "stock"
IN_ORDER = "tests.vllm.policies:InOrder"
ALWAYS_LOADS = "experiments.ablation:AlwaysLoads"
"""`tenuto`, whose loads do not depend on how long copies take."""


@dataclass(frozen=True)
class Traffic:
    """What clients do before each step; the shares are probabilities."""

    num_arrival_steps: int = 250
    arrivals: float = 0.2
    """Of one turn, and again of one more."""
    aborts: float = 0.03
    resets: float = 0.01
    resets_while_busy: bool = True
    names_tools: bool = False
    """Whether turns say which tool follows, and mostly wait for the job's turn before."""
    max_output: int = 30
    num_tenants: int = 1
    """With several, clients say whose turns are, in part."""


PLAIN = Traffic(num_arrival_steps=150, arrivals=0.3, max_output=100)
WITH_TOOLS = Traffic(names_tools=True)
OF_TENANTS = Traffic(names_tools=True, num_tenants=3, arrivals=0.25, aborts=0.15)
WITH_HOST = Traffic(aborts=0.0, resets=0.02, resets_while_busy=False)
WITH_HOST_AND_ABORTS = replace(WITH_HOST, aborts=0.05)


@dataclass(frozen=True)
class Case:
    """One comparison but for its seed."""

    setup: Setup
    traffic: Traffic
    policy: str | None = None
    """None: vLLM's side is vLLM's own scheduler, and the simulator has `stock`."""
    options: dict[str, Any] = field(default_factory=dict)


SETUPS: dict[str, Setup] = {
    "small cache": Setup(),
    "small cache, no gate": Setup(reserve_full_sequence=False, max_num_batched_tokens=32),
    "priority": Setup(order="priority"),
    "priority, no gate": Setup(order="priority", reserve_full_sequence=False, num_blocks=60),
    "watermark": Setup(watermark=0.15, num_blocks=60),
    "threshold": Setup(long_prefill_token_threshold=24, num_blocks=60),
    "few seats": Setup(max_num_seqs=3, num_blocks=100),
    "large cache": Setup(num_blocks=300, max_num_batched_tokens=256),
    "one window": Setup(windows=(64,)),
    "hybrid": Setup(windows=(None, 64)),
    "one window, dense": Setup(windows=(64,), retention_interval=None),
    "one window, interval": Setup(windows=(40,), retention_interval=96),
    "hybrid, dense": Setup(windows=(None, 64), retention_interval=None),
    "hybrid, interval": Setup(windows=(None, 64), retention_interval=128),
    "hybrid, interval of a window": Setup(windows=(None, 64), retention_interval=64),
    "hybrid, several groups": Setup(windows=(None, 40, 40), order="priority"),
    "hybrid, one to five": Setup(windows=(None, 33, 33, 33, 33, 33), retention_interval=80),
    "hybrid, two windows": Setup(windows=(None, 100, 17), reserve_full_sequence=False),
    "hybrid, two windows, interval": Setup(windows=(None, 100, 17), retention_interval=32),
    "two windows": Setup(windows=(100, 20), retention_interval=0),
    "drafts": Setup(num_draft_tokens=3),
    "drafts, hybrid": Setup(num_draft_tokens=2, windows=(None, 64)),
    "draft model": Setup(num_draft_tokens=2, has_draft_model=True),
    "states": Setup(layout="states"),
    "states, dense": Setup(layout="states", retention_interval=None, order="priority"),
    "states, interval": Setup(layout="states", retention_interval=128, reserve_full_sequence=False),
    # A block of 64 tokens is wider than a step.
    "states in large blocks": Setup(
        layout="states, all blocks large", num_blocks=20, max_num_batched_tokens=48
    ),
    "windows in blocks twice as large": Setup(layout="window blocks twice as large"),
    "windows in large blocks": Setup(layout="window blocks four times as large", retention_interval=256),
    "full attention in large blocks": Setup(layout="full blocks twice as large", retention_interval=None),
    "drafts, unlike blocks": Setup(layout="window blocks twice as large", num_draft_tokens=2),
}
if RELEASE == "0.33":
    SETUPS |= {
        "prefill every 2nd step": Setup(prefill_schedule_interval=2),
        "prefill every 4th step, large cache": Setup(
            prefill_schedule_interval=4, num_blocks=300, max_num_batched_tokens=256
        ),
        "prefill every 8th step, few seats": Setup(
            prefill_schedule_interval=8, max_num_seqs=3, num_blocks=100
        ),
        "prefill every 4th step, hybrid": Setup(prefill_schedule_interval=4, windows=(None, 64)),
        "prefill every 4th step, states": Setup(prefill_schedule_interval=4, layout="states"),
        "prefill every 4th step, drafts": Setup(prefill_schedule_interval=4, num_draft_tokens=3),
        "prefill every 4th step, priority": Setup(prefill_schedule_interval=4, order="priority"),
    }
THREE_IN_FLIGHT = (
    *("small cache", "priority", "drafts"),
    *("prefill every 2nd step", "prefill every 4th step, drafts"),
)

LEASES: dict[str, tuple[Setup, str, dict[str, Any]]] = {
    "hold": (Setup(), KEEP_ALL, TTL),
    "hold, priority": (Setup(order="priority", num_blocks=60), KEEP_ALL, TTL),
    "hold, watermark": (Setup(watermark=0.15, num_blocks=60), KEEP_ALL, TTL),
    "hold, draft model": (Setup(num_draft_tokens=2, has_draft_model=True), KEEP_ALL, TTL),
    "hold, no gate": (Setup(reserve_full_sequence=False, num_blocks=80), KEEP_ALL, TTL),
    "hybrid hold": (Setup(windows=(None, 64), num_blocks=60), KEEP_ALL, TTL),
    "hybrid hold, dense": (Setup(windows=(None, 64), num_blocks=60, retention_interval=None), KEEP_ALL, TTL),
    "hybrid hold, interval": (Setup(windows=(None, 40), num_blocks=60, retention_interval=96), KEEP_ALL, TTL),
    "hybrid hold, one to five": (Setup(windows=(None, *(33,) * 5), num_blocks=36), KEEP_ALL, TTL),
    "hybrid hold, two full": (Setup(windows=(None, None, 20), num_blocks=60), KEEP_ALL, TTL),
    "hybrid hold, two windows": (Setup(windows=(None, 100, 17), num_blocks=50), KEEP_ALL, TTL),
    # Short enough that a block behind each window fits beside the longest request.
    "hybrid hold, spare blocks": (Setup(windows=(None, 40), num_blocks=60, max_model_len=640), KEEP_ALL, TTL),
    "window hold": (Setup(windows=(48,), num_blocks=32), KEEP_ALL, TTL),
    "states hold": (Setup(layout="states", num_blocks=20), KEEP_ALL, TTL),
    "states hold, answers": (Setup(layout="states", num_blocks=20, max_model_len=640), KEEP_ALL, TTL),
    "states hold, dense": (Setup(layout="states", num_blocks=20, retention_interval=None), KEEP_ALL, TTL),
    "unlike blocks hold": (Setup(layout="window blocks twice as large", num_blocks=60), KEEP_ALL, TTL),
    "continuum-fixed": (Setup(max_num_seqs=4), "continuum-fixed", {}),
    "continuum-fixed A": (Setup(), "continuum-fixed", {"variant": "A"}),
    "admission and budget": (Setup(num_blocks=60), "tests.vllm.policies:OneJobAtATime", {"step_tokens": 40}),
}

LARGE, SMALL = 20_000, 60
"""Host memory for all that is ever computed, and for a few jobs."""

TIERS: dict[str, tuple[Setup, str]] = {
    "full": (Setup(num_blocks=60, num_host_chunks=LARGE), STOCK),
    "full, little room": (Setup(num_host_chunks=LARGE), STOCK),
    "full, small host": (Setup(num_blocks=60, num_host_chunks=SMALL), STOCK),
    "full, parts": (Setup(num_blocks=60, num_host_chunks=LARGE), "tests.vllm.policies:LoadsHalf"),
    "full, in order": (Setup(num_blocks=60, num_host_chunks=SMALL), IN_ORDER),
    "full, in order, preemptions": (Setup(num_host_chunks=SMALL, reserve_full_sequence=False), IN_ORDER),
    "1:1": (Setup(windows=(None, 64), num_blocks=60, num_host_chunks=LARGE), STOCK),
    "1:1, little room": (Setup(windows=(None, 64), num_host_chunks=LARGE), STOCK),
    "1:1, small host": (Setup(windows=(None, 64), num_blocks=60, num_host_chunks=SMALL), STOCK),
    "1:1, in order": (Setup(windows=(None, 64), num_blocks=60, num_host_chunks=SMALL), IN_ORDER),
    "1:1, dense": (
        Setup(windows=(None, 64), num_blocks=60, num_host_chunks=LARGE, retention_interval=None),
        STOCK,
    ),
    "1:5": (Setup(windows=(None, *(48,) * 5), num_blocks=40, num_host_chunks=LARGE), STOCK),
    "1:5, small host": (Setup(windows=(None, *(48,) * 5), num_blocks=40, num_host_chunks=150), IN_ORDER),
    "1:5, interval": (
        Setup(windows=(None, *(48,) * 5), num_blocks=40, num_host_chunks=LARGE, retention_interval=96),
        STOCK,
    ),
    # A look-up wants one block more than is kept, for a window of a token more than whole blocks.
    "window of a block and a token": (
        Setup(windows=(None, 33), num_blocks=60, num_host_chunks=LARGE, retention_interval=None),
        STOCK,
    ),
    "two windows": (Setup(windows=(None, 100, 32), num_blocks=60, num_host_chunks=LARGE), STOCK),
    "windows only": (Setup(windows=(48, 100), num_blocks=40, num_host_chunks=LARGE), STOCK),
    "watermark, no gate": (
        Setup(
            windows=(None, 64),
            num_blocks=60,
            num_host_chunks=LARGE,
            watermark=0.1,
            reserve_full_sequence=False,
        ),
        STOCK,
    ),
    "states": (Setup(layout="states", num_blocks=30, num_host_chunks=LARGE), STOCK),
    "states, small host": (Setup(layout="states", num_blocks=30, num_host_chunks=SMALL), IN_ORDER),
    "states, dense": (
        Setup(layout="states", num_blocks=30, num_host_chunks=LARGE, retention_interval=None),
        STOCK,
    ),
    "states in large blocks": (
        Setup(
            layout="states, all blocks large",
            num_blocks=20,
            max_num_batched_tokens=48,
            num_host_chunks=LARGE,
        ),
        STOCK,
    ),
    "unlike blocks": (
        Setup(layout="window blocks twice as large", num_blocks=60, num_host_chunks=LARGE),
        STOCK,
    ),
    "unlike blocks, hold": (
        Setup(layout="window blocks twice as large", num_blocks=36, num_host_chunks=LARGE, max_model_len=480),
        KEEP_ALL,
    ),
    "long prompts in parts": (
        Setup(num_blocks=60, num_host_chunks=LARGE, long_prefill_token_threshold=24),
        STOCK,
    ),
    "drafts": (Setup(num_blocks=60, num_host_chunks=LARGE, num_draft_tokens=3), STOCK),
    "draft model": (
        Setup(num_blocks=60, num_host_chunks=LARGE, num_draft_tokens=3, has_draft_model=True),
        STOCK,
    ),
}
# vLLM's own host memory, whose order is the release's.
TIERS |= {
    f"native, {name}": (Setup(is_native=True, **setup), STOCK)
    for name, setup in {
        "full": {"num_blocks": 60, "num_host_chunks": LARGE},
        "full, little room": {"num_host_chunks": LARGE},
        "full, small host": {"num_blocks": 60, "num_host_chunks": SMALL},
        "full, drafts": {"num_blocks": 60, "num_host_chunks": LARGE, "num_draft_tokens": 3},
        "full, small host, preemptions": {"num_host_chunks": SMALL, "reserve_full_sequence": False},
        "full, tiny host": {"num_blocks": 60, "num_host_chunks": 15},
        "1:1, small host": {"windows": (None, 64), "num_blocks": 60, "num_host_chunks": SMALL},
        "1:1, dense, small host, preemptions": {
            "windows": (None, 64),
            "num_host_chunks": 120,
            "retention_interval": None,
            "reserve_full_sequence": False,
        },
        "1:1, dense, small host": {
            "windows": (None, 64),
            "num_blocks": 60,
            "num_host_chunks": 120,
            "retention_interval": None,
        },
        "1:5, small host": {"windows": (None, *(48,) * 5), "num_blocks": 40, "num_host_chunks": 150},
        "states, small host": {"layout": "states", "num_blocks": 30, "num_host_chunks": SMALL},
        "unlike blocks, small host": {
            "layout": "window blocks twice as large",
            "num_blocks": 60,
            "num_host_chunks": SMALL,
        },
    }.items()
}
if RELEASE == "0.33":
    TIERS |= {
        "full, prefill every 4th step": (
            Setup(num_blocks=60, num_host_chunks=LARGE, prefill_schedule_interval=4),
            STOCK,
        ),
        "1:1, prefill every 4th step, few seats": (
            Setup(
                windows=(None, 64),
                num_blocks=60,
                num_host_chunks=LARGE,
                prefill_schedule_interval=4,
                max_num_seqs=3,
            ),
            STOCK,
        ),
        "states, prefill every 8th step": (
            Setup(layout="states", num_blocks=30, num_host_chunks=LARGE, prefill_schedule_interval=8),
            STOCK,
        ),
    }


def _list_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, setup in SETUPS.items():
        # With a third step in flight, as in a pipeline, a preempted request may wait for stale output.
        for depth in (1, 2, 3) if name in THREE_IN_FLIGHT else (1, 2):
            cases[f"scheduler/{name}/{depth}"] = Case(replace(setup, depth=depth), PLAIN)
    for name, (setup, policy, options) in LEASES.items():
        for depth in (1, 2):
            case = Case(replace(setup, depth=depth), WITH_TOOLS, policy, options)
            cases[f"leases/{name}/{depth}"] = case
    for name, (setup, policy) in TIERS.items():
        # With two steps in flight, vLLM learns a step later that a copy has ended.
        of_vllm = None if setup.is_native else policy
        cases[f"tiers/{name}/1"] = Case(setup, WITH_HOST, of_vllm)
        cases[f"aborts/{name}/1"] = Case(setup, WITH_HOST_AND_ABORTS, of_vllm)
    return cases


CASES = _list_cases()

WINDOWS: tuple[tuple[int | None, ...], ...] = (
    *((None,), (64,), (None, 64), (None, 17), (None, 33), (100, 20), (None, None, 20), (None, 100, 17)),
    *((None, *(48,) * 5), (None, 40, 40)),
)
POLICIES = {
    # Without autellix, as only the simulator has `may_preempt`.
    "leases": (
        *(KEEP_ALL, "tenuto", "continuum", "continuum-fixed", "infercept", "break-even"),
        *("sglang-lpm", "thunderagent", "concur"),
    ),
    "tiers": (STOCK, KEEP_ALL, ALWAYS_LOADS, IN_ORDER, "tests.vllm.policies:LoadsHalf"),
}
POLICIES["tenants"] = (*POLICIES["leases"], "job-order")
DRAWN = tuple(f"drawn/{kind}" for kind in ("scheduler", "leases", "tenants", "tiers"))
"""Cases that each seed draws anew."""


def get_case(name: str, seed: int) -> Case:
    return draw_case(name.removeprefix("drawn/"), seed) if name in DRAWN else CASES[name]


def draw_case(kind: str, seed: int) -> Case:
    """A configuration of a kind with everything drawn; its policy and traffic too."""
    rng = random.Random(f"{kind}/{seed}")
    num_host_chunks = rng.choice((15, 60, 150, LARGE)) if kind == "tiers" else 0
    is_native = kind == "tiers" and rng.random() < 0.4
    setup = _draw_setup(rng, may_overlap=kind != "tiers")
    setup = replace(setup, num_host_chunks=num_host_chunks, is_native=is_native)
    by_kind = {"scheduler": PLAIN, "leases": WITH_TOOLS, "tenants": OF_TENANTS, "tiers": WITH_HOST}
    traffic = by_kind[kind]
    policy = None if kind == "scheduler" or is_native else rng.choice(POLICIES[kind])
    if kind == "tiers":
        # Only policies with a `tier_key` treat a job's last turn as the plugin does.
        names_tools = policy in (ALWAYS_LOADS, IN_ORDER)
        traffic = replace(traffic, names_tools=names_tools, aborts=rng.choice((0.0, 0.05)))
    return Case(setup, traffic, policy, TTL if policy == KEEP_ALL else {})


def _draw_setup(rng: random.Random, *, may_overlap: bool) -> Setup:
    # The simulator has states in blocks of one size only.
    layout = rng.choice(["", "", *(name for name in LAYOUTS if name != "states in large blocks")])
    windows = (None,) if layout else rng.choice(WINDOWS)
    has_states = "states" in layout
    is_plain = windows == (None,) and not layout
    # Neither are drafts simulated with states. Drafts that were right in a turn's last step may fill a block
    # that the GPU does not cache. vLLM stores it in host memory if the next step does not take it. The
    # simulator only counts such blocks, and never stores it. With windows it shows unless the interval is 0
    # and all blocks are alike.
    has_drafts = not has_states and (may_overlap or not layout)
    num_draft_tokens = rng.choice((0, 0, 1, 3)) if has_drafts else 0
    stores_drafts = num_draft_tokens > 0 and not may_overlap
    # Every alignment of hits divides 128.
    intervals = (0,) if is_plain or stores_drafts else (0, 0, None, 128)
    return Setup(
        num_blocks=rng.choice((44, 60, 100)),
        max_num_seqs=rng.choice((1, 2, 3, 16)),
        max_num_batched_tokens=rng.choice((32, 64, 256)),
        long_prefill_token_threshold=rng.choice((0, 0, 9, 24)),
        prefill_schedule_interval=rng.choice((1, 1, 2, 4)) if RELEASE == "0.33" else 1,
        reserve_full_sequence=rng.random() < 0.6,
        watermark=rng.choice((0.0, 0.0, 0.1, 0.3)),
        windows=windows,
        layout=layout,
        retention_interval=rng.choice(intervals),
        max_model_len=rng.choice((MAX_MODEL_LEN, 480)),
        order=rng.choice(("fcfs", "priority")),
        depth=rng.choice((1, 2, 3)) if may_overlap else 1,
        num_draft_tokens=num_draft_tokens,
        has_draft_model=is_plain and num_draft_tokens > 0 and rng.random() < 0.5,
    )

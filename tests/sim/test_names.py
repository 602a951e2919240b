"""What clients call their jobs decides nothing: equal jobs go in the order in which they came."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tenuto import get_policy_names, simulate
from tenuto.core.loader import PRESETS
from tenuto.workload import Workload
from tenuto.workload.generators.fixed_lengths import ab8_jobs

BURST = ab8_jobs([2.0 * (number // 12) for number in range(48)])
"""Twelve equal jobs at a time, four times."""
NEW_NAMES = [f"{number:03d}" for number in range(len(BURST))]
random.Random(7).shuffle(NEW_NAMES)


def get_times_s(policy: str, names: list[str], **settings) -> list[float]:
    """The job times, in the order in which the jobs came."""
    jobs = [replace(job, job_id=name) for job, name in zip(BURST, names, strict=True)]
    # Its draws are seeded by names.
    options = {"explore": False} if policy == "contextserve" else None
    result = simulate(
        policy, workload=Workload("burst", tuple(jobs)), kv_tokens=40_000, options=options, **settings
    )
    return [result.record["job_times_s"][name] for name in names]


@pytest.mark.parametrize("policy", [*get_policy_names(), *PRESETS])
def test_names_decide_nothing(policy: str) -> None:
    names = [job.job_id for job in BURST]
    assert get_times_s(policy, names) == get_times_s(policy, NEW_NAMES)


def test_nor_do_they_with_host_memory_or_the_plugins_limits() -> None:
    names = [job.job_id for job in BURST]
    for settings in ({"host_gb": 10}, {"limits": "plugin"}):
        assert get_times_s("tenuto", names, **settings) == get_times_s("tenuto", NEW_NAMES, **settings)

"""Samples of the KV cache, from the steps of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenuto.records.schema import Sample


@dataclass(slots=True)
class TracedStep:
    """What a step's record says of blocks; those of a tier are None without the tier."""

    now_s: float
    num_free: int
    num_leased: int
    host: int | None
    disk: int | None


def make_samples(steps: Sequence[TracedStep], num_blocks: int) -> list[Sample]:
    """Make a sample of the KV cache for each step.

    A trace does not say which free blocks hold content. `num_blocks`: the largest number of free blocks.
    """
    samples = []
    for step in steps:
        used = num_blocks - step.num_free
        held = max(0, min(step.num_leased, used))
        samples.append(
            Sample(
                now_s=step.now_s,
                num_blocks=num_blocks,
                running_blocks=used - held,
                leased_blocks=held,
                cached_blocks=None,
                free_blocks=step.num_free,
                host_blocks=step.host,
                disk_blocks=step.disk,
            )
        )
    return samples

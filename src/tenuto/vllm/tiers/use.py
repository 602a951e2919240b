"""Whose chunks a request stores and loads."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.core.policy import Key


@dataclass(frozen=True)
class Use:
    """One request's use of the tier: what ranks its chunks."""

    key: Key = ()
    """The policy's (`Policy.tier_key`)."""
    owner: str | None = None
    """The request's job; None for a request that belongs to none."""

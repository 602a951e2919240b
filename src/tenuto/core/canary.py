"""A canary: the policy applies to some jobs only. The others run as in stock vLLM.

Jobs are chosen by a share of all jobs, by tenant, or by a group that a request's header names. A job stays
in its part for as long as it is known, and a job id is always in the same part of a share.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.core.settings import check_settings, setting

MAX_NAMES = 1000
"""Of tenants or groups in one canary."""


@dataclass(frozen=True)
class Canary:
    """The jobs that the policy applies to: those that any of the fields selects; all, if none is set."""

    share: float | None = setting(
        None, "share of jobs under the policy, chosen by a hash of the job's id", minimum=0, maximum=1
    )
    tenants: list[str] | None = None
    """Tenants whose jobs are under the policy."""
    groups: list[str] | None = None
    """Values of the header `X-Tenuto-Group` whose jobs are under the policy."""

    def __post_init__(self) -> None:
        """Check the names. Raises ConfigError."""
        for name in ("tenants", "groups"):
            names = getattr(self, name) or []
            if len(names) > MAX_NAMES or not all(isinstance(each, str) and each for each in names):
                raise ConfigError(f"tenuto.canary: {name!r} must be a list of at most {MAX_NAMES} names")

    @property
    def is_on(self) -> bool:
        """Whether some jobs run as in stock."""
        return (self.share, self.tenants, self.groups) != (None, None, None)

    def selects(self, job_id: str, tenant: str | None, group: str | None) -> bool:
        """Whether the policy applies to this job."""
        if not self.is_on:
            return True
        if tenant is not None and tenant in (self.tenants or ()):
            return True
        if group is not None and group in (self.groups or ()):
            return True
        return self.share is not None and get_place(job_id) < self.share


def get_place(job_id: str) -> float:
    """A job's place in [0, 1), by its id alone: the same in every process and after a restart."""
    digest = hashlib.blake2b(job_id.encode(errors="replace"), digest_size=7, person=b"tenuto-canary").digest()
    return int.from_bytes(digest, "big") / 2**56


def read_canary(given: Any) -> Canary:
    """The canary of an operator's settings; None is none. Raises ConfigError naming the key."""
    return Canary(**check_settings(Canary, {} if given is None else given, "tenuto.canary"))

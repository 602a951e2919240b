"""The response header about a request's cache wish: what the server's settings allow.

The API server writes it before the engine has seen the request. It knows the settings at start and operators'
changes through this process. The metrics and the trace have what became of each wish in the end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tenuto.core.errors import TenutoError
from tenuto.core.limits import Limits, read_canary
from tenuto.core.loader import load_policy
from tenuto.core.requests import Hints
from tenuto.core.types import LeaseRefusal
from tenuto.core.wishes import judge, make_wish_header
from tenuto.vllm.compat.process import get_own_config
from tenuto.vllm.settings import read_settings

logger = logging.getLogger("vllm.tenuto")


class WishAnswers:
    """Makes the header from the settings of the engines behind one API server."""

    def __init__(self) -> None:
        self._client: Any = None
        self._now: Mapping[str, Any] | None = None
        """The status, as of `Control.get_status`; None if nothing is kept here."""
        self._has_tier = False

    def make_header(self, client: Any, hints: Hints) -> tuple[str, str] | None:
        """The header for a request with these hints; None if it has no wish. `client`: the AsyncLLM."""
        wish = hints.wish
        if wish is None:
            return None
        if client is not self._client:
            self._client = client
            self._read(client)
        limits = Limits(**self._now["limits"]) if self._now is not None else Limits()
        most_s = limits.max_lease_s if hints.retain_s is None else min(limits.max_lease_s, hints.retain_s)
        refusal = LeaseRefusal.LAST_TURN if hints.is_last else None
        if not self._keeps(hints):
            refusal = LeaseRefusal.POLICY
        return make_wish_header(wish, judge(wish, most_s, has_tier=self._has_tier, refusal=refusal))

    def follow(self, status: Mapping[str, Any]) -> None:
        """An operator changed what runs."""
        if self._now is not None:
            self._now = status

    def _read(self, client: Any) -> None:
        self._now, self._has_tier = None, False
        found = get_own_config(client)
        if found is None:
            return
        config, self._has_tier = found
        settings = read_settings(config)
        self._now = {name: getattr(settings, name) for name in ("mode", "policy", "options")}
        self._now |= {"limits": vars(settings.limits), "canary": None}
        if settings.canary.is_on:
            self._now |= {"canary": vars(settings.canary)}

    def _keeps(self, hints: Hints) -> bool:
        """Whether the settings allow to keep anything for a request with these hints."""
        now = self._now
        if now is None or now["mode"] != "on":
            return False
        canary = read_canary(now["canary"])
        if canary.is_on and not canary.selects(hints.job_id or "", hints.tenant, hints.group):
            return False
        try:
            return load_policy(now["policy"], now["options"]).overrides("retain")
        except TenutoError as error:
            logger.warning("tenuto: the header of wishes: %s", error)
            return False

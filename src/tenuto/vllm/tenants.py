"""Finds the tenant of a request. The server decides the tenant, never the client.

The tenant is the API key that vLLM checked, or a header that a trusted proxy sets. The middleware knows both,
but only `vllm_xargs` reach the scheduler, and any client can write there. Therefore the middleware signs the
tenant with a secret that the server's processes share. The scheduler ignores a tenant with a wrong signature.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from typing import Any

from tenuto.core.requests.hints import get_bounded_id

SECRET_VARIABLE = "TENUTO_SECRET"
"""Environment variable with the secret that the server's processes share. If unset, it is made at start."""
HEADER_VARIABLE = "TENUTO_TENANT_HEADER"
"""Environment variable with the name of the tenant header, which a trusted proxy sets on every request."""
FIELD = "tenuto_tenant"
"""The field in `vllm_xargs`. Its value is the signature, a colon, and the tenant."""

_KEY_CHECK = "AuthenticationMiddleware"
"""vLLM's class. It is not in `compat.py`: that imports the engine, which an API server does not need."""


class TenantReader:
    """Reads the tenant from a request's headers: from the proxy's header if configured, else the API key."""

    def __init__(self, app: Any) -> None:
        """`app` is the application behind the middleware."""
        self._header = os.environ.get(HEADER_VARIABLE, "").strip().lower()
        # If the server does not check keys, clients can invent any key.
        self._has_keys = find_key_check(app) is not None

    def get(self, headers: Mapping[str, str]) -> str | None:
        """The tenant, or None. Header names must be in lower case. A key is replaced by its digest."""
        if self._header and self._header != "authorization":
            return get_bounded_id(headers.get(self._header))
        key = headers.get("authorization", "").partition(" ")[2].strip()
        if not key or not (self._has_keys or self._header):
            return None
        digest = hashlib.blake2b(key.encode(errors="replace"), digest_size=8, person=b"tenuto-tenant")
        return "key-" + digest.hexdigest()


def make_secret() -> None:
    """Make the secret for this process and its child processes, unless it is already set."""
    os.environ.setdefault(SECRET_VARIABLE, os.urandom(32).hex())


def sign(tenant: str) -> dict[str, str]:
    """The field to add to `vllm_xargs`, with the signed tenant; empty if there is no secret."""
    secret = os.environ.get(SECRET_VARIABLE)
    return {FIELD: f"{_make_signature(tenant, secret)}:{tenant}"} if secret else {}


def take_tenant(xargs: Any) -> Any:
    """The request's fields, with the client's own `tenant` replaced by the signed tenant, if it is valid."""
    if not isinstance(xargs, Mapping):
        return xargs
    fields = {name: value for name, value in xargs.items() if name != "tenant"}
    secret, signed = os.environ.get(SECRET_VARIABLE), xargs.get(FIELD)
    if secret and isinstance(signed, str):
        signature, _, tenant = signed.partition(":")
        expected = _make_signature(tenant, secret)
        if hmac.compare_digest(signature.encode(errors="replace"), expected.encode()):
            fields["tenant"] = tenant
    return fields


def _make_signature(tenant: str, secret: str) -> str:
    return hmac.digest(secret.encode(), tenant.encode(errors="replace"), "sha256").hex()


def find_key_check(app: Any) -> Any | None:
    """The check of API keys in vLLM, if it is among the applications that this application wraps."""
    while app is not None and type(app).__name__ != _KEY_CHECK:
        app = getattr(app, "app", None)
    return app

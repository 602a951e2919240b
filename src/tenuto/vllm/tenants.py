"""Finds the tenant of a request and sends it to the engine. The server decides the tenant, never the client.

The tenant comes from the API key that vLLM checked, or from a header that a trusted proxy sets. The
middleware reads it from the request's headers and adds it to all that the request sends to an engine
(`carry`, `stamp`). So the path and the form of the body do not matter. Any client can write any `vllm_xargs`;
therefore the tenant is signed with a secret that the server's processes share.

A server that has tenants tells its engines so before it takes requests. From then on, requests without a
verified tenant run as in stock vLLM (`TenantVerifier`).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import pairwise, takewhile
from pathlib import Path, PurePath
from typing import Any

from tenuto.core.errors import KEY_FLAG, ConfigError, TenutoError, is_flag
from tenuto.core.jobs import UNVERIFIED
from tenuto.core.requests import decode_header, get_bounded_id
from tenuto.vllm.compat.process import find_key_check, has_key_check
from tenuto.vllm.complaints import Complaints

SECRET_VARIABLE = "TENUTO_SECRET"
"""Environment variable with the secret that the server's processes share. If it is unset, one is made at
start."""
MIN_SECRET_CHARS = 16
HEADER_VARIABLE = "TENUTO_TENANT_HEADER"
"""Environment variable with the name of the tenant header, which a trusted proxy sets on every request."""
FIELD = "tenuto_tenant"
"""The field in `vllm_xargs`. Its value is the signature, a colon, and the tenant."""
INTRODUCE = "tenuto_tenants"
"""The name under which an API server tells the engines that it has tenants."""

_INTRODUCTION = "this server has tenants"
_KEY_NAME = "key-"
_MADE = "made-at-start-"

_tenant: ContextVar[str | None] = ContextVar("tenuto_tenant", default=None)
"""The tenant of the request that is being answered. Tasks that vLLM starts for a request inherit it."""

logger = logging.getLogger("vllm.tenuto")


# In the API server.


class TenantReader:
    """Reads the tenant from a request's headers: from the proxy's header if configured, else the API key."""

    def __init__(self, app: Any) -> None:
        """`app` is the application behind the middleware."""
        self._header = _get_header_name()
        self._check_key = find_key_check(app)
        self.has_tenants = bool(self._header) or self._check_key is not None

    def get(self, headers: Mapping[str, str], pairs: Iterable[tuple[bytes, bytes]]) -> str | None:
        """The tenant, or None. Header names must be in lower case. A key is replaced by its name.

        `pairs`: the same headers as they were sent. If the one that counts has several values, there is no
        tenant: a proxy may have added its own beside its client's.

        None on a server without tenants, whatever a client sends: an engine takes the first tenant that is
        signed as a sign that all requests have one.
        """
        if not self.has_tenants:
            return None
        counting = (self._header or "authorization").encode()
        if len({value for name, value in pairs if name.lower() == counting}) > 1:
            return None
        if self._header and self._header != "authorization":
            name = get_bounded_id(decode_header(headers.get(self._header)))
            # A header cannot name unverified tenants.
            return None if name == UNVERIFIED else name
        given = headers.get("authorization", "")
        key = given.partition(" ")[2].strip()
        # vLLM checks keys only on some paths. On the others, clients can send any key.
        if not key or not (self._header or self.has_valid_key(headers)):
            return None
        return get_key_name(key)

    def has_valid_key(self, headers: Mapping[str, str]) -> bool:
        """Whether vLLM would serve this client. A server without keys serves everybody."""
        return self._check_key is None or self._check_key(headers.get("authorization", ""))

    def find_hidden_check(self, scope: Mapping[str, Any]) -> str | None:
        """What is wrong if another middleware hides vLLM's check of keys: then any key would be valid."""
        if self._check_key is not None or not has_key_check(scope):
            return None
        return (
            "this server has API keys, but Tenuto does not find vLLM's check of them: name "
            "tenuto.vllm.Middleware before other --middleware, or let these keep what they wrap in an "
            "attribute `app`"
        )


def get_key_name(key: str) -> str:
    """The tenant's name for an API key. Without the secret, the key cannot be found by guessing."""
    return _KEY_NAME + _make_digest("name", key, get_secret() or "")[:16]


@contextlib.contextmanager
def carry(tenant: str | None) -> Iterator[None]:
    """In this context, everything that is sent to an engine belongs to this tenant."""
    token = _tenant.set(tenant)
    try:
        yield
    finally:
        _tenant.reset(token)


get_carried = _tenant.get
"""Returns the tenant of the request that is being answered."""


def stamp(sampling_params: Any) -> None:
    """Sign a request that leaves for an engine. What its client wrote in the field is removed."""
    given = sampling_params.extra_args or {}
    tenant = _tenant.get()
    signed = {} if tenant is None else sign(tenant)
    if signed or FIELD in given:
        # A new object, because vLLM may share one between requests.
        others = {name: value for name, value in given.items() if name != FIELD}
        sampling_params.extra_args = {**others, **signed}


def sign(tenant: str) -> dict[str, str]:
    """The field to add to `vllm_xargs`, with the signed tenant; empty if there is no secret."""
    secret = get_secret()
    return {FIELD: f"{_make_digest('tenant', tenant, secret)}:{tenant}"} if secret else {}


def make_introduction() -> str:
    """What an API server that has tenants sends to each engine. `TenantVerifier.answer` checks it."""
    return json.dumps(sign(_INTRODUCTION))


# In the engine.


class TenantVerifier:
    """Verifies, in the engine, which tenant a request belongs to.

    A server has tenants if the process was started with API keys or a tenant header, or once an API server
    says so or a valid signature arrives. Then the tenant of a request without a valid signature is unknown.
    """

    def __init__(self, *, trusts_clients: bool = False) -> None:
        """`trusts_clients`: clients name a request's tenant. Raises ConfigError if there is no secret."""
        self._trusts_clients = trusts_clients
        self._has_tenants = not trusts_clients and _is_started_with_tenants()
        if self._has_tenants and (problem := find_secret_problem()):
            raise ConfigError(problem)
        self.num_unverified = 0
        self._complaints = Complaints("tenuto")

    def read(self, xargs: Any) -> Mapping[str, Any] | None:
        """A request's fields, with the verified tenant in place of the client's; None if unverified."""
        fields = xargs if isinstance(xargs, Mapping) else {}
        if self._trusts_clients or not (fields or self._has_tenants):
            return fields
        tenant = self._verify(fields)
        self._has_tenants |= tenant is not None
        if tenant is None and (self._has_tenants or FIELD in fields):
            self.num_unverified += 1
            self._complaints.add(f"requests run as in stock vLLM and keep nothing: {_UNVERIFIED_REASON}")
            return None
        own = {name: value for name, value in fields.items() if name not in ("tenant", FIELD)}
        return own if tenant is None else {**own, "tenant": tenant}

    def read_release(self, fields: Any) -> Mapping[str, Any]:
        """As `read`, for a call that ends a job. Raises TenutoError if the tenant cannot be verified."""
        own = self.read(fields)
        if own is None:
            raise TenutoError(f"only its own tenant may use a job, and {_UNVERIFIED_REASON}")
        return own

    def answer(self, text: str) -> str:
        """An API server says that it has tenants. The answer is JSON with `ok`, and maybe an `error`."""
        self._has_tenants |= not self._trusts_clients
        if self._trusts_clients or self._verify(json.loads(text)) == _INTRODUCTION:
            return json.dumps({"ok": True})
        own = find_secret_problem() or f"the server and the engine have different values of {SECRET_VARIABLE}"
        return json.dumps({"ok": False, "error": own})

    def _verify(self, fields: Mapping[str, Any]) -> str | None:
        secret, signed = get_secret(), fields.get(FIELD)
        if not secret or not isinstance(signed, str):
            return None
        signature, _, tenant = signed.partition(":")
        expected = _make_digest("tenant", tenant, secret)
        is_valid = hmac.compare_digest(signature.encode(errors="replace"), expected.encode())
        return tenant if is_valid else None


_UNVERIFIED_REASON = (
    "this server has tenants, and the tenant cannot be verified. Either the request has no API key or tenant "
    "header, or an API server runs without --middleware tenuto.vllm.Middleware, or the processes have "
    f"different values of {SECRET_VARIABLE}"
)


# In both.


def make_secret() -> None:
    """Make the secret for this process and its child processes, unless it is already set."""
    if get_secret() is None:
        os.environ[SECRET_VARIABLE] = _MADE + os.urandom(32).hex()


def get_secret() -> str | None:
    """The secret of the server's processes; None if there is none, or if it is blank."""
    return os.environ.get(SECRET_VARIABLE, "").strip() or None


def check_names(names: Iterable[str]) -> None:
    """Warn if settings name API keys while no secret is set: such names change at each start."""
    if (get_secret() or _MADE).startswith(_MADE) and any(name.startswith(_KEY_NAME) for name in names):
        logger.warning(
            "tenuto: the names of API keys in the settings (%s…) mean nothing unless %s is set: they "
            "depend on it, and without it they change at each start",
            _KEY_NAME,
            SECRET_VARIABLE,
        )


def find_secret_problem() -> str | None:
    """What is wrong with the secret of a server that has tenants, and what to do; None if it is usable."""
    secret = get_secret()
    if secret is None:
        loaded = os.environ.get("VLLM_PLUGINS")
        cause = "" if loaded is None else f" (VLLM_PLUGINS is {loaded!r})"
        return (
            "this server has tenants (API keys, or a tenant header), but its processes share no secret to "
            f"sign them. vLLM's plug-in `tenuto`, which makes one, is not loaded{cause}: add `tenuto` to "
            f"VLLM_PLUGINS, or set {SECRET_VARIABLE} to {MIN_SECRET_CHARS} random characters or more"
        )
    if len(secret) < MIN_SECRET_CHARS:
        return f"{SECRET_VARIABLE} must have {MIN_SECRET_CHARS} characters or more: clients could guess it"
    return None


def _make_digest(use: str, text: str, secret: str) -> str:
    # `use` separates names from signatures: the name of a key must never equal the signature of a tenant.
    return hmac.digest(secret.encode(), f"{use}\n{text}".encode(errors="replace"), "sha256").hex()


def _get_header_name() -> str:
    return os.environ.get(HEADER_VARIABLE, "").strip().lower()


def _is_started_with_tenants() -> bool:
    """Whether this server has tenants, as far as its environment and its command line tell.

    Child processes have the first one's command line. Otherwise the API server tells the engine when it
    introduces itself, but only if it runs our middleware.
    """
    if _get_header_name():
        return True
    # `python -m` runs vLLM's `…/openai/api_server.py`, or `…/launchers/api_server/entry.py` since 0.32.
    program, arguments = PurePath(*sys.argv[:1]).parts[-2:], sys.argv[1:]
    is_server = arguments[:1] == ["serve"] or any(each.startswith("api_server") for each in program)
    return is_server and _has_keys(arguments)


def _has_keys(arguments: Sequence[str]) -> bool:
    """Whether a server has API keys. As in vLLM, an empty one is none.

    They are in its arguments (maybe abbreviated), or else in its `--config` file, or else in the environment.
    """
    keys: list[str] = []
    for index, argument in enumerate(arguments):
        if is_flag(argument, KEY_FLAG):
            _, equals, value = argument.partition("=")
            keys += [value] if equals else takewhile(_is_value, arguments[index + 1 :])
    if keys:
        return any(keys)
    files = [Path(file) for name, file in pairwise(arguments) if name == "--config"]
    for options in (_read_options(each) for each in files if each.is_file()):
        for name, value in options.items():
            if is_flag(f"--{name}", KEY_FLAG) and value is not False and value != []:
                return any(map(str, value if isinstance(value, list) else [value]))
    return bool(os.environ.get("VLLM_API_KEY"))


def _is_value(argument: str) -> bool:
    return not argument.startswith("-")


def _read_options(file: Path) -> Mapping[Any, Any]:
    """The options in vLLM's `--config` file; none if it cannot be read, as vLLM does not start then."""
    import yaml  # vLLM needs it too

    try:
        options = yaml.safe_load(file.read_text(errors="replace"))
    except yaml.YAMLError:
        return {}
    return options if isinstance(options, dict) else {}

"""Reads a server's metrics as a client: pages, their growth during a load, the KV cache, a router's engines.

Pages read during a load are parsed by hand. A Prometheus parser takes tens of milliseconds for a page of
vLLM, and during this time the client could not read tokens or send turns.

A router's own `/metrics` does not describe its engines. vllm-router and SGLang's router list their engines at
`/list_workers`. (vllm-router answers `/metrics` with the page of an arbitrary engine.) For other routers, the
user names the engines with `--engine-url`.
"""

from __future__ import annotations

import json
import math
import re
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import quote

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tenuto.client.address import SILENT, advise, check_url, get_base_url
from tenuto.core.errors import ConfigError, DataError, clean

_WRITTEN = ("vllm:", "tenuto:")

Buckets = dict[float, float]
"""By upper bound, the number of values that were at most this bound."""


@dataclass(frozen=True, slots=True)
class Page:
    """The samples of one page. Sums are over all labels that are not named; None if nothing matches."""

    at_s: float
    """Unix time."""
    samples: Mapping[str, list[tuple[Mapping[str, str], float]]]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of a metric's samples that have these labels."""
        values = [
            value
            for own, value in self.samples.get(name, ())
            if all(own.get(label) == wanted for label, wanted in labels.items())
        ]
        return sum(values) if values else None

    def values(self, name: str) -> list[float]:
        """The values of a metric's samples."""
        return [value for _, value in self.samples.get(name, ())]

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The sums of a metric's samples, grouped by the value of one label."""
        found: dict[str, float] = {}
        for own, value in self.samples.get(name, ()):
            if label in own:
                found[own[label]] = found.get(own[label], 0) + value
        return found

    def labels(self, name: str, label: str) -> list[str]:
        """The values of one label of a metric, sorted."""
        return sorted(self.by_label(name, label))

    def active(self, name: str, label: str) -> list[str]:
        """The values of one label among samples that are not 0, sorted, such as the policies that run."""
        return [value for value, total in sorted(self.by_label(name, label).items()) if total]

    def buckets(self, name: str) -> Buckets:
        """A histogram's cumulative counts. Raises DataError if a bound is not a number."""
        counts = self.by_label(f"{name}_bucket", "le")
        try:
            bounds = [float(bound) for bound in counts]
        except ValueError as error:
            raise DataError(f"/metrics: {name}_bucket: le: {error}") from None
        if any(math.isnan(bound) for bound in bounds):
            raise DataError(f"/metrics: {name}_bucket: le: must be a number, got NaN")
        return dict(zip(bounds, counts.values(), strict=True))


def parse_page(text: str, at_s: float) -> Page:
    """Parse vLLM's and Tenuto's metrics. Raises DataError if the page is invalid or contains none of them."""
    # The parser takes tens of microseconds per line, and half of a page describes the Python process.
    kept = (*_WRITTEN, *(f"# {kind} {prefix}" for kind in ("TYPE", "HELP") for prefix in _WRITTEN))
    ours = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(kept))
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(ours):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    # Labels go to the terminal.
                    labels = {name: clean(value) for name, value in sample.labels.items()}
                    samples.setdefault(sample.name, []).append((labels, sample.value))
    except ValueError as error:
        raise DataError(f"/metrics is not a page of Prometheus metrics: {error}") from None
    if not any(name.startswith(_WRITTEN) for name in samples):
        raise DataError(
            "/metrics shows neither vllm: nor tenuto: metrics; is this a vLLM server, started without "
            "--disable-log-stats?"
        )
    return Page(at_s, samples)


def join_pages(pages: Mapping[str, Page]) -> Page:
    """Join the pages of several servers into one. The label `engine` then begins with the server's name."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for name, page in pages.items():
        for metric, values in page.samples.items():
            samples.setdefault(metric, []).extend(
                ({**labels, "engine": f"{name}/{labels['engine']}"} if "engine" in labels else labels, value)
                for labels, value in values
            )
    return Page(max(page.at_s for page in pages.values()), samples)


PREFIXES = ("vllm:", "sglang:", "tenuto:")
_LEFT_OUT = ("_bucket", "_created")
_COUNTERS = ("_total", "_sum", "_count")
_BLOCK_SIZE = re.compile(r'^vllm:cache_config_info\{.*\bblock_size="([1-9]\d{0,5})"', re.MULTILINE)
_SIM_SPEED = re.compile(r"^tenuto:sim_speed\b.*$", re.MULTILINE)

Totals = dict[str, float]
"""The sum of each metric over its labels (engines, models, reasons)."""


def parse_totals(text: str) -> Totals:
    """Parse the metrics of vLLM, SGLang and Tenuto in a metrics page, without histogram buckets."""
    totals: Totals = {}
    for line in text.splitlines():
        if not line.startswith(PREFIXES):
            continue
        name, value = re.split(r"[{ ]", line, maxsplit=1)[0], _get_value(line)
        if value is not None and not name.endswith(_LEFT_OUT):
            totals[name] = totals.get(name, 0.0) + value
    return totals


def try_get_block_size(text: str) -> int | None:
    """Tokens per KV block, if a metrics page reports it."""
    found = _BLOCK_SIZE.search(text)
    return int(found[1]) if found else None


def try_get_sim_speed(text: str) -> float | None:
    """Simulated seconds per real second, if a metrics page is that of a simulated server."""
    found = _SIM_SPEED.search(text)
    value = (_get_value(found[0]) if found else None) or 0.0
    return value if value > 0 else None


def try_get_policy(text: str) -> str | None:
    """The policy that decides, if a metrics page names one, and it is on in all engines."""
    try:
        page = parse_page(text, at_s=0.0)
    except DataError:
        return None
    policies, modes = page.active("tenuto:info", "policy"), page.active("tenuto:mode", "mode")
    return clean(policies[0]) or None if len(policies) == 1 and modes in ([], ["on"]) else None


def is_counter(name: str) -> bool:
    """Whether a metric only grows, by its name."""
    return name.endswith(_COUNTERS)


def get_growth(before: Totals, after: Totals) -> Totals:
    """The increase of each counter. A counter that is missing in `before` started at 0.

    A counter that decreased is left out: its server was restarted, and the earlier count is lost.
    """
    growth = {name: after[name] - before.get(name, 0.0) for name in after if is_counter(name)}
    return {name: value for name, value in growth.items() if 0 <= value < math.inf}


def _get_value(line: str) -> float | None:
    # A label's text may contain spaces, and a timestamp may follow the value.
    _, _, rest = line.rpartition("}") if "{" in line else line.partition(" ")
    try:
        value = float(rest.split()[0])
    except (IndexError, ValueError):
        return None
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class CacheState:
    """The KV cache and the policy of one engine, or of several together."""

    block_size: int
    num_blocks: int
    """Number of KV blocks, without the null blocks."""
    num_faults: float = 0.0
    policy: str | None = None
    """The policy's name; None if an engine has no `tenuto:info` (stock vLLM)."""
    mode: str = "on"
    """The mode that an operator chose: on, off or shadow. Of several modes, one that is not on."""
    groups: tuple[str, ...] = ()
    """The kinds of layer groups that can end a hit, such as `window 1024`. Empty if all layers have full
    attention, and on stock vLLM."""
    engines: tuple[str, ...] = ()
    """The labels of all engines, one for each data-parallel rank."""


def read_cache_state(*clients: httpx.Client, engine: str | None = None) -> CacheState:
    """Read the state of one engine of a server, or of all engines of servers. Raises DataError."""
    pages = {str(client.base_url): _read_page(client) for client in clients}
    page = join_pages(pages) if len(pages) > 1 else next(iter(pages.values()))
    sizes = {
        labels.get("engine", "0"): (_get_int(labels, "block_size"), _get_int(labels, "num_gpu_blocks") - 1)
        for labels, _ in page.samples["vllm:cache_config_info"]
    }
    engines = tuple(sorted(sizes))
    which = {} if engine is None else {"engine": engine}
    sizes = {label: size for label, size in sizes.items() if engine in (None, label)}
    told = {labels.get("engine", "0") for labels, value in page.samples.get("tenuto:info", ()) if value}
    modes = page.active("tenuto:mode", "mode")
    return CacheState(
        block_size=next(iter(sizes.values()))[0],
        num_blocks=sum(blocks for _, blocks in sizes.values()),
        num_faults=page.total("tenuto:policy_faults_total", **which) or 0.0,
        # If policies differ, an engine that promises nothing decides what is expected.
        policy=page.active("tenuto:info", "policy")[0] if sizes.keys() <= told else None,
        mode=next((mode for mode in modes if mode != "on"), "on"),
        groups=tuple(page.labels("tenuto:short_hit_tokens_total", "group")),
        engines=engines,
    )


def _read_page(client: httpx.Client) -> Page:
    response = client.get("/metrics")
    response.raise_for_status()
    try:
        page = parse_page(response.text, at_s=0.0)
    except DataError as error:
        raise DataError(f"{client.base_url}: {error}") from None
    if "vllm:cache_config_info" not in page.samples:
        raise DataError(
            f"{client.base_url}/metrics has no vllm:cache_config_info; is this a vLLM server, started "
            "without --disable-log-stats?"
        )
    return page


@dataclass(frozen=True, slots=True)
class OwnJob:
    """What a server holds for one job of this client, on one engine or as the sum over all engines."""

    num_leased_blocks: int = 0
    news: str | None = None
    """What happened to its lease (`tenuto.core.types.WORDS`); None if it is complete or there was none."""
    reason: str | None = None
    num_cached_tokens: int = 0
    """Tokens that its turns found in the cache or loaded."""
    sees_leased_only: bool = False
    """Whether the server counts only tokens that the job's leases held, because others are other tenants'."""
    num_short_tokens: Mapping[str, float] = field(default_factory=dict)
    """By layer group that ended hits: tokens after the hit that another group had. Empty if none did, and if
    the server counts leased tokens only."""


def read_job(client: httpx.Client, job_id: str) -> OwnJob | None:
    """What a server holds for a job; None if the server has no such address (stock vLLM).

    Raises httpx.HTTPError if the server refuses or does not answer, DataError for a malformed answer.
    """
    response = client.get(f"/tenuto/jobs/{quote(job_id, safe='')}")
    if response.status_code in (404, 405):
        return None
    response.raise_for_status()
    try:
        ranks: list[dict[str, Any]] = response.json()["ranks"]
        return add_jobs([_read_rank(rank) for rank in ranks])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DataError(
            f"{client.base_url}: this is not Tenuto's answer about a job: {response.text[:200]!r}"
        ) from None


def _read_rank(rank: Mapping[str, Any]) -> OwnJob:
    ledger = rank["ledger"]
    sees_all = "cached_tokens" in ledger
    cached = ledger["cached_tokens"] + ledger["loaded_tokens"] if sees_all else rank["kept_tokens"]
    short = {str(group): float(number) for group, number in rank.get("short_tokens", {}).items()}
    return OwnJob(
        int(rank["leased_blocks"]), rank["lease_news"], rank["reason"], int(cached), not sees_all, short
    )


def add_jobs(jobs: Sequence[OwnJob]) -> OwnJob:
    """The sum of what several engines hold for a job."""
    told = next((job for job in reversed(jobs) if job.news is not None), OwnJob())
    groups = dict.fromkeys(group for job in jobs for group in job.num_short_tokens)
    return OwnJob(
        sum(job.num_leased_blocks for job in jobs),
        told.news,
        told.reason,
        sum(job.num_cached_tokens for job in jobs),
        any(job.sees_leased_only for job in jobs),
        {group: sum(job.num_short_tokens.get(group, 0.0) for job in jobs) for group in groups},
    )


def try_get_whole_number(text: str) -> int | None:
    """The number in a label, if it is one of at most 15 digits: with more, a float would not be exact."""
    return int(text) if text.isdecimal() and len(text) <= 15 else None


def _get_int(labels: Mapping[str, str], name: str) -> int:
    number = try_get_whole_number(labels.get(name, ""))
    if number is None:
        told = repr(labels.get(name))[:100]
        raise DataError(f"vllm:cache_config_info: label {name!r} is {told}, not a number")
    return number


@cache
def get_ssl_context() -> ssl.SSLContext:
    """The system's authorities, or those in $SSL_CERT_FILE, as in the bench. Kept, as it takes 0.1 s."""
    return ssl.create_default_context()


MAX_PAGE_BYTES = 64 * 2**20
"""Largest size of a page. A server that never stops would fill the client's memory."""


class _Bounded(httpx.SyncByteStream):
    """A response's body, which ends with an error if it is too large or takes longer than the timeout.

    A timeout of httpx itself is for a single read, and a body may have any number of them.
    """

    def __init__(self, stream: httpx.SyncByteStream, path: str, timeout_s: float) -> None:
        self._stream = stream
        self._path = path
        self._timeout_s = timeout_s
        self.close = stream.close  # type: ignore[method-assign]

    def __iter__(self) -> Iterator[bytes]:
        num_bytes, end_s = 0, time.monotonic() + self._timeout_s
        for piece in self._stream:
            num_bytes += len(piece)
            if num_bytes > MAX_PAGE_BYTES:
                raise httpx.ReadError(f"{self._path} has more than {MAX_PAGE_BYTES // 2**20} MiB")
            if time.monotonic() > end_s:
                raise httpx.ReadTimeout(f"no whole answer within {self._timeout_s:g} s")
            yield piece


def _bound(response: httpx.Response) -> None:
    path, stream = response.request.url.path, response.stream
    if "content-encoding" in response.headers:
        # A few MB that are compressed can be gigabytes.
        raise httpx.DecodingError(f"{path} is compressed, which was not asked for", request=response.request)
    assert isinstance(stream, httpx.SyncByteStream)
    response.stream = _Bounded(stream, path, response.request.extensions["timeout"]["read"])


def connect(url: str, api_key: str | None, timeout_s: float = 10.0) -> httpx.Client:
    """An HTTP client for a server's status pages. It sends the key, if there is one.

    Like the bench, it ignores proxies that the environment names: the key is for the server alone.
    """
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    return httpx.Client(
        base_url=get_base_url(url),
        headers=headers,
        timeout=timeout_s,
        trust_env=False,
        verify=get_ssl_context(),
        event_hooks={"response": [_bound]},
    )


def explain(error: httpx.HTTPError, where: str = "") -> str:
    """What a failed request means, in one line. Of a status, httpx itself writes two, without advice.

    `where`: what gave no answer, if it is not only the page that was asked for.
    """
    url = error.request.url
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return f"{url} answers with status {status}{advise(status)}"
    return f"no answer from {where or url}: {error or type(error).__name__}; {SILENT}"


def try_get_json(client: httpx.Client, path: str) -> dict[str, Any]:
    """The object that a server shows at a path; an empty one if it shows none."""
    try:
        found = client.get(path).raise_for_status().json()
    except (httpx.HTTPError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


LIST_PATH = "/list_workers"
MAX_ENGINES = 1024
"""Most names that are read from one answer."""


def parse_engines(text: str) -> tuple[str, ...]:
    """The engines in a router's answer to `/list_workers`; empty for any other answer."""
    try:
        found = json.loads(text)
        urls = found["urls"][:MAX_ENGINES]
        # vllm-router appends a data-parallel rank to the address: http://host:8000@1.
        named = dict.fromkeys(get_base_url(url.rpartition("@")[0] or url) for url in urls)
        for url in named:
            check_url(url)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, ConfigError):
        return ()
    return tuple(named)


def find_engines(client: httpx.Client) -> tuple[str, ...]:
    """The engines that a server lists; empty if it is not a router."""
    with suppress(httpx.HTTPError):
        answer = client.get(LIST_PATH)
        return parse_engines(answer.text) if answer.is_success else ()
    return ()


RESET_LIMIT_S = 30.0
"""If a server still holds blocks this many seconds after a run, its cache counts as not emptied."""


def empty_cache(urls: Sequence[str], api_key: str | None, engine_urls: Sequence[str] = ()) -> bool:
    """Empty the prefix caches of servers, or of the engines behind routers. False if one is not emptied."""
    emptied = []  # a list, not a generator: all caches are emptied, even if one of them fails
    for url in map(get_base_url, urls):
        with connect(url, api_key) as client:
            engines = tuple(map(get_base_url, engine_urls)) or find_engines(client) or (url,)
            emptied += [_empty_one(client, each) for each in engines]
    return all(emptied)


def _empty_one(client: httpx.Client, url: str) -> bool:
    end_s = time.monotonic() + RESET_LIMIT_S
    path, refusals = f"{url}/reset_prefix_cache", (401, 403, 404, 405, 501)
    with suppress(httpx.HTTPError):
        while (answer := client.post(path)).status_code not in refusals:
            if answer.is_success and _says_success(answer):
                return True
            if time.monotonic() > end_s:
                break
            time.sleep(0.5)
    return False


def _says_success(answer: httpx.Response) -> bool:
    # Before version 0.32, vLLM's answer is empty both on success and on failure.
    try:
        body = answer.json()
    except ValueError:
        return True
    return not isinstance(body, dict) or bool(body.get("success", True))

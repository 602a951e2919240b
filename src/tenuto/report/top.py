"""`tenuto top`: a live view of servers on a terminal, eighty columns wide; elsewhere a line for each look.

It shows only what the latest looks at a server's `/metrics` contain. A value is None if the server does not
report it.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tenuto.client.address import get_base_url
from tenuto.client.metrics import (
    LIST_PATH,
    Buckets,
    Page,
    connect,
    explain,
    join_pages,
    parse_engines,
    parse_page,
    try_get_json,
    try_get_whole_number,
)
from tenuto.core.errors import DataError, TenutoError, clean
from tenuto.core.types import WORDS
from tenuto.core.wishes import RESULTS
from tenuto.records.text import format_count as _n
from tenuto.records.text import format_share, format_time_s

HIT_SOURCES = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
LATENCIES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "turn": "vllm:e2e_request_latency_seconds",
    "queue": "vllm:request_queue_time_seconds",
}
_RESET_SIGNS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "tenuto:leases_granted_total")


class Window:
    """Looks of the last `span_s` seconds, the newest last. Looks before a server's restart are dropped."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._pages: deque[Page] = deque()

    def add(self, page: Page) -> None:
        """One more look."""
        if self._pages and _has_restarted(self._pages[-1], page):
            self._pages.clear()
        self._pages.append(page)
        # Keep one look that is older than the window, so that the looks span the whole window.
        while len(self._pages) > 2 and self._pages[1].at_s <= page.at_s - self._span_s:
            self._pages.popleft()

    @property
    def newest(self) -> Page:
        """The last look. Raises IndexError before the first."""
        return self._pages[-1]

    @property
    def length_s(self) -> float:
        """From the oldest to the newest look."""
        return self._pages[-1].at_s - self._pages[0].at_s

    def growth(self, name: str, **labels: str) -> float | None:
        """How much a counter grew. A counter that is missing in the first look grew from 0."""
        new = self.newest.total(name, **labels)
        if new is None or len(self._pages) < 2:
            return None
        return max(0.0, new - (self._pages[0].total(name, **labels) or 0.0))

    def rate(self, name: str, **labels: str) -> float | None:
        """Growth per second."""
        growth = self.growth(name, **labels)
        return None if growth is None or self.length_s <= 0 else growth / self.length_s

    def rates(self, name: str, label: str) -> dict[str, float | None]:
        """Growth per second by the values of a label."""
        return {value: self.rate(name, **{label: value}) for value in self.newest.labels(name, label)}

    def ratio(self, part: str, whole: str, **labels: str) -> float | None:
        """The growth of one counter over that of another."""
        return _divide(self.growth(part, **labels), self.growth(whole, **labels))

    def buckets(self, name: str) -> Buckets:
        """What a histogram counted since the window's first look."""
        new, old = self.newest.buckets(name), self._pages[0].buckets(name)
        return {bound: max(0.0, count - old.get(bound, 0.0)) for bound, count in sorted(new.items())}

    def percentile(self, name: str, percent: float) -> float | None:
        """A histogram's percentile since the window's first look."""
        return get_percentile(self.buckets(name), percent)


def get_percentile(buckets: Buckets, percent: float) -> float | None:
    """The percentile, linear within its bucket as in Prometheus' histogram_quantile; None without values."""
    total = max(buckets.values(), default=0.0)
    if not total:
        return None
    rank, low, below = percent / 100 * total, 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= rank:
            if math.isinf(bound):
                break
            return low + (bound - low) * ((rank - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return low


def _divide(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _has_restarted(before: Page, after: Page) -> bool:
    pairs = [(before.total(name), after.total(name)) for name in _RESET_SIGNS]
    return any(old is not None and new is not None and new < old for old, new in pairs)


def make_state(window: Window, server: Mapping[str, Any]) -> dict[str, Any]:
    """The state at the newest look."""
    page = window.newest
    total, rate, percentile = page.total, window.rate, window.percentile
    return {
        "at_s": page.at_s,
        "window_s": window.length_s,
        "server": {
            **server,
            "models": page.labels("vllm:num_requests_running", "model_name"),
            "policy": ", ".join(page.active("tenuto:info", "policy")) or None,
            "mode": ", ".join(page.active("tenuto:mode", "mode")) or None,
            "tenuto": next(iter(page.active("tenuto:info", "version")), None),
            "has_tenuto": any(name.startswith("tenuto:") for name in page.samples),
        },
        "requests": {
            "running": total("vllm:num_requests_running"),
            "waiting": total("vllm:num_requests_waiting"),
            "parked": total("tenuto:parked_jobs"),
            "finished_per_s": rate("vllm:request_success_total"),
            "prompt_tokens_per_s": rate("vllm:prompt_tokens_total"),
            "output_tokens_per_s": rate("vllm:generation_tokens_total"),
            "longest_wait_s": _get_longest_wait_s(page),
            "overdue_per_s": rate("tenuto:overdue_turns_total"),
            "preemptions_per_s": rate("vllm:num_preemptions_total"),
        },
        "cache": _get_cache(page),
        "leases": {
            "jobs": total("tenuto:retained_jobs"),
            "blocks": total("tenuto:retained_blocks"),
            "granted_per_s": rate("tenuto:leases_granted_total"),
            "ended_per_s": window.rates("tenuto:leases_ended_total", "reason"),
            "refused_per_s": window.rates("tenuto:lease_refusals_total", "reason"),
            "reclaims_per_s": window.rates("tenuto:lease_reclaims_total", "reason"),
            "revoked_blocks_per_s": rate("tenuto:revoked_blocks_total"),
            "next_deadline_in_s": _get_next_deadline_in_s(page),
        },
        # Clients' cache wishes by their result; all zero without wishes.
        "wishes": {
            **{result: total("tenuto:wishes_total", result=result) for result in RESULTS},
            "malformed": total("tenuto:malformed_wishes_total"),
        },
        "tenants": _get_tenants(page),
        "hits": {
            "ratio": window.ratio(*HIT_SOURCES),
            "ratio_since_start": _divide(*map(total, HIT_SOURCES)),
            "from_tiers_ratio": window.ratio(
                "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"
            ),
            "recomputed_tokens_per_s": rate("tenuto:recomputed_tokens_total"),
            "short_tokens_per_s": window.rates("tenuto:short_hit_tokens_total", "group"),
        },
        "latency": {
            f"{key}_p{percent}_s": percentile(name, percent)
            for key, name in LATENCIES.items()
            for percent in (50, 95)
        },
        "tools": {
            "p50_s": percentile("tenuto:tool_time_seconds", 50),
            "p95_s": percentile("tenuto:tool_time_seconds", 95),
            "buckets": _count_apart(window.buckets("tenuto:tool_time_seconds")),
        },
        "tiers": _get_tiers(page),
        "policy": {
            "faults": total("tenuto:policy_faults_total"),
            "faults_per_s": rate("tenuto:policy_faults_total"),
            "admission_waits_per_s": rate("tenuto:admission_waits_total"),
            "decision_p95_s": percentile("tenuto:decision_time_seconds", 95),
        },
        # What the policy would have changed, had it not been in shadow mode.
        "shadow": {
            "jobs": total("tenuto:shadow_retained_jobs"),
            "blocks": total("tenuto:shadow_retained_blocks"),
            "hits_per_s": rate("tenuto:shadow_leases_ended_total", reason="hit"),
            "gained_tokens_per_s": rate("tenuto:shadow_gained_tokens_total"),
            "delayed_turns_per_s": rate("tenuto:shadow_delayed_turns_total"),
        },
        # The two groups of a canary; empty if no turn was counted in the window, as without a canary.
        "canary": {
            group: {
                "turns_per_s": rate("tenuto:group_turns_total", group=group),
                "hit_ratio": window.ratio(
                    "tenuto:group_hit_tokens_total", "tenuto:group_prompt_tokens_total", group=group
                ),
                "mean_queue_s": window.ratio(
                    "tenuto:group_queue_delay_seconds_sum",
                    "tenuto:group_queue_delay_seconds_count",
                    group=group,
                ),
            }
            for group in page.active("tenuto:group_turns_total", "group")
            if window.growth("tenuto:group_turns_total")
        },
        "engines": [
            {
                "engine": engine,
                "running": total("vllm:num_requests_running", engine=engine),
                "waiting": total("vllm:num_requests_waiting", engine=engine),
                "leases": total("tenuto:retained_jobs", engine=engine),
                "cache": _get_cache(page, engine=engine),
            }
            for engine in _get_engines(page)
        ],
    }


def _get_engines(page: Page) -> list[str]:
    """The engines by their labels: numbers first, in their order."""
    engines = page.labels("vllm:num_requests_running", "engine")
    numbers = {name: try_get_whole_number(name) for name in engines}
    return sorted(engines, key=lambda name: (numbers[name] is None, numbers[name] or 0, name))


def _get_longest_wait_s(page: Page) -> float | None:
    """The longest time that a turn has waited for its first step; 0 if none waits."""
    arrivals_s = page.values("tenuto:oldest_waiting_timestamp_seconds")
    if not arrivals_s:
        return None
    return max((max(0.0, page.at_s - value) for value in arrivals_s if value > 0), default=0.0)


def _get_next_deadline_in_s(page: Page) -> float | None:
    """Seconds until the next lease's deadline. A busy engine ends leases a little late."""
    told_s = page.values("tenuto:next_lease_deadline_timestamp_seconds")
    first_s = min((value for value in told_s if value > 0), default=None)
    return None if first_s is None else max(0.0, first_s - page.at_s)


def _get_tenants(page: Page) -> dict[str, Any]:
    blocks = page.by_label("tenuto:tenant_leased_blocks", "tenant")
    return {
        # A tenant may be active in several engines, so sums would count it several times.
        "active": max(page.values("tenuto:active_tenants"), default=None),
        "largest_share": max(page.values("tenuto:largest_tenant_share"), default=None),
        "leased_blocks": dict(sorted(blocks.items(), key=lambda item: (-item[1], item[0]))),
    }


def _get_cache(page: Page, **labels: str) -> dict[str, Any]:
    """The KV cache in blocks: running, leased and not in use, free.

    The server's usage does not include leased blocks that no request uses.
    """
    sizes = {own.get("engine", "0"): own for own, _ in page.samples.get("vllm:cache_config_info", ())}
    wanted = labels.get("engine")
    num_blocks = used = 0.0
    for engine, own in sizes.items():
        blocks = (try_get_whole_number(own.get("num_gpu_blocks", "")) or 0) - 1  # block 0 holds no tokens
        if blocks > 0 and wanted in (None, engine):
            num_blocks += blocks
            used += blocks * (page.total("vllm:kv_cache_usage_perc", engine=engine) or 0.0)
    leased = page.total("tenuto:idle_retained_blocks", **labels)
    if not num_blocks:
        return {"blocks": None, "running": None, "leased": leased, "free": None, "used_share": None}
    running = min(used, num_blocks)
    # The two gauges are not read at exactly the same time.
    held = min(leased or 0.0, num_blocks - running)
    return {
        "blocks": round(num_blocks),
        "running": round(running),
        "leased": None if leased is None else round(held),
        "free": round(max(0.0, num_blocks - running - held)),
        "used_share": used / num_blocks,
    }


def _count_apart(cumulative: Buckets) -> list[dict[str, float | None]]:
    return [
        {"up_to_s": None if math.isinf(bound) else bound, "count": round(count - below)}
        for (bound, count), below in zip(cumulative.items(), [0.0, *cumulative.values()], strict=False)
    ]


def _get_tiers(page: Page) -> list[dict[str, Any]]:
    """Tiers below the GPU, as far as the server's connector shows them."""
    found: list[tuple[str, float | None, float | None]] = []
    for name in ("host", "disk"):  # of `tenuto serve --host-gb`
        used = page.total("tenuto:tier_used_blocks", tier=name)
        found.append((name, _divide(used, page.total("tenuto:tier_blocks", tier=name)), used))
    if all(used is None for *_, used in found):
        found = [("cpu", page.total("vllm:kv_offload_cpu_cache_usage_perc"), None)]
        found.append(("host", None, page.total("vllm:simple_kv_offload_used_blocks")))
    return [
        {"name": name, "used_share": share, "used_blocks": used}
        for name, share, used in found
        if share is not None or used is not None
    ]


TIMEOUT_S = 10.0
"""Seconds to wait for an answer. A server that computes a large step answers late."""
OTHERS_WAIT_S = 1.5
"""The same for one of several servers: the others are shown after that, before the next look is due."""
CLOCKS_AGREE_S = 2.0
"""Clocks that differ by less count as equal: an answer takes a while, and its date has whole seconds."""
WIDTH = 80
_LABEL_WIDTH = 10
_BAR_WIDTH = 40
_SPARK_WIDTH = 30
_SPARKS = "▁▂▃▄▅▆▇█"
_MAX_ENGINES = 8
_MAX_REASONS = 2
_MAX_TENANTS = 5
Show = Callable[[str], None]
"""Shows the last state, or the problem for which there is no later one."""


def watch(
    urls: Sequence[str],
    *,
    interval_s: float = 2.0,
    window_s: float = 60.0,
    once: bool = False,
    as_json: bool = False,
    api_key: str | None = None,
) -> int:
    """Watch until Ctrl-C, or once; returns the exit status. Raises TenutoError if `once` sees no server."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(url, api_key, TIMEOUT_S)) for url in urls]
        watched = Watch(clients, ", ".join(urls), window_s)
        if once:
            _show_once(watched, interval_s, as_json)
            return 0
        with suppress(KeyboardInterrupt, BrokenPipeError):
            if as_json or not sys.stdout.isatty() or Console().is_dumb_terminal:
                _look_forever(watched, interval_s, partial(_print_line, watched, as_json))
            with Live(Text("…"), console=Console(), screen=True, auto_refresh=False) as live:
                _look_forever(watched, interval_s, partial(_show_live, watched, live))
    return 0


def _show_once(watched: Watch, interval_s: float, as_json: bool) -> None:
    try:
        watched.look()
        time.sleep(interval_s)
        watched.look()
    except (httpx.HTTPError, DataError) as error:
        raise TenutoError(_explain(error, watched.where)) from None
    if as_json:
        print(json.dumps(watched.states[-1], allow_nan=False))
    else:
        console = Console(width=None if sys.stdout.isatty() else WIDTH)
        console.print(make_screen(watched.states))


def _show_live(watched: Watch, live: Live, problem: str) -> None:
    picture: RenderableType
    if not watched.states:
        title = (("tenuto top ", "bold"), f"{watched.where}\n\n")
        picture = Text.assemble(*title, (f"{problem}\n", "red"), "not seen yet; trying again")
    else:
        picture = make_screen(watched.states)
        if problem:
            # A busy server answers late. Its last state is better than nothing.
            age_s = time.time() - watched.states[-1]["at_s"]
            trouble = Text.assemble((problem, "red"), f"\nThis is {_s(age_s)} old; trying again.")
            picture = Group(trouble, Text(), picture)
    live.update(picture, refresh=True)


def _print_line(watched: Watch, as_json: bool, problem: str) -> None:
    seen = watched.states[-1:]
    if as_json:
        seen_s = seen[0]["at_s"] if seen else None
        trouble = {"at_s": time.time(), "problem": problem, "seen_at_s": seen_s}
        line = json.dumps(trouble if problem else seen[0], allow_nan=False)
    elif problem:
        line = f"{time.strftime('%H:%M:%S')} | {problem} (trying again)"
    else:
        line = make_line(seen[0])
    print(line, flush=True)


def _look_forever(watched: Watch, interval_s: float, show: Show) -> NoReturn:
    """Look and show, again and again. While an answer is late, say so at each interval."""
    looked: SimpleQueue[Exception | None] = SimpleQueue()

    def look() -> None:
        try:
            watched.look()
            looked.put(None)
        except Exception as error:  # for the other thread
            looked.put(error)

    while True:
        began_s = time.monotonic()
        threading.Thread(target=look, name="top", daemon=True).start()
        while True:
            try:
                found = looked.get(timeout=interval_s)
                break
            except Empty:
                show(f"no answer from {watched.where} for {time.monotonic() - began_s:.0f} s")
        if isinstance(found, httpx.HTTPError | DataError):
            watched.forget_server()
        elif found is not None:
            raise found
        show("" if found is None else _explain(found, watched.where))
        time.sleep(max(0.0, interval_s - (time.monotonic() - began_s)))


def _explain(error: Exception, url: str) -> str:
    return explain(error, url) if isinstance(error, httpx.HTTPError) else f"{url}: {error}"


class Watch:
    """One server, or several together, watched."""

    def __init__(self, clients: Sequence[httpx.Client], where: str, window_s: float) -> None:
        self.where = where
        self.states: list[dict[str, Any]] = []
        """The last ones, the newest last."""
        self._given = tuple(clients)
        self._engines: dict[httpx.Client, dict[str, httpx.Client]] = {}
        """For each router that was given: its engines, by address. Empty for a server that has answered."""
        self._window_s = window_s
        self._window = Window(window_s)
        self._answered: set[str] = set()
        """The servers that the looks in the window are of."""
        self._server: dict[str, Any] | None = None

    def look(self) -> dict[str, Any]:
        """The state now. Raises httpx.HTTPError if there is no answer, DataError if it is not a server's.

        Of several servers, those that do not answer are left out. It is an error only if none answers.
        """
        answers: dict[httpx.Client, _Answer] = {}
        for found in _ask_all(self._ask, self._given):
            answers |= found
        shown = {client: each for client, each in answers.items() if isinstance(each, Page)}
        if not shown:
            raise next(each for each in answers.values() if not isinstance(each, Page))
        pages = {_get_name(client): page for client, page in shown.items()}
        page = next(iter(pages.values())) if len(answers) == 1 else join_pages(pages)
        if self._server is None:
            self._server = {"vllm": _ask_version(next(iter(shown)))}
        urls = {client: get_base_url(str(client.base_url)) for client in answers}
        self._server["no_answer"] = [url for client, url in urls.items() if client not in shown]
        self._server["url"] = ", ".join(
            url + ("" if client in shown else " (no answer)") for client, url in urls.items()
        )
        if pages.keys() != self._answered:
            # Without this, a server that answers again would have computed in one look all it ever did.
            self._window, self._answered = Window(self._window_s), set(pages)
        self._window.add(page)
        self.states = [*self.states, make_state(self._window, self._server)][-_SPARK_WIDTH:]
        return self.states[-1]

    def forget_server(self) -> None:
        """Forget the server after a failed request, because a different one may answer next time."""
        self._server = None
        self._engines.clear()

    def _ask(self, given: httpx.Client) -> dict[httpx.Client, _Answer]:
        """The page of a server, or those of a router's engines."""
        engines = self._engines.get(given)
        is_one = len(self._given) == 1
        timeout_s = TIMEOUT_S if is_one and not engines else OTHERS_WAIT_S
        try:
            # A router's engines join and leave. A server is not asked for them again.
            urls = () if engines == {} else parse_engines(given.get(LIST_PATH, timeout=timeout_s).text)
        except httpx.HTTPError as error:
            if not engines:
                return {given: error}
            urls = ()
        known = engines or {}
        engines = {url: known.get(url) or _connect(url, given) for url in urls or known}
        clients = tuple(engines.values()) or (given,)
        timeout_s = TIMEOUT_S if is_one and len(clients) == 1 else OTHERS_WAIT_S
        pages = _ask_all(partial(_read_page, timeout_s=timeout_s), clients)
        answers = dict(zip(clients, pages, strict=True))
        if engines or isinstance(answers[given], Page):
            self._engines[given] = engines
        return answers


_Answer = Page | httpx.HTTPError | DataError
T = TypeVar("T")


def _ask_all(ask: Callable[[httpx.Client], T], clients: Sequence[httpx.Client]) -> list[T]:
    """Ask all at the same time, because one may hang. A pool's threads would outlive Ctrl-C."""
    answers: dict[httpx.Client, T] = {}
    failures: list[Exception] = []

    def ask_one(client: httpx.Client) -> None:
        try:
            answers[client] = ask(client)
        except Exception as error:  # for the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=ask_one, args=(each,), daemon=True) for each in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [answers[each] for each in clients]


def _read_page(client: httpx.Client, timeout_s: float) -> _Answer:
    try:
        answer = client.get("/metrics", timeout=timeout_s).raise_for_status()
        now_s = time.time()
        return _shift_times(parse_page(answer.text, now_s), _get_lead_s(answer, now_s))
    except (httpx.HTTPError, DataError) as error:
        return error


def _get_lead_s(answer: httpx.Response, now_s: float) -> float:
    """Seconds by which this clock is ahead of the server's; 0 if they agree, or if that is unknown."""
    try:
        # The header has whole seconds, rounded down.
        lead_s = now_s - parsedate_to_datetime(answer.headers["date"]).timestamp() - 0.5
    except (KeyError, ValueError, OverflowError):
        return 0.0
    return lead_s if abs(lead_s) > CLOCKS_AGREE_S else 0.0


def _shift_times(page: Page, lead_s: float) -> Page:
    """The page with the server's times, such as a deadline, on this machine's clock."""
    if not lead_s:
        return page
    moved = {
        name: [(labels, value + lead_s if value > 0 else value) for labels, value in page.samples[name]]
        for name in page.samples
        if name.endswith("_timestamp_seconds")
    }
    return replace(page, samples={**page.samples, **moved})


def _ask_version(client: httpx.Client) -> str | None:
    version = try_get_json(client, "/version").get("version")
    return clean(version) if isinstance(version, str) else None


def _get_name(client: httpx.Client) -> str:
    """The server's address without `http://`. Servers of one host differ by their paths."""
    return client.base_url.netloc.decode() + client.base_url.path.rstrip("/")


def _connect(url: str, router: httpx.Client) -> httpx.Client:
    """A client for a router's engine."""
    client = connect(url, None, TIMEOUT_S)
    client.headers = router.headers
    return client


def make_screen(states: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The whole picture of the last state, with the way to it."""
    state = states[-1]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=_LABEL_WIDTH, style="bold")
    grid.add_column(overflow="fold")
    rows: list[tuple[str, RenderableType]] = [
        ("requests", _show_requests(state)),
        ("", _show_rates(state["requests"])),
        ("", _show_spark("running", [each["requests"]["running"] for each in states])),
        ("KV cache", _show_bar(state["cache"])),
        ("", _show_split(state["cache"])),
        ("hits", _show_hits(state["hits"])),
        ("", _show_hit_spark([each["hits"] for each in states])),
        ("latency", _show_latencies(state["latency"])),
    ]
    if state["server"]["has_tenuto"]:
        wishes = ", ".join(f"{_n(number)} {result}" for result, number in state["wishes"].items() if number)
        rows += [
            ("leases", _show_leases(state["leases"])),
            ("", _show_ends(state["leases"])),
            *(("", words) for words in _show_reasons(state["leases"])),
            ("", _show_spark("leased", [each["leases"]["blocks"] for each in states])),
            *([("wishes", wishes)] if wishes else []),
            *_show_tenants(state["tenants"]),
            ("tools", _show_tools(state["tools"])),
            ("policy", _show_policy(state["policy"])),
        ]
        if "shadow" in (state["server"].get("mode") or ""):
            rows.append(("shadow", _show_shadow(state["shadow"])))
        rows += [("canary", _show_group(name, group)) for name, group in state["canary"].items()]
    rows += [("tier", _show_tier(tier)) for tier in state["tiers"]]
    for label, content in rows:
        # Names from a server are text, not rich's markup.
        grid.add_row(label, Text(content) if isinstance(content, str) else content)
    parts: list[RenderableType] = [_show_head(state), Text(), grid]
    if len(state["engines"]) > 1:
        parts += [Text(), _show_engines(state["engines"])]
    return Group(*parts)


def make_line(state: Mapping[str, Any]) -> str:
    """A state in one line, for a log."""
    requests, cache, leases, hits = (state[name] for name in ("requests", "cache", "leases", "hits"))
    parts = [
        time.strftime("%H:%M:%S", time.localtime(state["at_s"])),
        f"running {_n(requests['running'])} waiting {_n(requests['waiting'])}",
        f"kv {_p(cache['used_share'])}",
        f"hit {_p(hits['ratio'])}",
        f"ttft p95 {_s(state['latency']['ttft_p95_s'])}",
    ]
    if state["server"]["has_tenuto"]:
        ends = " ".join(f"{why} {_r(rate)}" for why, rate in leases["ended_per_s"].items() if rate)
        parts.insert(
            3,
            f"leases {_n(leases['jobs'])} blocks {_n(leases['blocks'])} "
            f"next {_s(leases['next_deadline_in_s'])} {ends}".rstrip(),
        )
        parts.append(f"faults {_n(state['policy']['faults'])}")
        if (mode := state["server"].get("mode")) not in (None, "on"):
            parts.append(f"mode {mode}")
    if silent := state["server"].get("no_answer"):
        parts.append(f"no answer from {', '.join(silent)}")
    return " | ".join(parts)


def make_spark(values: Sequence[float | None], highest: float | None = None) -> str:
    """The last values as bars of eight heights; a blank for an unknown value."""
    shown = list(values)[-_SPARK_WIDTH:]
    top = highest or max((value for value in shown if value is not None), default=0.0) or 1.0
    return "".join(
        " " if value is None else _SPARKS[min(7, max(0, int(value / top * 7.999)))] for value in shown
    )


def _show_head(state: Mapping[str, Any]) -> Text:
    server = state["server"]
    version = server["vllm"] or ""
    named = ["simulated server" if version.endswith("-sim") else f"vLLM {version}".rstrip()]
    if server["has_tenuto"]:
        named.append(f"Tenuto {server['tenuto'] or ''}".strip())
        mode = server.get("mode") or "on"
        is_on = mode == "on"
        named.append(f"policy {server['policy'] or '(not told)'}{'' if is_on else f' ({mode.upper()})'}")
    else:
        named.append("without Tenuto's scheduler")
    named += [", ".join(server["models"])] if server["models"] else []
    head = Text.assemble(("tenuto top ", "bold"), server["url"], "\n", " · ".join(named))
    head.append(f" · last {state['window_s']:.0f} s", style="dim")
    return head


def _show_requests(state: Mapping[str, Any]) -> Text:
    requests = state["requests"]
    text = Text.assemble(
        (f"{_n(requests['running'])} running", "green"), f", {_n(requests['waiting'])} waiting"
    )
    if requests["parked"] is not None:
        text.append(f" ({_n(requests['parked'])} of them not admitted yet)")
    if requests["longest_wait_s"]:
        text.append(f"; the longest for {_s(requests['longest_wait_s'])}")
    if requests["overdue_per_s"]:
        text.append(f"; {_r(requests['overdue_per_s'])} overdue")
    return text


def _show_rates(requests: Mapping[str, Any]) -> str:
    done, preempted = _r(requests["finished_per_s"]), _r(requests["preemptions_per_s"])
    read, written = _n(requests["prompt_tokens_per_s"]), _n(requests["output_tokens_per_s"])
    return f"{done} done, {preempted} preempted; {read} prompt and {written} output tok/s"


def _show_spark(label: str, values: Sequence[float | None], highest: float | None = None) -> Text:
    return Text.assemble((f"{label:<10}", "dim"), (make_spark(values, highest), "cyan"))


_PARTS = (("running", "█", "green"), ("leased", "▓", "yellow"), ("free", "░", "bright_black"))
"""Parts of the KV cache, with sign and colour."""


def _show_bar(cache: Mapping[str, Any]) -> Text:
    if not cache["blocks"]:
        return Text("the server does not tell its size (is it without --disable-log-stats?)", style="dim")
    text, end, shown = Text(), 0.0, 0
    for name, sign, style in _PARTS:
        end += (cache[name] or 0) / cache["blocks"] * _BAR_WIDTH
        width = max(0, round(end) - shown)
        text.append(sign * width, style=style)
        shown += width
    return text.append(f" of {cache['blocks']:,} blocks")


def _show_split(cache: Mapping[str, Any]) -> Text:
    known = [(name, style) for name, _, style in _PARTS if cache["blocks"] and cache[name] is not None]
    return Text.assemble(*((f"{name} {_p(cache[name] / cache['blocks'])}  ", style) for name, style in known))


def _show_hits(hits: Mapping[str, Any]) -> str:
    text = f"{_p(hits['ratio'])} of prompt tokens (since start {_p(hits['ratio_since_start'])})"
    if hits["from_tiers_ratio"] is not None:
        text += f"; {_p(hits['from_tiers_ratio'])} of the rest from tiers"
    return text


def _show_hit_spark(every: Sequence[Mapping[str, Any]]) -> Text:
    hits, text = every[-1], _show_spark("hit ratio", [each["ratio"] for each in every], highest=1.0)
    if hits["recomputed_tokens_per_s"] is not None:
        text.append(f"  {hits['recomputed_tokens_per_s']:,.0f} tok/s computed again")
    for group, rate in hits["short_tokens_per_s"].items():
        if rate:
            text.append(f"  {rate:,.0f} tok/s missed: {group} was evicted")
    return text


def _show_latencies(latency: Mapping[str, float | None]) -> str:
    return "p50/p95: " + "  ".join(
        f"{name} {_s(latency[f'{name}_p50_s'])}/{_s(latency[f'{name}_p95_s'])}"
        for name in ("queue", "ttft", "turn")
    )


def _show_leases(leases: Mapping[str, Any]) -> Text:
    deadline_s = leases["next_deadline_in_s"]
    return Text.assemble(
        (f"{_n(leases['jobs'])} job{'' if leases['jobs'] == 1 else 's'}", "yellow"),
        f", {_n(leases['blocks'])} blocks; {_r(leases['granted_per_s'])} granted; ",
        "no deadline ahead" if deadline_s is None else (f"next ends in {_s(deadline_s)}", "bold"),
    )


def _show_ends(leases: Mapping[str, Any]) -> str:
    ends, refusals = (
        ", ".join(f"{why} {_r(rate)}" for why, rate in leases[name].items() if rate)
        for name in ("ended_per_s", "refused_per_s")
    )
    taken = leases["revoked_blocks_per_s"]
    refused = f"; refused: {refusals}" if refusals else ""
    return f"ended: {ends or 'none'}{refused}" + (f"; {taken:,.1f} blocks/s reclaimed" if taken else "")


def _show_reasons(leases: Mapping[str, Any]) -> Iterator[Text]:
    rates = [
        (rate, what, why)
        for what, name in (("not granted", "refused_per_s"), ("taken back", "reclaims_per_s"))
        for why, rate in leases[name].items()
        if rate
    ]
    for rate, what, why in sorted(rates, reverse=True)[:_MAX_REASONS]:
        yield Text(f"{_r(rate)} {what}: {WORDS[what].get(why, why)}", style="dim")


def _show_tenants(tenants: Mapping[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    """The tenants that hold leased blocks; nothing on a server without tenants."""
    blocks = tenants["leased_blocks"]
    if (tenants["active"] or 0) < 2 and len(blocks) < 2:
        return
    total = sum(blocks.values())
    shares = [f"{name} {_p(count / total)}" for name, count in blocks.items() if count]
    text = f"{_n(tenants['active'])} active; leased: {', '.join(shares[:_MAX_TENANTS]) or 'nothing'}"
    yield "tenants", Text(text, style="bold" if (tenants["largest_share"] or 0) > 0.8 else "")


def _show_tools(tools: Mapping[str, Any]) -> Text:
    counts = [bucket["count"] for bucket in tools["buckets"]]
    if not any(counts):
        return Text("no tool call returned", style="dim")
    bounds_s = [bucket["up_to_s"] for bucket in tools["buckets"] if bucket["up_to_s"] is not None]
    return Text.assemble(
        f"p50 {_s(tools['p50_s'])} p95 {_s(tools['p95_s'])}  ",
        (f"≤{bounds_s[0]:g} s " if bounds_s else "", "dim"),
        (make_spark(counts), "cyan"),
        (f" >{bounds_s[-1]:g} s" if bounds_s else "", "dim"),
    )


def _show_policy(policy: Mapping[str, Any]) -> Text:
    return Text.assemble(
        (f"{_n(policy['faults'])} faults", "red" if policy["faults"] else ""),
        f", {_r(policy['admission_waits_per_s'])} new jobs held back, "
        f"decisions p95 {_s(policy['decision_p95_s'])}",
    )


def _show_shadow(shadow: Mapping[str, Any]) -> str:
    return (
        f"would hold {_n(shadow['jobs'])} jobs, {_n(shadow['blocks'])} blocks; {_r(shadow['hits_per_s'])} "
        f"hits, {_n(shadow['gained_tokens_per_s'])} tok/s gained, {_r(shadow['delayed_turns_per_s'])} delayed"
    )


def _show_group(name: str, group: Mapping[str, Any]) -> str:
    return (
        f"{name}: {_r(group['turns_per_s'])} turns, hits {_p(group['hit_ratio'])}, "
        f"mean wait {_s(group['mean_queue_s'])}"
    )


def _show_tier(tier: Mapping[str, Any]) -> str:
    used = _p(tier["used_share"]) if tier["used_share"] is not None else f"{_n(tier['used_blocks'])} blocks"
    return f"{tier['name']}: {used} used"


def _show_engines(engines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for column in ("engine", "running", "waiting", "leases", "used", "leased"):
        table.add_column(column, justify="right")
    for engine in engines[:_MAX_ENGINES]:
        cache = engine["cache"]
        share = cache["leased"] / cache["blocks"] if cache["blocks"] and cache["leased"] is not None else None
        table.add_row(
            Text(engine["engine"]),
            *(_n(engine[name]) for name in ("running", "waiting", "leases")),
            _p(cache["used_share"]),
            _p(share),
        )
    if len(engines) > _MAX_ENGINES:
        table.caption = f"and {len(engines) - _MAX_ENGINES} more (--json has all)"
    return table


_s = partial(format_time_s, digits=1)
_p = partial(format_share, digits=0)


def _r(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.1f}/s"

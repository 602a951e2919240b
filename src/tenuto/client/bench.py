"""`tenuto bench`: from options to a result. `ab` and sweeps use this runner of live loads too."""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
import signal
import time
from array import array
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from tenuto.client.address import get_base_url
from tenuto.client.commands import CommandRecord, CommandRunner, check_commands
from tenuto.client.http import FORMS, Client, RequestFailed, RequestWriter, read_format
from tenuto.client.load import Load, OpenTurn, Progress, RoutedServers, show
from tenuto.client.metrics import (
    LIST_PATH,
    Totals,
    empty_cache,
    get_growth,
    is_counter,
    parse_engines,
    parse_totals,
    try_get_block_size,
    try_get_policy,
    try_get_sim_speed,
)
from tenuto.client.options import BenchOptions
from tenuto.client.probe import Server, check_lengths, probe_server
from tenuto.client.result import (
    LOADED,
    Outcome,
    Sending,
    format_result,
    make_result,
    read_simulated_server,
)
from tenuto.core import console
from tenuto.core.console import count
from tenuto.core.errors import ConfigError, TenutoError
from tenuto.records.files import (
    COMMANDS,
    METRICS,
    RESULT,
    RESULTS,
    TURNS,
    RunFiles,
    read_first,
    write_whole,
    writing,
)
from tenuto.records.metrics import parse_limits
from tenuto.records.schema import TurnRecord, get_config
from tenuto.records.text import (
    format_table,
    format_time_s,
    group_invalid,
    is_overloaded,
    print_text,
    write_csv,
)
from tenuto.workload.hints import HINTS
from tenuto.workload.load import make_workload
from tenuto.workload.schema import Workload
from tenuto.workload.turn_driver import TurnDriver

INVALID = 3
"""Exit status if every turn was answered, but the figures do not describe the server."""
SETTLE_S = 1.0
"""Seconds to wait after the load, because servers update their metrics some time after the last token."""
SAMPLE_S = 0.01
Result = dict[str, Any]
say = partial(console.say, "bench")


def run_bench(options: BenchOptions) -> int:
    """Run the load, print the result and write the files; return the command's exit status.

    Raises ConfigError for invalid options, DataError for invalid traces, and ServerError for a server that
    cannot be measured.
    """
    workload = make_workload(options.load)
    with RunFiles(options.out) as files:
        result = asyncio.run(measure(options, workload, files))
        files.write_result(result)
    print_text(json.dumps(result) if options.as_json else format_result(result), options.csv)
    if files.problem:
        say(f"not all was written: {files.problem}")
    if options.csv:
        write_csv(options.csv, [result])
    if result["client"]["interrupted"]:
        return 130
    return get_status(result, is_written=not files.problem)


def get_status(result: Mapping[str, Any], *, is_written: bool) -> int:
    """The exit status for a run that was not interrupted."""
    turns = result["turns"]
    if turns["ok"] != turns["planned"] or not is_written:
        return 1
    return INVALID if result["client"]["invalid"] else 0


async def measure(options: BenchOptions, workload: Workload, files: RunFiles) -> Result:
    """Run a workload against a server and return the record. `Interruption` says what ends it early."""
    started_s = time.monotonic()
    if options.run_commands:
        say(
            f"--run-commands: {check_commands(workload)} commands of {workload.name} will run as you, in "
            "temporary folders; they can reach your files and the network"
        )
    turns = TurnDriver(
        workload,
        options.load.users,
        keeps_arrivals=options.load.keeps_arrivals,
        runs_commands=options.run_commands,
    )
    async with AsyncExitStack() as stack:
        make_client = partial(Client, api_key=options.api_key, timeout_s=options.timeout_s)
        clients = [await stack.enter_async_context(make_client(url)) for url in options.urls]
        named = options.engine_urls or [url for client in clients for url in await ask_engines(client)]
        urls = dict.fromkeys(map(get_base_url, named))
        behind = [await stack.enter_async_context(make_client(url)) for url in urls]
        setup = await _prepare(clients, Engines(behind or clients), options, workload)
        where = ", ".join(client.url for client in clients)
        say(f"{count(len(workload.jobs), 'job')} of {workload.name} on {setup.server.model} at {where}")
        outcome = await _run_load(setup, turns, files)
    return make_result(
        outcome,
        _get_settings(setup),
        server_version=setup.server.version,
        model=setup.server.model,
        policy=options.policy or setup.engines.try_get_policy(),
        gpu=options.gpu,
        jps=options.load.jps,
        seed=options.load.seed,
        config=get_config(options.load),
        wall_s=time.monotonic() - started_s,
        goodput_limits_ms=parse_limits(options.load.goodput),
    ).to_json()


@dataclass(frozen=True, slots=True)
class _Setup:
    options: BenchOptions
    workload: Workload
    server: Server
    writer: RequestWriter
    engines: Engines
    """The engines whose metrics are read: the server itself, or the engines behind a router."""
    open_turn: OpenTurn
    router: RoutedServers | None
    """What `open_turn` is of, if there are several servers."""


async def _prepare(
    clients: Sequence[Client], engines: Engines, options: BenchOptions, workload: Workload
) -> _Setup:
    form = FORMS[options.prompts]()
    run_id = options.run_id or f"run-{secrets.token_hex(4)}"
    forced_format = None if options.force_format is None else read_format(options.force_format)
    say_hints = HINTS[options.load.hints]
    first, *others = clients
    server = await probe_server(first, form, options.model, run_id, say_hints, forced_format)
    for each in others:
        server = server.also(await probe_server(each, form, server.model, run_id, say_hints, forced_format))
    await _begin_counting(engines)
    check_lengths(workload, server)
    quotes_answers = options.answers == "server" and forced_format is None
    if quotes_answers and form.is_exact and not server.sends_ids:
        say("the server does not send its answers' token ids: prompts quote the workload's own text")
        quotes_answers = False
    writer = RequestWriter(
        server.model, form, run_id, say_hints, quotes_answers=quotes_answers, forced_format=forced_format
    )
    router = RoutedServers(clients, options.router, say_hints) if others else None
    open_turn = router.open_turn if router else lambda due: nullcontext(first.stream_answer)
    return _Setup(options, workload, server, writer, engines, open_turn, router)


async def _begin_counting(engines: Engines) -> None:
    """Read the metrics before the load, and say which are missing."""
    try:
        await engines.get_totals()
    except RequestFailed as error:
        say(f"no engine shows its metrics here ({error}): there are none in the result")
        return
    if missing := [url for url in engines.urls if url not in engines.pages]:
        say(f"no metrics of {', '.join(missing)}: what is counted there before its first answer is left out")
    if len(engines.urls) > 1:
        say(f"several engines; metrics come from {', '.join(engines.pages)}")


async def _run_load(setup: _Setup, turns: TurnDriver, files: RunFiles) -> Outcome:
    records: list[TurnRecord] = []
    commands: list[CommandRecord] = []
    progress = Progress(setup.workload)
    lags_s = array("d")

    def on_record(record: TurnRecord) -> None:
        records.append(record)
        progress.add(record)
        files.add(TURNS, record.to_json())

    def on_command(record: CommandRecord) -> None:
        commands.append(record)
        files.add(COMMANDS, asdict(record))

    options = setup.options
    runner = CommandRunner(options.command_limit_s, on_command) if options.run_commands else None
    with Interruption() as interruption, runner or nullcontext():
        load = Load(
            turns,
            setup.open_turn,
            setup.writer,
            on_record,
            sending=Sending(
                is_exact=setup.writer.form.is_exact,
                has_fixed_length=setup.writer.forced_format is None,
                quotes_answers=setup.writer.quotes_answers,
                block_size=try_get_block_size(setup.engines.text),
                is_open_loop=setup.workload.loop == "open",
                retries=options.retries,
            ),
            commands=runner,
        )
        companions = [sample_lag(lags_s), show(progress, load, console.Progress("bench"))]
        if setup.engines.has_metrics and options.metrics_interval_s:
            companions.append(follow(setup.engines, load, files, options.metrics_interval_s))
        interruption.on_signal = load.stop
        await _drive(load, companions)
        growth = await _get_growth(setup.engines, interruption)
    fleet = setup.engines.summarise() if growth is not None else None
    if fleet is not None and setup.router is not None:
        fleet |= setup.router.summarise()
    return Outcome(
        workload=setup.workload,
        records=records,
        sending=load.sending,
        growth=growth,
        server=read_simulated_server(try_get_sim_speed(setup.engines.text), growth),
        is_interrupted=interruption.has_come,
        loop_lags_s=lags_s,
        itl_s=load.gaps.summarise(),
        commands=commands,
        fleet=fleet,
    )


async def _drive(load: Load, companions: Sequence[Coroutine[Any, Any, None]]) -> None:
    tasks = [asyncio.create_task(companion) for companion in companions]
    # Garbage collection takes up to 0.1 s, during which nothing is sent or read. Reference counting frees
    # almost all memory of a run.
    gc.collect()
    gc.disable()
    try:
        await load.run()
    finally:
        gc.enable()
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


async def _get_growth(engines: Engines, interruption: Interruption) -> Totals | None:
    """Growth of the server's metrics; None if the server does not report them, or if the user interrupts."""
    if not engines.has_metrics:
        return None
    settle_s = SETTLE_S
    if interruption.has_come:
        say("interrupted; asking the server for its last counts (Ctrl-C again skips that)")
        settle_s = 0.0

    async def ask() -> Totals:
        await asyncio.sleep(settle_s)
        return await engines.get_totals()

    question = asyncio.create_task(ask())
    interruption.on_signal = question.cancel
    await asyncio.wait([question])
    if question.cancelled() or isinstance(question.exception(), RequestFailed):
        return None
    return engines.get_growth()


def _get_settings(setup: _Setup) -> dict[str, object]:
    options = setup.options
    return {
        **_get_common_settings(options),
        "engine_urls": setup.engines.urls if setup.engines.urls != [get_base_url(options.urls[0])] else [],
        "run_id": setup.writer.run_id,
        "answers": "server" if setup.writer.quotes_answers else "workload",
    }


def _get_common_settings(options: BenchOptions) -> dict[str, object]:
    """The settings that all runs of a sweep have in common."""
    return {
        "url": ",".join(options.urls),
        "router": options.router if len(options.urls) > 1 else None,
        "prompts": options.prompts,
        "run_commands": options.run_commands,
        "force_format": options.force_format,
        "metrics_interval_s": options.metrics_interval_s,
        "timeout_s": options.timeout_s,
        "retries": options.retries,
    }


async def sample_lag(lags_s: array[float]) -> None:
    """Every 10 ms, append how late the event loop was for that moment. Runs until cancelled."""
    loop = asyncio.get_running_loop()
    due_s = loop.time() + SAMPLE_S
    while True:
        await asyncio.sleep(due_s - loop.time())
        # Every moment that was missed counts, so that one long stall does not look like one late moment.
        while (late_s := loop.time() - due_s) >= 0:
            lags_s.append(late_s)
            due_s += SAMPLE_S


def get_end_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a run as SIGINT does: SIGTERM, and SIGHUP unless it is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGTERM,) if is_ignored else (signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Handles SIGINT and what `get_end_signals` names while its block runs, which must be in an event loop.

    The first signal stops the load. The second signal stops the queries to the server after the load. So a
    user who presses Ctrl-C twice does not lose the result. A third one ends the process without a result.
    """

    def __init__(self) -> None:
        self.has_come = False
        self.on_signal: Callable[[], Any] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._before = {number: signal.getsignal(number) for number in get_end_signals()}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, *self._before):
            self._loop.add_signal_handler(number, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def _interrupt(self) -> None:
        if self.has_come:
            self._release()
        self.has_come = True
        self.on_signal()

    def _release(self) -> None:
        for number in (signal.SIGINT, *self._before):
            self._loop.remove_signal_handler(number)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # the event loop has set it to its default


class Engines:
    """The sum of the metrics of the engines behind one URL. If one engine fails, the others still count."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self.pages: dict[str, str] = {}
        """By address, the last `/metrics` page of each engine that answered."""
        self._clients = tuple(clients)
        self._first: dict[str, Totals] = {}
        self._last: dict[str, Totals] = {}
        self._offsets: dict[str, Totals] = {}
        """What is added to each engine's counters: what they had reached before it restarted."""

    @property
    def urls(self) -> list[str]:
        """The engines' addresses."""
        return [client.url for client in self._clients]

    @property
    def text(self) -> str:
        """The last pages of all engines."""
        return "\n".join(self.pages.values())

    def try_get_policy(self) -> str | None:
        """The policy of all engines, if their pages name the same, and it is on."""
        policies = {*map(try_get_policy, self.pages.values())}
        return policies.pop() if len(policies) == 1 else None

    @property
    def has_metrics(self) -> bool:
        """Whether a page had metrics that are counted."""
        return any(self._last.values())

    def summarise(self) -> dict[str, Any] | None:
        """What each engine did since the first reading, as the `fleet` of a record; None for one engine.

        A client sees neither the engine of a job nor the router's decisions.
        """
        if len(self._clients) < 2:
            return None
        engines = [_describe(url, self._first.get(url, {}), self._last.get(url, {})) for url in self.urls]
        turns = [each["turns"] for each in engines]
        return {"engines": engines, "imbalance": max(turns) * len(turns) / sum(turns) if any(turns) else None}

    async def get_totals(self) -> Totals:
        """The sum of all engines' metrics. Raises RequestFailed if none answers.

        No counter decreases: an engine that does not answer keeps its last counters, and one that has
        restarted counts on from them. One that answers only later counts from its first answer on.
        """
        pages, failures = {}, []
        for client in self._clients:
            try:
                pages[client.url] = await client.get_text("/metrics")
            except RequestFailed as error:
                failures.append(error)
        if not pages:
            raise failures[-1]
        self.pages |= pages
        for url in self.urls:
            last = {name: value for name, value in self._last.get(url, {}).items() if is_counter(name)}
            read = parse_totals(pages[url]) if url in pages else {}
            offsets = self._offsets.setdefault(url, {})
            if url in self._first and not self._first[url]:
                # Most of it was counted before the load, perhaps over days.
                offsets.update((name, -value) for name, value in read.items() if is_counter(name))
            for name in read.keys() & last.keys():
                if read[name] + offsets.get(name, 0.0) < last[name]:
                    offsets[name] = last[name]
            self._last[url] = last | {name: value + offsets.get(name, 0.0) for name, value in read.items()}
            self._first[url] = self._first.get(url) or self._last[url]
        return _add_up(self._last.values())

    def get_growth(self) -> Totals:
        """How much the counters grew from the first reading to the last."""
        return get_growth(_add_up(self._first.values()), _add_up(self._last.values()))


def _add_up(every: Iterable[Totals]) -> Totals:
    totals: Totals = {}
    for each in every:
        for name, value in each.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


async def ask_engines(client: Client) -> tuple[str, ...]:
    """As `find_engines`, with the bench's client."""
    with suppress(RequestFailed):
        return parse_engines(await client.get_text(LIST_PATH))
    return ()


def _describe(url: str, first: Totals, last: Totals) -> dict[str, Any]:
    growth = get_growth(first, last)
    looked_up = growth.get("vllm:prefix_cache_queries_total")
    # What host memory, a disk or another engine had is loaded, not computed.
    hits = growth.get("vllm:prefix_cache_hits_total", 0.0) + growth.get(LOADED, 0.0)
    return {
        "name": url,
        "turns": round(growth.get("vllm:request_success_total", 0.0)),
        "computed_tokens": None if looked_up is None else round(looked_up - hits),
        "output_tokens": round(growth.get("vllm:generation_tokens_total", 0.0)),
        # For an engine that does not answer, only the last counters are used.
        "died": all(map(is_counter, last)),
    }


async def follow(engines: Engines, load: Load, files: RunFiles, interval_s: float) -> None:
    """Write metrics.jsonl at a fixed interval in seconds, until cancelled."""
    while True:
        try:
            totals = await engines.get_totals()
        except RequestFailed:
            totals = {}  # a server under load may not answer; the file then has an empty sample
        files.add(METRICS, {"at_s": load.get_now_s(), **totals})
        await asyncio.sleep(interval_s)


def run_sweep(runs: Sequence[BenchOptions]) -> int:
    """Make the runs that DIR does not have yet, print a table and write the files; return the exit status.

    `runs`: the options of each run, equal except for the load. Raises ConfigError if the folder has other
    runs, and all errors of `run_bench`.
    """
    for options in runs:
        make_workload(options.load)  # report errors in the loads before the first run
    if runs[0].out and (runs[0].out / RESULTS).exists():
        first = read_first(runs[0].out / RESULTS).values
        if "ab" in first or not first.get("client"):
            raise ConfigError(f"--out {runs[0].out} holds results of another command; name another folder")
    results: list[Result] = []
    is_written, ended_by = True, None
    for number, options in enumerate(runs, 1):
        name = f"{options.load.jps:g} jobs/s"
        try:
            found = _try_read(_get_folder(options), options)
            say(f"{number} of {len(runs)}: {name}{' is there already' if found else ''}")
            result, problem = (found, None) if found else _run_one(options)
        except (TenutoError, KeyboardInterrupt) as error:
            if not results:
                raise
            # An overloaded server may have ended. What was measured is not lost.
            ended_by = error
            say(f"ends before {name}")
            break
        results.append(result)
        if options.out and not found and not problem:
            try:
                with writing(path := options.out / RESULTS):
                    write_whole(path, "".join(json.dumps(each) + "\n" for each in results))
            except ConfigError as error:
                problem = str(error)
        if problem:
            say(f"not all was written: {problem}")
            is_written = False
        if result["client"]["interrupted"]:
            break
    options = runs[0]
    print_text(json.dumps(results) if options.as_json else format_sweep(results), options.csv)
    if options.out and not options.as_json:
        say(f"all results: {options.out}; charts: tenuto report {options.out}")
    if options.csv:
        write_csv(options.csv, results)
    if ended_by is not None:
        raise ended_by
    if results[-1]["client"]["interrupted"]:
        return 130
    statuses = [get_status(result, is_written=is_written) for result in results]
    return 1 if 1 in statuses else max(statuses)


def _get_folder(options: BenchOptions) -> Path | None:
    return options.out / f"jps-{options.load.jps:g}" if options.out else None


def _run_one(options: BenchOptions) -> tuple[Result, str | None]:
    """One run of a sweep; and what could not be written of it."""
    is_emptied = empty_cache(options.urls, options.api_key, options.engine_urls)
    run_id = f"{options.run_id}-{options.load.jps:g}" if options.run_id else None
    with RunFiles(_get_folder(options), replaces=True) as files:
        result = asyncio.run(measure(replace(options, run_id=run_id), make_workload(options.load), files))
        result["client"]["cache_emptied"] = is_emptied
        files.write_result(result)
    return result, files.problem


def _try_read(folder: Path | None, options: BenchOptions) -> Result | None:
    """The record of an earlier complete run, or None. Raises ConfigError if it was made in another way."""
    if folder is None or not (folder / RESULT).exists():
        return None
    values = read_first(folder / RESULT).values
    client = values.get("client")
    if not isinstance(client, dict) or client.get("interrupted"):
        return None
    now: Result = json.loads(json.dumps(get_config(options.load)))
    is_same = (
        values.get("config") == now
        and all(client.get(name) == value for name, value in _get_common_settings(options).items())
        and options.model in (None, values.get("model"))
        # A server that sends no token ids gets the workload's text anyway.
        and client.get("answers") in (options.answers, "workload")
    )
    if not is_same:
        raise ConfigError(
            f"--out: {folder} holds a run of another load or server, or with other settings; name another "
            "folder, or repeat the same command"
        )
    return values


COLUMNS = (
    ("mean", "job_s", "mean"), ("P95", "job_s", "p95"), ("TTFT P50", "ttft_s", "p50"),
    ("TTFT P95", "ttft_s", "p95"), ("TPOT P50", "tpot_s", "p50"), ("ITL P95", "itl_s", "p95"),
    ("E2E P95", "latency_s", "p95"),
)  # fmt: skip
"""Heading, field and statistic of the table's times."""


def format_sweep(results: Sequence[Result]) -> str:
    """The table: a row for each load, then notes that a reader must know."""
    heads = ["jobs/s", "done/s", "jobs", *(head for head, *_ in COLUMNS), "tok/s", "hits"]
    goodput = any(result["goodput"] for result in results)
    heads += ["good/s"] if goodput else []
    rows = []
    for result in results:
        makespan_s, reused = result["makespan_s"], result["reused_tokens"]
        rows.append(
            (
                f"{result['jps']:g}" + ("+" if is_overloaded(result) else ""),
                "–" if result["finished_jps"] is None else f"{result['finished_jps']:.3g}",
                f"{result['jobs']}/{result['jobs_planned']}",
                *(format_time_s((result[field] or {}).get(name)) for _, field, name in COLUMNS),
                "–" if not makespan_s else f"{(result['output_tokens'] or 0) / makespan_s:,.0f}",
                f"{reused / result['reusable_tokens']:.1%}" if reused and result["reusable_tokens"] else "–",
                *([_format_goodput(result["goodput"])] if goodput else []),
            )
        )
    lines = [
        *format_table(heads, rows),
        "",
        "mean, P95: job time; tok/s: output tokens; hits: share of the reusable tokens; + overloaded",
    ]
    invalid = group_invalid((f"{result['jps']:g}", result) for result in results)
    lines += [f"INVALID at {', '.join(rates)} jobs/s: {why}." for rates, why in invalid]
    for result in results:
        turns = result["turns"]
        if turns["ok"] != turns["planned"]:
            lines.append(
                f"{count(turns['planned'] - turns['ok'], 'turn')} got no answer at {result['jps']:g} jobs/s"
            )
    return "\n".join(lines)


def _format_goodput(goodput: Result | None) -> str:
    return "–" if not goodput or goodput["turns_per_s"] is None else f"{goodput['turns_per_s']:.2f}"

"""The fleet of `dashboards/fleet`, as processes of this machine instead of containers: what its page shows.

    pip install 'tenuto[router,sim,bench,dev]'; apt install prometheus
    python -m experiments.routers.fleet_page [--jobs 60]

Starts the two engines and the router with the words of compose.yml, and Prometheus with prometheus.yml, each
at a free port. Sends agent jobs through the router. Then it asks Prometheus what each panel of the dashboard
asks, and prints which panels have figures, how many of them tell the two engines apart, and which are empty.
Prometheus reads the alert rules too. Grafana is not started.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from experiments.command_line import make_parser
from experiments.results.row import ROOT
from experiments.routers.processes import get_free_port
from tenuto.client.ab import measure_run, run_server
from tenuto.client.options import BenchOptions
from tenuto.records.files import RunFiles
from tenuto.workload.load import LoadOptions

DASHBOARDS = ROOT / "dashboards"
SCRAPES = 3
"""A rate needs two scrapes; one more, so that the last one is of the end."""
EVERY_S = 5


def find_line(service: dict[str, Any], command: str) -> list[str]:
    """The words of a command inside a service's shell line."""
    _, _, line = shlex.split(service["command"])
    return shlex.split(line[line.index(f"exec {command}") :])[1:]


def replace_after(words: list[str], option: str, value: str) -> None:
    """Give an option of a command line another value."""
    words[words.index(option) + 1] = value


@contextmanager
def run_fleet(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The router's URL, and the addresses of all parts by the names that compose.yml gives them."""
    services = yaml.safe_load((DASHBOARDS / "fleet" / "compose.yml").read_text(encoding="utf-8"))["services"]
    places: dict[str, str] = {}

    def start(words: list[str], port: int, name: str) -> Any:
        replace_after(words, "--port", str(port))
        replace_after(words, "--host", "127.0.0.1")
        return run_server(words, port, folder / f"{name}.log", limit_s=300)

    with start_engine(services, "engine-1", start, places), start_engine(services, "engine-2", start, places):
        words = find_line(services["router"], "vllm-router")
        port, metrics_port = get_free_port(), get_free_port()
        places[f"router:{words[words.index('--prometheus-port') + 1]}"] = f"127.0.0.1:{metrics_port}"
        replace_after(words, "--prometheus-port", str(metrics_port))
        replace_after(words, "--prometheus-host", "127.0.0.1")
        words[0] = str(Path(sys.executable).parent / words[0])
        words = [
            f"http://{places[word.removeprefix('http://')]}" if word.startswith("http://engine") else word
            for word in words
        ]
        with start(words, port, "router") as router:
            yield router.url, places


def start_engine(services: dict[str, Any], name: str, start: Any, places: dict[str, str]) -> Any:
    """One simulated engine, with the words of its service."""
    words = [sys.executable, "-m", "tenuto.cli", *find_line(services[name], "tenuto")[1:]]
    port = get_free_port()
    places[f"{name}:8000"] = f"127.0.0.1:{port}"
    return start(words, port, name)


def find_prometheus() -> str | None:
    """The command: on the PATH, or where `make promtool` unpacks it."""
    unpacked = ROOT / "build/prometheus/usr/bin/prometheus"
    return shutil.which("prometheus") or (str(unpacked) if unpacked.exists() else None)


@contextmanager
def run_prometheus(folder: Path, text: str) -> Iterator[str]:
    """Prometheus with this configuration; its URL. Raises FileNotFoundError where there is none."""
    if (found := find_prometheus()) is None:
        raise FileNotFoundError("there is no Prometheus here; `make promtool` unpacks it")
    (folder / "prometheus.yml").write_text(text, encoding="utf-8")
    port = get_free_port()
    command = [
        *(found, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    url = f"http://127.0.0.1:{port}"
    with (folder / "prometheus.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(f"{url}/-/ready", process)
        yield url
    finally:
        process.terminate()
        process.wait()


def configure_prometheus(places: dict[str, str]) -> str:
    """The fleet's own file, with other addresses."""
    text = (DASHBOARDS / "fleet" / "prometheus.yml").read_text(encoding="utf-8")
    for name, place in places.items():
        text = text.replace(name, place)
    return text.replace("/etc/prometheus/alerts.yml", str(DASHBOARDS / "alerts.yml"))


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Return when this address answers. Raises RuntimeError if the process ends, or after a minute."""
    for _ in range(120):
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).is_success:
                return
        if process.poll() is not None:
            break
        time.sleep(0.5)
    raise RuntimeError(f"Prometheus did not answer at {url}")


def send_jobs(
    url: str, engines: list[str], num_jobs: int, jps: float = 2.0, hints: str = "job"
) -> dict[str, Any]:
    """Agent jobs through the router."""
    load = LoadOptions(jps=jps, max_jobs=num_jobs, hints=hints)
    options = BenchOptions(urls=(url,), engine_urls=tuple(engines), load=load, retries=3, answers="server")
    with RunFiles(None) as files:
        return measure_run(options, files)


def ask_panels(url: str, num_seconds: int) -> dict[str, list[dict[str, Any]]]:
    """By panel, all series that Prometheus has for it."""
    dashboard = json.loads((DASHBOARDS / "tenuto.json").read_text(encoding="utf-8"))
    values = {"$__rate_interval": f"{4 * EVERY_S}s", "$__range": f"{num_seconds}s"}
    values |= dict.fromkeys(("$model", "$instance", "$engine"), ".*")
    found: dict[str, list[dict[str, Any]]] = {}
    for panel in [each for row in dashboard["panels"] for each in (row, *row.get("panels", ()))]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in values.items():
                query = query.replace(name, value)
            answer = httpx.get(f"{url}/api/v1/query", params={"query": query}).raise_for_status().json()
            found.setdefault(panel["title"], []).extend(answer["data"]["result"])
    return found


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            run_fleet(folder) as (url, places),
            run_prometheus(folder, configure_prometheus(places)) as prometheus,
        ):
            engines = [f"http://{place}" for part, place in places.items() if part.startswith("engine")]
            started_s = time.monotonic()
            result = send_jobs(url, engines, args.jobs)
            found = ask_panels(prometheus, int(time.monotonic() - started_s))
            time.sleep(SCRAPES * EVERY_S)
            targets = httpx.get(f"{prometheus}/api/v1/targets").json()["data"]["activeTargets"]
            groups = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
    print(f"turns answered: {result['turns']['ok']} of {result['turns']['planned']}")
    print(f"targets up: {sum(each['health'] == 'up' for each in targets)} of {len(targets)}")
    rules = [rule for group in groups for rule in group["rules"]]
    healthy = sum(rule["health"] == "ok" for rule in rules)
    print(
        f"alert rules evaluated: {healthy} of {len(rules)}; firing: {sum(bool(r['alerts']) for r in rules)}"
    )
    several = [
        title
        for title, series in found.items()
        if len({each["metric"].get("instance") for each in series} - {None}) > 1
    ]
    empty = [title for title, series in found.items() if not series]
    print(f"panels with figures: {len(found) - len(empty)} of {len(found)}, by server: {len(several)}")
    print(f"empty: {', '.join(empty)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

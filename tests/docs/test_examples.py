"""The examples of the docs run as they are printed: see tests/docs/examples.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml

from tests.docs.examples import (
    CHANGED,
    NOT_COMPARED,
    NOT_RUN,
    PAGES,
    ROOT,
    STARTED,
    Block,
    change,
    find_blocks,
    find_outputs,
    make_environment,
    normalise,
    run_line,
    try_get_reason,
)
from tests.sim_server.live import Live, serve
from tests.support.processes import get_free_port

BLOCKS = [block for page in PAGES for block in find_blocks(page)]
RUN_PAGES = sorted({block.page for block in BLOCKS if block.is_commands or block.language == "python"})
OUTPUTS = [(line, block) for page in PAGES for line, block in find_outputs(page)]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Live]]:
    """Two simulated servers, quick, which an operator may change."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("TENUTO_ADMIN_KEY", "secret")
        yield [stack.enter_context(serve("tenuto", speed=20, kv_tokens=200_000)) for _ in range(2)]


def start_and_stop(line: str, folder: Path) -> None:
    """Start a server or the recorder, use it once, and end it as Ctrl-C does."""
    port = get_free_port()
    url = f"http://127.0.0.1:{port}"
    log = folder / "started.log"
    with log.open("w") as file:
        command = f"{re.sub('--port [0-9]+', '', line)} --port {port}"
        started = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=make_environment(folder),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        end_s = time.monotonic() + 120
        while True:
            assert started.poll() is None and time.monotonic() < end_s, log.read_text()
            try:
                model = httpx.get(f"{url}/v1/models", timeout=5).json()["data"][0]["id"]
                break
            except (httpx.HTTPError, json.JSONDecodeError):
                time.sleep(0.2)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Look here. " * 40}],
            "max_tokens": 8,
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
    finally:
        os.killpg(started.pid, signal.SIGINT)
        status = started.wait(60)
    assert status in (0, 130, -signal.SIGINT), log.read_text()
    assert "Traceback" not in log.read_text()


def prepare(page: str, folder: Path, servers: list[Live]) -> None:
    """The servers as they are after their start, and the files that a page takes as given."""
    for server in servers:
        body = {"mode": "on", "policy": "tenuto"}
        changed = server.post("/tenuto/control", body, headers={"Authorization": "Bearer secret"})
        assert changed.status_code == 200, changed.text
    if page == "docs/control.md":
        for number, whose in enumerate(({}, {"tenant": "ann"})):
            servers[0].complete([number] * 40, max_tokens=2, job_id="task-17", tool="ls", **whose)
        return
    if page == "docs/traces.md":
        made = run_line("tenuto simulate --gpu H100 --jps 1 --window 4 --trace scheduler.jsonl", folder)
        (folder / "runs" / "trajectories").mkdir(parents=True)
        said = [{"role": "user", "content": "task"}, {"role": "assistant", "content": "```bash\nls\n```"}]
        trajectory = {"trajectory_format": "mini-swe-agent-1.1", "messages": said}
        (folder / "runs" / "trajectories" / "one.traj.json").write_text(json.dumps(trajectory))
    elif page == "docs/report.md":
        made = run_line(
            "tenuto simulate --gpu H100 --jps 1 --window 4 --out run --trace trace.jsonl &&"
            " tenuto compare --gpu H100 --jps 1 --window 4 --policies stock,tenuto --out sweep", folder
        )  # fmt: skip
    else:
        return
    assert made.returncode == 0, made.stderr


PRELUDE = """\
from openai import OpenAI
task_id = "task-1"
client = OpenAI(base_url="{url}/v1")
model = "llama-3.1-8b"
messages = [dict(role="user", content="Run the tests.")]
tools = [dict(type="function", function=dict(name="bash", parameters=dict(type="object", properties={{}})))]
"""
"""What a snippet takes as given."""
SAVED = {"docs/start/researcher.md": "quick.py", "CONTRIBUTING.md": "keep_quick.py"}
"""The file as which the first block of a page is to be saved."""
NOT_EXECUTED = {"docs/routers.md": "needs Ray: tests/ray runs such a deployment where it is installed"}


def run_python(block: Block, folder: Path, url: str) -> None:
    name = SAVED.get(block.page)
    if name is not None and not (folder / name).exists():
        (folder / name).write_text(block.text, encoding="utf-8")
        return
    code = block.text.replace("http://localhost:8000", url)
    if "client" in code:
        code = f"{PRELUDE.format(url=url)}answer = None\n{code}\nclient.models.list()\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=make_environment(folder), capture_output=True,
        text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_PAGES)
def test_the_lines_of_a_page_run_in_their_order(page: str, servers: list[Live], tmp_path: Path) -> None:
    one, two = (server.url for server in servers)
    printed = {line for line, _ in find_outputs(ROOT / page)}  # test_an_output_… runs them
    prepare(page, tmp_path, servers)
    for block in find_blocks(ROOT / page):
        if block.language == "python" and page not in NOT_EXECUTED:
            run_python(block, tmp_path, one)
        if not block.is_commands:
            continue
        for line in block.get_lines():
            if try_get_reason(line) or line in printed:
                continue
            # The default port may be that of an A/B in another test.
            made = change(line, one, two).replace("tenuto ab", f"tenuto ab --port {get_free_port()}")
            if STARTED.search(made):
                start_and_stop(made, tmp_path)
                continue
            done = run_line(made, tmp_path)
            # A load client says so with status 3 if the tests' machine was too busy for its figures.
            is_busy = done.returncode == 3 and done.stdout.startswith("INVALID")
            assert is_busy or done.returncode == 0, f"{page}:{block.line}: {made}\n{done.stdout}{done.stderr}"
            assert "Traceback" not in done.stderr, f"{page}:{block.line}: {made}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize(("line", "block"), OUTPUTS, ids=[f"{b.page}:{b.line}" for _, b in OUTPUTS])
def test_an_output_is_what_its_command_prints(line: str, block: Block, tmp_path: Path) -> None:
    if is_listed(block):
        pytest.skip(NOT_COMPARED[is_listed(block)])
    done = run_line(line, tmp_path)
    assert done.returncode == 0, done.stderr
    assert normalise(done.stdout) == normalise(block.text), (
        "make it anew: python -m tests.docs.examples --write"
    )


def is_listed(block: Block) -> tuple[str, str] | None:
    return next((key for key in NOT_COMPARED if key[0] == block.page and block.text.startswith(key[1])), None)


def test_every_block_is_commands_code_or_an_output() -> None:
    outputs = [block for _, block in OUTPUTS]
    for block in BLOCKS:
        place = f"{block.page}:{block.line}"
        if block.language == "json":
            json.loads(block.text)
        elif block.language in ("yaml", "yml"):
            yaml.safe_load(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "python":
            compile(block.text, place, "exec")
        else:
            assert block.is_commands or block in outputs or is_listed(block), f"{place}: what is this block?"


def test_no_exception_is_left_over() -> None:
    """Each entry of the tables is about something in the docs."""
    lines = [line for block in BLOCKS if block.is_commands for line in block.get_lines()]
    for pattern, reason in NOT_RUN:
        assert any(re.match(pattern, line) for line in lines), reason
    for pattern, _ in CHANGED:
        assert any(re.search(pattern, line) for line in lines), pattern
    for key in NOT_COMPARED:
        assert any(is_listed(block) == key for block in BLOCKS), key


def test_every_install_line_names_what_there_is() -> None:
    """`pip install tenuto` would need a package on the index, which there is not yet."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    for page, text in texts.items():
        for named in re.findall(r"pip install (?:-e )?'?(?:tenuto|\.)\[([\w,]+)\]", text):
            assert set(named.split(",")) <= extras, page
        # This extra is a package of its own, which is not on the index either.
        assert "[predict]" not in text or "pip install ./predict" in text, page
        # What a release does is another matter.
        assert page.name == "RELEASING.md" or not re.search(r"pip install tenuto\b(?!\[)", text), page
    for page in ("README.md", "docs/start/operator.md", "docs/start/planner.md", "docs/start/researcher.md"):
        first = re.search(r"pip install .*", texts[ROOT / page])
        assert first and re.match(r"pip install (-e )?('\.\[[\w,]+\]'|\.)", first[0]), f"{page}: {first}"


def test_every_make_line_is_a_target() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for block in BLOCKS:
        for line in block.get_lines() if block.is_commands else ():
            if found := re.match(r"make ([\w-]+)", line):
                assert found[1] in targets, line


def test_every_script_has_its_flags() -> None:
    """Scripts of experiments/ exist, and know the flags that the docs give them."""
    seen = 0
    for block in BLOCKS:
        for line in block.get_lines() if block.is_commands else ():
            if not (found := re.match(r"\S*python (?:-m )?((?:experiments|tests)[\w./]*)(.*)", line)):
                continue
            path = ROOT / found[1].removesuffix(".py").replace(".", "/")
            files = [*path.rglob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
            assert files and all(file.exists() for file in files), line
            code = "".join(file.read_text(encoding="utf-8") for file in files)
            for flag in re.findall(r"--([\w-]+)", found[2]):
                assert f"--{flag}" in code or re.search(rf"\b{flag.replace('-', '_')}\b", code), (line, flag)
            seen += 1
    assert seen > 10


def test_the_simulated_server_has_what_its_page_says(servers: list[Live]) -> None:
    text = (ROOT / "docs" / "simulated_server.md").read_text(encoding="utf-8")
    missing = re.search(r"It does not have (.*?)\.\s", text, re.DOTALL)
    assert missing is not None
    paths = re.findall(r"`(/[\w/]+)`", missing[1])
    assert paths
    assert {servers[0].post(path, {}).status_code for path in paths} == {404}
    for path in ("/v1/models", "/health", "/ping", "/version", "/metrics"):
        assert f"`{path}`" in text
        assert httpx.get(servers[0].url + path).status_code == 200
    metrics = re.search(r"`/metrics` has (\d+) of vLLM's", text)
    assert metrics is not None
    shown = httpx.get(f"{servers[0].url}/metrics").text.count("# TYPE vllm:")
    assert shown == int(metrics[1])


@pytest.mark.slow
def test_the_simulations_of_the_simulated_servers_page_are_as_it_says(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "simulated_server.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) s \| [\d.]+ s \| ([\d,]+) \|$", text, re.MULTILINE)
    line = re.search(r"`(tenuto simulate .*--policy POLICY.*?)`", text)
    assert line is not None and len(rows) == 2
    for policy, mean_s, hit_tokens in rows:
        made = run_line(f"{line[1].replace('POLICY', policy)} --no-beside-stock --json", tmp_path)
        record = json.loads(made.stdout)
        assert (f"{record['job_s']['mean']:.2f}", f"{record['hit_tokens']:,}") == (mean_s, hit_tokens)


def test_the_rooms_of_the_drawing_exist() -> None:
    [drawing] = [block for block in BLOCKS if is_listed(block) == ("docs/design.md", "src/tenuto/")]
    for indent, name in re.findall(r"^( *)([\w.]+/?)  ", drawing.text, re.MULTILINE):
        path = ROOT / ("src/tenuto" if indent else "") / name
        assert path.exists(), name


def test_the_checks_see_what_is_wrong(tmp_path: Path) -> None:
    page = ROOT / "docs" / "speed.md"
    text = "```\ntenuto policies   # all\n```\n\n```\nsays this\n```\n\n```python\n1 +\n```\n"
    page_of_blocks = [
        Block("p", 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
    assert page.exists() and [block.is_commands for block in page_of_blocks] == [True, False, False]
    assert page_of_blocks[0].get_lines() == ["tenuto policies"]
    assert run_line("tenuto nosuch", tmp_path).returncode == 2
    assert change("tenuto top --url http://localhost:8000", "U", "V") == "tenuto top --once --url U"
    assert try_get_reason("pip install .") and not try_get_reason("tenuto policies")
    assert normalise("wall time    0.58 s, simulated") == normalise("wall time    3 s, simulated")

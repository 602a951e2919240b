"""The live soak's checks see what they look for. The soak itself needs a server and hours."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from experiments.soak.book import MAX_KEPT, Book
from experiments.soak.live_memory import Life, Rest, compare_growth, get_cpu_s, get_memory_mb, get_slope
from experiments.soak.live_server import STOCK, check_log, check_trace, get_command, prepare_state
from experiments.soak.live_watch import Watch, find_processes
from experiments.soak.server import get_policy
from tenuto.client.metrics import Page, parse_page

SOUND = {
    "vllm:num_requests_running": 1,
    "vllm:kv_cache_usage_perc": 0.5,
    "vllm:prompt_tokens_total": 100,
    "tenuto:leases_granted_total": 5,
    "tenuto:leases_ended_total": 3,
    "tenuto:retained_jobs": 2,
    "tenuto:retained_blocks": 9,
    "tenuto:kv_blocks": 96,
    "tenuto:policy_faults_total": 0,
}


def make_page(**changes: float) -> Page:
    values = {name: changes.get(name.split(":")[1], value) for name, value in SOUND.items()}
    return parse_page("".join(f"{name} {value}\n" for name, value in values.items()), 1.0)


def watch_pages(*pages: Page) -> list[str]:
    book = Book()
    watch = Watch("http://localhost:1", os.getpgid(0), book, [])
    for page in pages:
        watch._check(page)
    return [failure["detail"] for failure in book.failures]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_tokens_total": 99}, "fell from 100"),
        ({"policy_faults_total": 1}, "a hook of the policy failed"),
        ({"kv_cache_usage_perc": 1.5}, "usage is 1.5"),
        ({"retained_blocks": 97}, "97 of 96 blocks"),
        ({"leases_granted_total": 6}, "6 leases granted, 3 ended, 2 held"),
    ],
)
def test_what_is_wrong_on_the_metrics_page_is_seen(changes: dict[str, float], words: str) -> None:
    assert watch_pages(make_page(), make_page()) == []
    (said,) = watch_pages(make_page(), make_page(**changes))
    assert words in said


def test_what_is_left_at_a_rest_is_named() -> None:
    watch = Watch("http://localhost:1", os.getpgid(0), Book(), [])
    left = watch._get_left(make_page(retained_jobs=0, kv_cache_usage_perc=0))
    assert left == {"running requests": 1, "leased blocks": 9}


def test_memory_and_its_slope() -> None:
    assert get_slope([(0.0, 100.0), (1.0, 110.0), (2.0, 120.0)]) == pytest.approx(10.0)
    assert get_slope([(0.0, 100.0), (1.0, 110.0)]) is None
    command = [sys.executable, "-c", "import time; x = b'x' * 50_000_000; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert find_processes(child.pid) == [child.pid]
        assert get_memory_mb([child.pid]) > 50
        child.kill()
    assert get_memory_mb([child.pid]) == 0
    used_s = get_cpu_s([os.getpid()])
    assert 0 < used_s <= time.process_time()


def make_life(policy: str, *memory_mb: float) -> Life:
    return Life(
        policy, "terminate", 0.0, [Rest(n / 60, mb, 10.0 * n, 30.0 * n) for n, mb in enumerate(memory_mb, 1)]
    )


def test_growth_is_compared_between_the_same_rests() -> None:
    lives = [
        make_life("tenuto", 100, 150, 180, 900),
        make_life(STOCK, 90, 120, 130),
        make_life("tenuto", 5, 6),
    ]
    growth = compare_growth(lives, STOCK)
    assert growth is not None
    assert (growth["tenuto_growth_mb"], growth["stock_growth_mb"]) == ([80], [40])
    assert (growth["rests"], growth["more_mb"], growth["is_leak"]) == (3, 40, False)
    leak = compare_growth([make_life("tenuto", 100, 200, 300), make_life(STOCK, 100, 120, 130)], STOCK)
    assert leak is not None
    assert leak["is_leak"]
    assert compare_growth(lives[:1], STOCK) is None


def test_a_life_is_described_by_its_rests() -> None:
    told = make_life("tenuto", 100, 160, 160, 160, 160).describe()
    assert (told["growth_mb"], told["late_mb_per_hour"]) == (60, 0)
    assert told["mb_per_hour"] > 0
    assert told["cores"] == pytest.approx(0.5)
    assert make_life("tenuto").describe()["growth_mb"] is None


def test_one_life_in_a_few_is_stock() -> None:
    lives = [get_policy(number, Namespace(stock_every=4, policy="x")) for number in range(1, 9)]
    assert lives == ["x", STOCK, "x", "x", "x", STOCK, "x", "x"]
    assert get_policy(2, Namespace(stock_every=0, policy="x")) == "x"
    stock, ours = (get_command("m", Path("f"), policy, 0.5) for policy in (STOCK, "x"))
    assert not {"--additional-config", "--host-gb"} & set(stock)
    assert ours[ours.index("--host-gb") + 1] == "0.5"


def test_limits_follow_the_slowness_of_the_machine() -> None:
    book = Book()
    assert book.get_slowness() == 1.0

    book.measure_slowness_once()
    assert len(book.slowness) == 1
    assert book.get_slowness() >= 1.0


def test_damaged_states_must_be_ignored_and_others_taken_up(tmp_path: Path) -> None:
    state, book = tmp_path / "state.json", Book()
    assert prepare_state(state, book, random.Random(1)) == ""
    said = set()
    for seed in range(20):
        state.write_text("x" * 100)
        words = prepare_state(state, book, random.Random(seed))
        said.add((words, len(state.read_text())))
    assert said == {("continues with the state in", 100), ("is ignored", 80)}


def test_logs_traces_and_the_number_of_failures(tmp_path: Path) -> None:
    log, book = tmp_path / "log", Book(tmp_path / "out.jsonl")
    log.write_text(
        "(EngineCore pid=1) ERROR 11-22 [metrics.py:1] metrics are not updated: cannot write x: y\n"
        "(APIServer pid=1) ERROR 11-22 [validation.py:1] a body of a stranger\n"
        "(APIServer pid=1) ERROR 11-22 [async_llm.py:1] EngineDeadError: EngineCore encountered an issue\n"
        "(EngineCore pid=1) ERROR 11-22 [core.py:1] EngineCore died\n"
    )
    check_log(log, book)
    assert [failure["what"] for failure in book.failures] == ["log"]
    check_trace(tmp_path / "none", book)
    assert book.num_failures == 2
    for _ in range(2 * MAX_KEPT):
        book.fail("x", "y" * 9999)
    assert (len(book.failures), book.num_failures) == (MAX_KEPT, 2 + 2 * MAX_KEPT)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2 + 2 * MAX_KEPT

"""A comparison's folder: one comparison, nothing lost, one user at a time."""

from __future__ import annotations

import json
import resource
from contextlib import nullcontext
from pathlib import Path

import pytest

from tenuto.client.ab import AbFolder, Slot, conclude, make_order
from tenuto.client.ab_verdict import make_pair, read_run
from tenuto.core.errors import ConfigError, DataError
from tests.client.ab.conftest import parse

SLOT = Slot(0, "a")
ENDS = ('"schema": 3}', '"jobs": "x"}')


def open_folder(path: Path, *more: str) -> AbFolder:
    arms = ("--arm", "a=sim:stock", "--arm", "b=sim:tenuto", "--model", "m")
    return AbFolder(parse(*arms, "--out", str(path), *more))


def test_the_order_turns_around() -> None:
    names = ["".join(slot.arm for slot in make_order("abc", 3) if slot.repeat == n) for n in range(3)]
    assert names == ["abc", "cba", "abc"]
    assert [slot.name for slot in make_order("ab", 2)] == ["001-a", "001-b", "002-b", "002-a"]


def test_a_folder_is_taken_up_again(tmp_path: Path) -> None:
    for _ in range(2):
        with open_folder(tmp_path / "x") as folder:
            assert folder.get_run(SLOT) == tmp_path / "x" / "runs" / "001-a"


def test_another_comparison_is_refused(tmp_path: Path) -> None:
    with open_folder(tmp_path, "--jps", "1"):
        pass
    with (
        pytest.raises(ConfigError, match=r"another jps: 1\.0 there, 2\.0 now"),
        open_folder(tmp_path, "--jps", "2"),
    ):
        pass


@pytest.mark.parametrize("by_module", [False, True])
def test_a_policy_or_trace_that_changed_is_another_comparison(
    by_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    files = tmp_path / "own_to_change.py", tmp_path / "trace.jsonl"
    own = files[0].stem if by_module else files[0]
    arms = ("--arm", "a=sim:stock", "--arm", f"b=sim:{own}:Own", "--workload", str(files[1]))
    options = parse(*arms, "--model", "llama-3.1-8b", "--out", str(tmp_path / "out"))
    for changed in (None, *files):
        for file in files:
            file.write_text("changed" if file == changed else "")
        refusal = pytest.raises(ConfigError, match="another content") if changed else nullcontext()
        with refusal, AbFolder(options):
            pass


@pytest.mark.parametrize("text", ["nonsense", "[]"])
def test_a_foreign_file_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "ab.json").write_text(text)
    with pytest.raises(ConfigError, match="not written by tenuto ab"), open_folder(tmp_path):
        pass
    assert (tmp_path / "ab.json").read_text() == text


def test_results_of_another_command_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="holds results of another command"), open_folder(tmp_path):
        pass
    assert len(list(tmp_path.iterdir())) == 1


def test_one_at_a_time(tmp_path: Path) -> None:
    with (
        open_folder(tmp_path),
        pytest.raises(ConfigError, match="another tenuto ab is using this folder"),
        open_folder(tmp_path),
    ):
        pass


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match="cannot write"), open_folder(tmp_path / "x"):
        pass


def test_a_full_disk_at_the_start_is_named_and_leaves_a_folder_that_can_be_used(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"/ab\.json: File too large"), open_folder(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with open_folder(tmp_path):
        pass


def test_a_broken_off_run_is_put_away(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        for number in (1, 2):
            folder.get_run(SLOT).mkdir()
            (folder.get_run(SLOT) / "turns.jsonl").write_text(f"{number}")
            folder.clear(SLOT)
            assert not folder.get_run(SLOT).exists()
            assert (tmp_path / "cut" / f"001-a-{number}" / "turns.jsonl").read_text() == f"{number}"


def test_a_whole_run_stays(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        folder.get_run(SLOT).mkdir()
        (folder.get_run(SLOT) / "result.json").write_text('{"client": {}}')
        folder.clear(SLOT)
        assert folder.has_run(SLOT)


def test_the_results_are_those_of_whole_runs_with_the_comparison_s_terms(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        write_run(folder.get_run(SLOT), {"a": 2.0}, [make_line("a", 0, 2)])
        found = conclude(folder)
    assert (found.pairs, [len(runs) for runs in found.done.values()]) == ({}, [1, 0])
    (row,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert (row["job_times_s"], row["makespan_s"]) == ({"a": 2.0}, 8.0)
    assert (row["ab"]["repeat"], row["ab"]["arm"], row["ab"]["baseline"]) == (1, "a", "a")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"client": {}}', *(f'{{"client": {{}}, "job_times_s": {{}}, {end}' for end in ENDS)],
)
def test_a_spoilt_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(DataError, match=r"/result\.json(:1)?: .*run it again"):
        read_run(tmp_path)


def write_run(folder: Path, job_times_s: dict[str, float], lines: list[dict[str, object]]) -> Path:
    folder.mkdir(parents=True)
    result = {
        "kind": "run", "schema": 2, "job_times_s": job_times_s,
        "client": {"complaints": {}, "failed_attempts": {}, "send_lag_s": None},
        "turns": {"planned": 4, "ok": 4}, "makespan_s": 8.0,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "turns.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def make_line(job: str, due_s: float, latency_s: float, status: str = "ok") -> dict[str, object]:
    return {
        "kind": "turn", "schema": 2, "job": job, "turn": 1, "status": status, "due_s": due_s,
        "first_token_s": due_s + 1, "last_token_s": due_s + latency_s,
    }  # fmt: skip


def test_a_pair_counts_the_jobs_that_finished_on_both(tmp_path: Path) -> None:
    lines = [make_line("a", 0, 2), make_line("b", 0, 4), make_line("c", 0, 9, "failed")]
    one = write_run(tmp_path / "one", {"a": 2.0, "b": 4.0}, lines)
    two = write_run(tmp_path / "two", {"b": 5.0, "c": 7.0}, [make_line("b", 1, 5), make_line("c", 0, 7)])
    pair = make_pair({"x": read_run(one), "y": read_run(two)})
    assert pair is not None
    assert (pair["x"]["mean_job_s"], pair["y"]["p95_job_s"]) == (4.0, 5.0)
    assert (pair["x"]["mean_turn_s"], pair["y"]["mean_ttft_s"]) == (4.0, 1.0)
    assert pair["x"]["turns_per_s"] == 0.5
    three = write_run(tmp_path / "three", {"d": 1.0}, lines)
    assert make_pair({"x": read_run(one), "y": read_run(three)}) is None


def test_a_sub_agents_turn_that_failed_on_one_arm_counts_on_none(tmp_path: Path) -> None:
    own, helper = make_line("a", 0, 2), {**make_line("h", 0, 9), "root": "a"}
    one = write_run(tmp_path / "one", {"a": 2.0}, [own, helper])
    two = write_run(tmp_path / "two", {"a": 2.0}, [own, {**helper, "status": "failed"}])
    pair = make_pair({"x": read_run(one), "y": read_run(two)})
    assert pair is not None
    assert pair["x"] == pair["y"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"kind": "turn", "schema": 2, "job": "a", "turn": 0}], r"turns\.jsonl:1: "),
        ([make_line("other", 0, 2)], r"turns\.jsonl: lacks turns that result\.json counts"),
    ],
)
def test_spoilt_turns_are_named(tmp_path: Path, lines: list[dict[str, object]], message: str) -> None:
    folder = write_run(tmp_path / "one", {"a": 2.0}, lines)
    with pytest.raises(DataError, match=f"{message}.*remove its folder to run it again"):
        make_pair({"x": read_run(folder)})

"""Conversions: what the other format can say comes back as it was, and what it cannot is told."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.cli import main
from tenuto.core.errors import ConfigError, DataError
from tenuto.core.reuse import count_shared_tokens
from tenuto.workload.convert import FORMATS, Format, find_losses, write_trace
from tenuto.workload.formats.rows import BlockIds, HashedPrompt, make_prompts
from tenuto.workload.load import load_workload
from tenuto.workload.schema import After, Job, Span, TurnSpec
from tests.workload.test_workload_tenuto_jsonl import workloads

# A strategy's texts are up to 4 million tokens long: in small blocks that is slow, and no other case.
LARGE_BLOCK = 2**16

names = st.sampled_from("abcd")
prompts = st.lists(st.builds(Span, names, st.integers(1, 40)), min_size=1, max_size=4).map(tuple)


@given(st.lists(prompts, min_size=1, max_size=5), st.sampled_from([1, 2, 7, 16]))
def test_block_ids_share_what_prompts_share_in_whole_blocks(made, block_size):
    ids = BlockIds(block_size)
    rows = [ids.make(prompt, with_last=True) for prompt in made]
    sizes = [sum(span.num_tokens for span in prompt) for prompt in made]
    assert [len(row) for row in rows] == [-(-size // block_size) for size in sizes]
    full = [ids.make(prompt, with_last=False) for prompt in made]
    assert full == [row[: size // block_size] for row, size in zip(rows, sizes, strict=True)]
    back = make_prompts(
        [HashedPrompt(row, size) for row, size in zip(rows, sizes, strict=True)], block_size, "x"
    )
    for (prompt, again), (other, other_again) in combinations(zip(made, back, strict=True), 2):
        shared = count_shared_tokens(prompt, other)
        equal = prompt == other
        assert count_shared_tokens(again, other_again) == (
            shared if equal else shared // block_size * block_size
        )


def convert(jobs, name, block_size=None):
    """The jobs as they are after a conversion, and what was lost."""
    chosen = FORMATS[name]
    with TemporaryDirectory() as folder:
        written = write_trace(Path(folder) / "t.jsonl", jobs, chosen, block_size or chosen.block_size)
    return written, find_losses(jobs, written, chosen.get_names(jobs))


@pytest.mark.slow
@settings(max_examples=60)
@given(workloads(), st.sampled_from(list(FORMATS)))
def test_any_workload_survives_any_format(workload, name):
    jobs = workload.jobs
    written, losses = convert(jobs, name, LARGE_BLOCK)
    turns = [turn for job in jobs for turn in job.turns]
    assert sum(len(job.turns) for job in written) == len(turns)
    for what in ("num_prompt_tokens", "num_output_tokens"):
        assert sorted(getattr(turn, what) for turn in turns) == sorted(
            getattr(turn, what) for job in written for turn in job.turns
        )
    if name == "tenuto":
        assert tuple(written) == jobs
        assert losses == []


@pytest.mark.slow
@settings(max_examples=30)
@given(workloads(), st.sampled_from([name for name in FORMATS if name != "tenuto"]))
def test_what_a_format_can_say_it_can_say_again(workload, name):
    """A second conversion into the same format loses nothing more."""
    written, _ = convert(workload.jobs, name, LARGE_BLOCK)
    if name == "mooncake":
        again, losses = convert(written, name, LARGE_BLOCK)
        assert [job.turns for job in again] == [job.turns for job in written]
        return
    _, losses = convert(written, name, LARGE_BLOCK)
    assert [loss for loss in losses if not loss.startswith("job ids")] == []


def make_jobs():
    """A job that starts a sub-agent and waits for it; and a job of another tenant."""
    system = Span("system", 100)
    first = TurnSpec((system, Span("task", 60)), Span("o0", 20), tool="Task", tool_s=0.0)
    second = TurnSpec(
        first.followed_by(Span("result", 44)),
        Span("o1", 9),
        at_s=9.0,
        after=(After("a/sub", 1, "finished", 0.5),),
    )
    spawn = (After("a", 0, "finished", 1.0),)
    sub = TurnSpec(
        (system, Span("sub", 30)), Span("s0", 8), tool="ls", command="ls -l", tool_s=2.0, after=spawn
    )
    done = TurnSpec(sub.followed_by(Span("listing", 50)), Span("s1", 5), at_s=7.0)
    other = TurnSpec((system, Span("other", 10)), Span("x0", 3), extra={"ttft_ms": 1.5, "mine": 1})
    return [
        Job("a", 1.0, (first, second)),
        Job("a/sub", 4.0, (sub, done), parent="a"),
        Job("b", 2.0, (other,), tenant="acme"),
    ]


def test_losses_of_each_format_are_told():
    jobs = make_jobs()
    told = {name: "\n".join(convert(jobs, name, 16)[1]) for name in FORMATS}
    assert told["tenuto"] == ""
    assert "3 jobs became 5 requests" in told["mooncake"]
    assert "turns waited for: changed 2 times" in told["mooncake"]
    for name in ("mooncake", "agentic-mooncake", "weka"):
        assert "'acme' → None" in told[name]
        assert "'ls -l' → None" in told[name]
        kept = {"weka": "{'ttft_ms': 1.5}"}.get(name, "{}")
        assert f"other keys: changed 1 time, first {{'ttft_ms': 1.5, 'mine': 1}} → {kept}" in told[name]
    assert "'Task' → 'tool_use'" in told["weka"]
    # What jobs wait for can be said in both formats that know jobs; what strangers share in neither.
    for name in ("agentic-mooncake", "weka"):
        assert "turns waited for" not in told[name]
        assert "parent" not in told[name]
        assert "tool time" not in told[name]
        assert "time of sending" not in told[name]
        assert "tokens that jobs' first prompts share: 200 → 96" in told[name]
        # 160 + 20 of job a and 130 + 8 of its sub-agent; then whole blocks of the prompts alone.
        assert "tokens repeated from the turn before and its answer: 318 → 288" in told[name]


def test_generated_jobs_keep_their_plan():
    jobs = load_workload("ab8", jps=1, window_s=5).jobs
    for name in ("agentic-mooncake", "weka"):
        written, losses = convert(jobs, name, 16)
        for job, other in zip(jobs, written, strict=True):
            assert [turn.num_prompt_tokens for turn in job.turns] == [
                t.num_prompt_tokens for t in other.turns
            ]
            assert [turn.tool_s for turn in job.turns] == pytest.approx([turn.tool_s for turn in other.turns])
            assert job.arrival_s == pytest.approx(other.arrival_s)
        # Only closed loops are planned; a time of sending has to be made up for these formats.
        assert any(loss.startswith("time of sending") for loss in losses)


@pytest.fixture(scope="module")
def some_sessions(tmp_path_factory):
    """The smaller recorded sessions, among them such with sub-agents."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "traces" / "weka"
    if not folder.exists():
        pytest.skip("the recorded Weka sessions are not beside the project")
    chosen = sorted(folder.iterdir(), key=lambda file: file.stat().st_size)[:40]
    made = tmp_path_factory.mktemp("weka")
    texts = {file.name: gzip.decompress(file.read_bytes()) for file in chosen}
    assert sum(b"subagent" in text for text in texts.values()) >= 3
    for name, text in texts.items():
        (made / name.removesuffix(".gz")).write_bytes(text)
    return made


@pytest.mark.slow
def test_recorded_sessions_come_back_through_tenuto_as_they_were(some_sessions, tmp_path, capsys):
    made, back = tmp_path / "t.jsonl", tmp_path / "back"
    assert main(["convert", str(some_sessions), str(made)]) == 0
    assert main(["convert", str(made), str(back), "--to", "weka", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["losses"] == []
    before, after = load_workload(some_sessions).jobs, load_workload(back).jobs
    assert [job.job_id for job in before] == [job.job_id for job in after]
    for job, other in zip(before, after, strict=True):
        shared, others = (
            [count_shared_tokens(a.prompt, b.prompt) for a, b in pairwise(each.turns)]
            for each in (job, other)
        )
        assert shared == others


@pytest.mark.parametrize("name", ["mooncake", "agentic-mooncake"])
def test_recorded_sessions_lose_only_what_the_format_cannot_say(some_sessions, name):
    jobs = load_workload(some_sessions).jobs[:12]
    _, losses = convert(jobs, name, 64)
    kinds = {loss.partition(":")[0] for loss in losses}
    cannot = {
        "mooncake": {"jobs", "tool", "tool time", "turns waited for", "parent", "other keys"},
        "agentic-mooncake": {"job ids", "tool", "other keys"},
    }
    assert kinds <= cannot[name]


def test_the_command_writes_new_files_only(write_rows, tmp_path, capsys):
    source = write_rows({"session": "a", "timestamp": 0, "input_length": 9, "output_length": 2})
    out = tmp_path / "out.jsonl"
    assert main(["convert", str(source), str(out), "--to", "mooncake"]) == 0
    assert "1 job, 1 turn" in capsys.readouterr().out
    for name in ("tenuto", "weka"):
        assert main(["convert", str(source), str(out), "--to", name]) == 2
    assert "is there already" in capsys.readouterr().err
    folder = tmp_path / "folder"
    assert main(["convert", str(source), str(folder), "--to", "weka"]) == 0
    assert main(["convert", str(source), str(folder), "--to", "weka"]) == 2
    assert main(["convert", str(source), str(out / "x"), "--to", "weka"]) == 2
    assert main(["convert", str(source), str(tmp_path / "y"), "--block-size", "0"]) == 2
    assert "--block-size" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "z")]) == 2


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="cannot write"):
        write_trace(Path("/proc/none/x"), make_jobs(), FORMATS["tenuto"], 64)

    def fail(row):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tenuto.workload.convert.dump_json", fail)
    for name, chosen in (("x.jsonl", "tenuto"), ("x.jsonl.gz", "tenuto"), ("folder", "weka")):
        with pytest.raises(ConfigError, match="No space left"):
            write_trace(tmp_path / name, make_jobs(), FORMATS[chosen], 64)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_again_is_not_left_behind(tmp_path):
    broken = Format(lambda jobs, _: [{"session": "", "input_length": 1}])
    with pytest.raises(DataError, match="session: must be a string"):
        write_trace(tmp_path / "x.jsonl", make_jobs(), broken, 64)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_there_when_it_is_whole(tmp_path):
    out = tmp_path / "new" / "w"

    def make_rows(jobs, block_size):
        for row in FORMATS["weka"].make_rows(jobs, block_size):
            assert not out.exists()
            yield row

    write_trace(out, make_jobs(), replace(FORMATS["weka"], make_rows=make_rows), 64)
    assert len(list(out.iterdir())) == 2
    (tmp_path / "empty").mkdir()
    write_trace(tmp_path / "empty", make_jobs(), FORMATS["weka"], 64)
    assert len(list((tmp_path / "empty").iterdir())) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"new", "empty"}


def test_an_empty_folder_in_which_one_works_is_filled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    broken = Format(lambda jobs, _: [{"id": ""}], has_sessions=True)
    with pytest.raises(DataError):
        write_trace(Path(), make_jobs(), broken, 64)
    assert list(tmp_path.iterdir()) == []
    write_trace(Path(), make_jobs(), FORMATS["weka"], 64)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"] * 2


def test_a_file_with_a_temporary_name_is_kept(tmp_path):
    mine = tmp_path / "x.jsonl.part"
    mine.write_text("mine")
    write_trace(tmp_path / "x.jsonl", make_jobs(), FORMATS["tenuto"], 64)
    assert mine.read_text() == "mine"


def test_a_device_or_a_pipe_stays_what_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for name in FORMATS:
        with pytest.raises(ConfigError, match="is there already"):
            write_trace(pipe, make_jobs(), FORMATS[name], 64)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("name", ["tenuto", "weka"])
def test_a_packed_file_is_packed_and_reads_the_same(name, tmp_path):
    plain = write_trace(tmp_path / "t.jsonl", make_jobs(), FORMATS[name], 64)
    for packed in ("one.jsonl.gz", "two.json.gz"):
        assert write_trace(tmp_path / packed, make_jobs(), FORMATS[name], 64) == plain
        assert gzip.decompress((tmp_path / packed).read_bytes()) == (tmp_path / "t.jsonl").read_bytes()


def test_sessions_whose_names_are_no_file_names(tmp_path):
    turn = TurnSpec((Span("p", 100),), Span("o", 1))
    names = ("../x", "..%2Fx", "x" * 300, "a\tb", "\ud800", "\U00020000" * 80)
    jobs = [Job(name, 0.0, (turn,)) for name in names]
    written = write_trace(tmp_path / "w", jobs, FORMATS["weka"], 64)
    assert [job.job_id for job in written] == list(names)
    assert all(file.parent == tmp_path / "w" for file in (tmp_path / "w").iterdir())

"""The state file: written whole or not at all, read with care, saved without waiting for the disk."""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tenuto.vllm.state
from tenuto.core.errors import ConfigError
from tenuto.core.policy import Learns, Policy
from tenuto.vllm.state import StateFile, load_state, save_state


@dataclass
class Counting(Policy, Learns):
    """Learns one number."""

    count: int = field(init=False, default=0)

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"])


def open_file(path: Path, policy: Policy | None = None, save_every_s: float = 60.0) -> StateFile:
    return StateFile(policy or Counting(), "counting", str(path), save_every_s)


def wait_for_writer(state: StateFile) -> None:
    assert state._writer is not None
    state._writer.join()


# The file.


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    save_state(path, "counting", {"count": 3, "text": "ü"})
    assert load_state(path, "counting") == {"count": 3, "text": "ü"}
    save_state(path, "counting", {"count": 4})
    assert load_state(path, "counting") == {"count": 4}
    assert os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b'{"format": "tenuto-state-1", "poli', "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a state file"),
        (b'{"format": "tenuto-state-0", "policy": "counting", "state": {}}', "not a state file"),
        (b'{"format": "tenuto-state-1", "policy": "other", "state": {}}', "the state of policy 'other'"),
        (b'{"format": "tenuto-state-1", "policy": "counting", "state": []}', "holds the state"),
    ],
)
def test_a_file_that_is_none_of_ours_is_named_for_what_it_is(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_state(path, "counting")


def test_a_pipe_in_the_file_s_place_stops_no_engine(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a plain file"):
        load_state(path, "counting")
    policy = Counting()
    open_file(path, policy).close()
    assert load_state(path, "counting") == {"count": 0}


def test_files_are_bounded_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenuto.vllm.state, "MAX_BYTES", 100)
    path = tmp_path / "state.json"
    save_state(path, "counting", {"count": 1})
    with pytest.raises(ValueError, match="over the limit of 100"):
        save_state(path, "counting", {"text": "x" * 100})
    assert load_state(path, "counting") == {"count": 1}
    path.write_bytes(b" " * 101)
    with pytest.raises(ValueError, match="larger than 100"):
        load_state(path, "counting")


@pytest.mark.parametrize("state", [{"count": float("nan")}, {"count": {1, 2}}])
def test_what_is_not_json_leaves_the_old_file(state: dict, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    save_state(path, "counting", {"count": 1})
    with pytest.raises((TypeError, ValueError)):
        save_state(path, "counting", state)
    assert load_state(path, "counting") == {"count": 1}
    assert os.listdir(tmp_path) == ["state.json"]


def test_only_the_server_s_user_reads_the_file(tmp_path: Path) -> None:
    save_state(tmp_path / "state.json", "counting", {"count": 1})
    assert (tmp_path / "state.json").stat().st_mode & 0o077 == 0


def test_a_link_that_another_user_put_there_is_not_written_through(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "state.json"
    other.write_text("mine")
    for name in (path.name, f".{path.name}.{os.getpid()}.partial"):
        (tmp_path / name).symlink_to(other)
    save_state(path, "counting", {"count": 1})
    assert other.read_text() == "mine"
    assert path.lstat().st_mode & 0o777 == 0o600 and load_state(path, "counting") == {"count": 1}


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_crash_while_saving_leaves_the_old_file(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    save_state(path, "counting", {"count": 1})

    def fail(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(*{"fsync": (os, "fsync", fail), "replace": (Path, "replace", fail)}[broken])
    with pytest.raises(OSError, match="no space"):
        save_state(path, "counting", {"count": 2})
    assert load_state(path, "counting") == {"count": 1}


# The policy's.


def test_a_restart_goes_on_where_the_last_run_ended(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "state.json"
    first = Counting()
    state = open_file(path, first)
    first.count = 7
    state.close()
    second = Counting()
    open_file(path, second)
    assert second.count == 7


def test_it_saves_when_it_is_time_and_sooner_when_idle(tmp_path: Path) -> None:
    path, policy = tmp_path / "state.json", Counting()
    state = open_file(path, policy, save_every_s=60.0)
    for now_s in (1000.0, 1030.0, 1059.0):
        state.save_if_due(now_s)
    state.save_if_due(1005.0, idle=True)
    assert not path.exists()
    policy.count = 1
    state.save_if_due(1060.0)
    wait_for_writer(state)
    assert load_state(path, "counting") == {"count": 1}
    policy.count = 2
    state.save_if_due(1065.0)
    state.save_if_due(1066.0, idle=True)
    wait_for_writer(state)
    assert load_state(path, "counting") == {"count": 2}


def test_saving_does_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, num_saved = threading.Event(), []

    def save_slowly(*args: object) -> None:
        num_saved.append(1)
        assert goes_on.wait(30)

    monkeypatch.setattr(tenuto.vllm.state, "save_state", save_slowly)
    state = open_file(tmp_path / "state.json", save_every_s=1.0)
    state.save_if_due(0.0)
    state.save_if_due(1.0)  # would hang here
    state.save_if_due(2.0)  # the last one is still being written
    assert len(num_saved) <= 1
    goes_on.set()
    wait_for_writer(state)
    assert len(num_saved) == 1
    state.save_if_due(3.0)
    wait_for_writer(state)
    assert len(num_saved) == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"format": "tenuto-state-1", "policy": "counting", "state": {}}']
)
def test_a_corrupt_file_is_reported_set_aside_and_ignored(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content)
    policy = Counting()
    with caplog.at_level(logging.ERROR, "vllm.tenuto"):
        state = open_file(path, policy)
    assert "state.json is ignored" in caplog.text and "the file is now state.json.ignored" in caplog.text
    assert policy.count == 0
    policy.count = 5
    state.close()
    assert load_state(path, "counting") == {"count": 5}
    assert path.with_name("state.json.ignored").read_bytes() == content


def test_a_disk_that_fails_is_reported_once_and_then_again_after_it_worked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    state = open_file(folder / "state.json")
    folder.rmdir()
    for _ in range(3):
        state.close()
    assert caplog.text.count("is not saved") == 1
    folder.mkdir()
    state.close()
    (folder / "state.json").unlink()
    folder.rmdir()
    state.close()
    assert caplog.text.count("is not saved") == 2


def test_a_policy_that_fails_to_say_what_it_learned_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @dataclass
    class Failing(Counting):
        def get_state(self) -> dict[str, Any]:
            raise RuntimeError("broken")

    state = open_file(tmp_path / "state.json", Failing(), save_every_s=1.0)
    state.save_if_due(0.0)
    state.save_if_due(2.0)
    state.close()
    assert caplog.text.count("broken") == 1
    assert os.listdir(tmp_path) == []


def test_a_policy_that_learns_nothing_writes_nothing(tmp_path: Path) -> None:
    state = open_file(tmp_path / "state.json", Policy(), save_every_s=1.0)
    state.save_if_due(0.0)
    state.save_if_due(2.0)
    state.close()
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_to_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "state.json"):
        with pytest.raises(ConfigError, match=r"tenuto\.state"):
            open_file(path)


def test_the_format_is_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    save_state(path, "counting", {"count": 1})
    assert json.loads(path.read_text()) == {
        "format": "tenuto-state-1",
        "policy": "counting",
        "state": {"count": 1},
    }

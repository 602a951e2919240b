"""A comparison's folder: one comparison, nothing lost, one user at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenuto.client.ab.files import AbFolder
from tenuto.client.ab.order import Slot, make_order
from tenuto.core.errors import ConfigError, DataError

SLOT = Slot(0, "a")


def test_the_order_turns_around() -> None:
    names = ["".join(slot.arm for slot in make_order("abc", 3) if slot.repeat == n) for n in range(3)]
    assert names == ["abc", "cba", "abc"]
    assert [slot.name for slot in make_order("ab", 2)] == ["001-a", "001-b", "002-b", "002-a"]


def test_a_folder_is_taken_up_again(tmp_path: Path) -> None:
    for _ in range(2):
        with AbFolder(tmp_path / "x", {"jps": 1.0, "arms": ("a", "b")}) as folder:
            assert folder.get_run(SLOT) == tmp_path / "x" / "runs" / "001-a"


def test_another_comparison_is_refused(tmp_path: Path) -> None:
    with AbFolder(tmp_path, {"jps": 1.0}):
        pass
    with (
        pytest.raises(ConfigError, match=r"another jps: 1\.0 there, 2\.0 now"),
        AbFolder(tmp_path, {"jps": 2.0}),
    ):
        pass


@pytest.mark.parametrize("text", ["nonsense", "[]"])
def test_a_foreign_file_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "ab.json").write_text(text)
    with pytest.raises(ConfigError, match="not written by tenuto ab"), AbFolder(tmp_path, {}):
        pass
    assert (tmp_path / "ab.json").read_text() == text


def test_one_at_a_time(tmp_path: Path) -> None:
    with (
        AbFolder(tmp_path, {}),
        pytest.raises(ConfigError, match="another tenuto ab is at work"),
        AbFolder(tmp_path, {}),
    ):
        pass


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match="cannot write"), AbFolder(tmp_path / "x", {}):
        pass


def test_a_broken_off_run_is_put_away(tmp_path: Path) -> None:
    with AbFolder(tmp_path, {}) as folder:
        for number in (1, 2):
            folder.get_run(SLOT).mkdir()
            (folder.get_run(SLOT) / "turns.jsonl").write_text(f"{number}")
            folder.clear(SLOT)
            assert not folder.get_run(SLOT).exists()
            assert (tmp_path / "cut" / f"001-a-{number}" / "turns.jsonl").read_text() == f"{number}"


def test_a_whole_run_stays(tmp_path: Path) -> None:
    with AbFolder(tmp_path, {}) as folder:
        folder.get_run(SLOT).mkdir()
        (folder.get_run(SLOT) / "result.json").write_text('{"client": {}}')
        folder.clear(SLOT)
        assert folder.has_run(SLOT)
        folder.write_results([SLOT, Slot(0, "b")])
        (row,) = (tmp_path / "results.jsonl").read_text().splitlines()
        assert json.loads(row) == {"client": {}, "ab": {"repeat": 1, "arm": "a"}}


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_spoilt_result_is_named(tmp_path: Path, text: str) -> None:
    with AbFolder(tmp_path, {}) as folder:
        folder.get_run(SLOT).mkdir()
        (folder.get_run(SLOT) / "result.json").write_text(text)
        with pytest.raises(DataError, match=r"001-a/result\.json: .*run it again"):
            folder.read_result(SLOT)

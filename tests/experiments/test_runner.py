"""The one help of all experiments: it lists each of them, and runs them by name."""

from __future__ import annotations

import pytest

from experiments import __main__ as runner

LISTED = {name for names in runner.GROUPS.values() for name in names}


def test_every_script_is_listed() -> None:
    scripts = set()
    for path in runner.ROOM.rglob("*.py"):
        name = ".".join(path.relative_to(runner.ROOM).with_suffix("").parts).removesuffix(".__main__")
        is_script = 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")
        # Those of `setup` are steps of the Makefile.
        if is_script and name != "__main__" and not name.startswith(("setup.", "out.")):
            scripts.add(name)
    assert scripts == LISTED


def test_the_list_says_what_each_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in LISTED:
        assert any(line.split()[:1] == [name] and len(line.split()) > 3 for line in lines), name


def test_a_name_runs_the_module_with_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runner.main(["tables.tier_pressure", "--help"])
    assert ended.value.code == 0
    assert "python -m experiments tables.tier_pressure" in capsys.readouterr().out


def test_an_unknown_name_is_answered_with_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["mixed-steps"]) == 2
    assert "tables.mixed_steps" in capsys.readouterr().err

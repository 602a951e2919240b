"""The contributing page's example is a policy that works."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenuto.core.contracts import check_contract
from tenuto.core.loader import load_policy
from tenuto.core.types import EngineView, Job, Keep, Release, ToolCall, Turn

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module = types.ModuleType("keep_quick")
    sys.modules["keep_quick"] = module
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    yield module
    del sys.modules["keep_quick"]


def test_the_recipe_makes_a_policy(module: types.ModuleType) -> None:
    policy = load_policy("keep_quick:KeepQuick", {"quick_s": 2.0})
    check_contract(policy)
    policy = load_policy("keep_quick:KeepQuick", {"quick_s": 2.0})
    turn = Turn("t1", Job("j", 0.0, 1), 0.0, 100, tool=ToolCall("make"))
    view = EngineView(10.0, 16, 100, 50, 0, 0, 2048)
    # Unseen counts as 1 s: kept for twice 2 s. One call of 5 s is a mean above 2 s.
    assert policy.retain(turn, view) == Keep(14.0)
    policy.on_tool_returned(turn, ToolCall("make"), 5.0)
    assert policy.retain(turn, view) == Release()

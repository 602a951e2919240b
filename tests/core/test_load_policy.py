"""Finding a policy by name or path, with options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tenuto.core.errors import ConfigError, PolicyError, TenutoError
from tenuto.core.loader import get_policy_names, load_policy, load_router
from tenuto.core.policy import Policy, setting


@dataclass
class Mine(Policy):
    """A policy from outside."""

    weight: float = setting(1.0, "how much", minimum=0, maximum=2)
    mode: str = setting("a", "which", choices=("a", "b"))


class Undeclared(Mine):
    """Its own parameter is a plain annotation, so nobody would check it."""

    extra: float = 3.0


class Unrelated:
    """Not a policy at all."""


HERE = __name__


def test_names_are_those_of_the_files() -> None:
    assert {"stock", "tenuto", "continuum-fixed"} <= set(get_policy_names())
    assert get_policy_names() == sorted(get_policy_names())


def test_by_name() -> None:
    policy = load_policy("continuum-fixed", {"ttl_s": 3})
    assert (type(policy).__name__, policy.ttl_s) == ("ContinuumFixed", 3.0)


def test_by_path() -> None:
    policy = load_policy(f"{HERE}:Mine", {"weight": 2, "mode": "b"})
    assert policy == Mine(2.0, "b")


def test_without_options() -> None:
    assert load_policy(f"{HERE}:Mine") == load_policy(f"{HERE}:Mine", {}) == Mine()


@pytest.mark.parametrize("name", ["lru", "", "Stock", "continuum_fixed", "../stock", "stock "])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(PolicyError, match=rf"no policy '{name}'.*continuum-fixed, .*my\.module:Class"):
        load_policy(name)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (f"{HERE}:Nobody", "cannot be imported"),
        ("no.such.module:Mine", "cannot be imported"),
        (":Mine", "cannot be imported"),
        (".relative:Mine", "cannot be imported"),
        (f"{HERE}:Unrelated", "not a subclass"),
        (f"{HERE}:HERE", "not a subclass"),
        (f"{HERE}:Undeclared", "must be a dataclass"),
    ],
)
def test_a_path_that_leads_nowhere(path: str, problem: str) -> None:
    with pytest.raises(PolicyError, match=problem) as caught:
        load_policy(path)
    assert repr(path) in str(caught.value)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("class Broken(:", r"SyntaxError\('invalid syntax', .*, 1, 14"),
        ("\n1 / 0", "line 2: ZeroDivisionError"),
        ("\n\nimport nothing_of_this_name", "line 3: ModuleNotFoundError"),
        ("import json\njson.loads('')", "line 2: JSONDecodeError"),
    ],
)
def test_a_module_that_cannot_be_run(tmp_path: Path, monkeypatch, code: str, problem: str) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = f"broken_policy_{len(code)}"
    path = tmp_path / f"{module}.py"
    path.write_text(code)
    for name in (module, str(path)):
        with pytest.raises(PolicyError, match=f"cannot be imported: {problem}"):
            load_policy(f"{name}:Broken")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("x: int", "cannot be made: TypeError.*'x'"),
        ("def __post_init__(self): raise ValueError('planted')", r"cannot be made: ValueError\('planted'\)"),
        ("needs = {'reorder_s': 1}", "needs must be a Needs, got {'reorder_s': 1}"),
    ],
)
@pytest.mark.parametrize(("base", "load"), [("Policy", load_policy), ("Router", load_router)])
def test_a_class_of_which_no_object_can_be_made(
    tmp_path: Path, base: str, load: Callable[[str], object], body: str, problem: str
) -> None:
    path = tmp_path / "mine.py"
    head = (
        "from dataclasses import dataclass\nfrom tenuto import Policy\nfrom tenuto.core.router import Router"
    )
    path.write_text(f"{head}\n@dataclass\nclass Mine({base}):\n    {body}\n")
    wanted = problem.replace("a Needs", "a RouterNeeds") if base == "Router" else problem
    with pytest.raises(PolicyError, match=f"mine.py:Mine'.*{wanted}"):
        load(f"{path}:Mine")


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("wieght", 1, "unknown key 'wieght'.*known keys: mode, weight"),
        ("weight", "1", "'weight' must be float"),
        ("weight", True, "'weight' must be float"),
        ("weight", 2.5, "'weight' must be at most 2"),
        ("weight", -1, "'weight' must be at least 0"),
        ("mode", "c", "'mode' must be one of a, b"),
    ],
)
def test_a_bad_option_is_refused_by_name(option: str, value: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        load_policy(f"{HERE}:Mine", {option: value})
    assert f"{HERE}:Mine" in str(caught.value)


def test_what_a_policy_learns_is_no_option() -> None:
    with pytest.raises(ConfigError, match="unknown key '_tool_times'"):
        load_policy("continuum-fixed", {"_tool_times": {}})


def test_the_errors_have_one_base() -> None:
    assert issubclass(ConfigError, TenutoError)
    assert issubclass(PolicyError, TenutoError)


def test_a_policy_overrides_what_it_redefines_and_nothing_else() -> None:
    @dataclass
    class Budget(Policy):
        def step_budget(self, view):
            return 1

    assert Budget.overrides("step_budget")
    assert not Budget.overrides("retain")
    assert not any(Policy.overrides(hook) for hook in ("queue_key", "retain", "on_job_ended"))

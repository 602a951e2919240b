"""Settings: types, bounds, and messages that name the key."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any

import pytest

from tenuto.core.errors import ConfigError, suggest
from tenuto.core.settings import Options, check_settings, option, parse_policy_options, setting


@dataclass
class Example:
    """One setting of each kind."""

    ttl_s: float = setting(2.0, "seconds", minimum=0, maximum=10)
    count: int = setting(1, "how many", minimum=1)
    name: str | None = setting(None, "a name, if any")
    mode: str = setting("slow", "fast or slow", choices=("fast", "slow"))
    flag: bool = setting(False, "yes or no")
    options: dict[str, Any] = field(default_factory=dict)
    share: float | None = setting(None, "share, if any", minimum=0)
    learned: int = field(init=False, default=0)


def check(**given: Any) -> dict[str, Any]:
    return check_settings(Example, given, "example")


def test_good_values_come_back_as_keyword_arguments() -> None:
    given = {"ttl_s": 1.5, "count": 3, "name": "x", "mode": "fast", "flag": True, "options": {"a": 1}}
    assert check(**given) == given
    assert Example(**check(**given)).ttl_s == 1.5
    assert check() == {}


def test_an_int_is_taken_for_a_float() -> None:
    [value] = check(ttl_s=2).values()
    assert (value, type(value)) == (2.0, float)


def test_none_where_none_is_allowed() -> None:
    assert check(name=None, share=None) == {"name": None, "share": None}
    with pytest.raises(ConfigError, match="'mode'"):
        check(mode=None)


def test_the_bounds_themselves_are_allowed() -> None:
    assert check(ttl_s=0, count=1) == {"ttl_s": 0.0, "count": 1}
    assert check(ttl_s=10) == {"ttl_s": 10.0}


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("ttl", 1, "unknown key"),
        ("learned", 1, "unknown key"),
        ("ttl_s", "2", "must be float"),
        ("ttl_s", True, "must be float"),
        ("ttl_s", -0.1, "at least 0"),
        ("ttl_s", 10.1, "at most 10"),
        ("ttl_s", float("nan"), "finite"),
        ("ttl_s", float("inf"), "finite"),
        ("ttl_s", 10**400, "too large"),
        ("count", 2.0, "must be int"),
        ("count", True, "must be int"),
        ("count", 0, "at least 1"),
        ("name", 3, "must be str or None"),
        ("mode", "medium", "must be one of fast, slow"),
        ("flag", 1, "must be bool"),
        ("flag", "true", "must be bool"),
        ("options", [], "must be dict"),
        ("share", "x", "must be float or None"),
    ],
)
def test_a_bad_value_is_refused_by_name(key: str, value: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=r"^example: ") as caught:
        check(**{key: value})
    assert repr(key) in str(caught.value)
    assert problem in str(caught.value)


def test_an_unknown_key_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="known keys: count, flag, mode, name, options, share, ttl_s"):
        check(ttl=1)


@pytest.mark.parametrize("given", [[], "ttl_s", 3, None])
def test_settings_are_an_object(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^example: must be an object"):
        check_settings(Example, given, "example")


@dataclass(frozen=True, kw_only=True)
class Told(Options):
    """Options of a command."""

    url: str = option(MISSING, "the server")
    window_s: float | None = option(None, "how long", above=0)
    link_gb_s: float = option(1.0, "how fast", flag="--link-gb-s", minimum=0)
    loop: str = option("open", "which loop", choices=("open", "closed"))
    jps: tuple[float, ...] = option((), "rates", above=0, below=100)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"window_s": 0.0}, "--window must be above 0, got 0.0"),
        ({"window_s": float("inf")}, "--window must be finite"),
        ({"link_gb_s": -1}, "--link-gb-s must be at least 0"),
        ({"loop": "opne"}, "--loop must be one of open, closed; got 'opne'; did you mean open?"),
        ({"jps": (1.0, 100.0)}, "--jps must be below 100, got 100.0"),
        ({"jps": (1.0, "2")}, "--jps must be float, got '2'"),
        ({"jps": [1.0]}, "--jps must be tuple, got [1.0]"),
        ({"window_s": True}, "--window must be float or None, got True"),
    ],
)
def test_an_option_out_of_bounds_is_refused_by_its_flag(given: dict[str, Any], words: str) -> None:
    assert Told(url="u", window_s=None, jps=(1.0, 2.0)).window_s is None
    with pytest.raises(ConfigError) as caught:
        Told(url="u", **given)
    assert str(caught.value).startswith(words)


def test_an_option_may_be_required() -> None:
    with pytest.raises(TypeError):
        Told()  # type: ignore[call-arg]


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000, "{", "\x00"])
def test_an_option_that_json_cannot_hold_is_text(value: str) -> None:
    assert parse_policy_options([f"a={value}"], "stock") == {"a": value}


def test_policy_options_may_be_for_one_policy() -> None:
    given = ["ttl_s=3", "a:name=x", "b:name=y"]
    assert parse_policy_options(given, "a", ["b"]) == {"ttl_s": 3, "name": "x"}
    with pytest.raises(ConfigError, match="'tenoto:name': this command has no 'tenoto'; did you mean tenuto"):
        parse_policy_options(["tenoto:name=x"], "stock", ["stock", "tenuto"])
    with pytest.raises(ConfigError, match=r"^'x' must be KEY=VALUE$"):
        parse_policy_options(["x"], "a")


def test_the_nearest_name_is_suggested() -> None:
    gpus = ["A100-40", "A100-80", "H100", "L40S"]
    assert suggest("h10", gpus) == "; did you mean H100?"
    assert suggest("a100", gpus) == "; did you mean A100-40 or A100-80?"
    assert suggest("NVIDIA H100 80GB HBM3", gpus) == "; did you mean H100?"
    assert suggest("--step", ["--tp", "--step-tokens"]) == "; did you mean --step-tokens?"
    assert suggest("--host", ["--host-gb"], cutoff=0.9) == ""
    assert suggest("quantum", ["H100", "L40S"]) == ""

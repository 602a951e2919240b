"""What an arm is, and the command that starts its server."""

from __future__ import annotations

import sys

import pytest

from tenuto.client.ab import make_command
from tenuto.client.options import Arm, parse_arm
from tenuto.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("a=http://h:8000/v1", Arm("a", "url", "http://h:8000/v1")),
        ("a.1-b=https://h?x=y", Arm("a.1-b", "url", "https://h?x=y")),
        ("stock=vllm", Arm("stock", "vllm")),
        ("hold=policy:continuum-fixed", Arm("hold", "policy", "continuum-fixed")),
        ("own=policy:my.module:Mine,a=1,b=x=y", Arm("own", "policy", "my.module:Mine", ("a=1", "b=x=y"))),
        ("s=sim:stock", Arm("s", "sim", "stock")),
    ],
)
def test_arms_as_written(text: str, arm: Arm) -> None:
    assert parse_arm(text) == arm
    assert str(arm) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://h", "wants NAME=URL"),
        ("a", "wants NAME=URL"),
        ("a/b=vllm", "wants NAME=URL"),
        ("..=vllm", "wants NAME=URL"),
        ("a=", "'' is none of"),
        ("a=h:8000", "'h:8000' is none of"),
        ("a=http://", "--arm a must be an address"),
        ("a=http://h:80a", "--arm a must be an address"),
        ("a=http://h,http://user:secret@h", "--arm a must not hold a user or password"),
        ("a=policy:", "'policy:' is none of"),
        ("a=vllm:stock", "is none of"),
        ("a=policy:stock,ttl_s", "key=value pairs, got 'ttl_s'"),
    ],
)
def test_what_is_no_arm(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_arm(text)


def test_commands() -> None:
    where = ["--host", "127.0.0.1", "--port", "81", "--x", "1"]
    tenuto = [sys.executable, "-m", "tenuto.cli", "serve"]
    plain = make_command(Arm("a", "vllm"), "m", 81, ["--x", "1"])
    assert plain[0].endswith("vllm")
    assert plain[1:] == ["serve", "m", "--enable-prompt-tokens-details", *where]
    policy = parse_arm("a=policy:continuum-fixed,ttl_s=1")
    chosen = ["--policy", "continuum-fixed", "--option", "ttl_s=1"]
    assert make_command(policy, "m", 81, ["--x", "1"]) == [
        *tenuto,
        "m",
        *chosen,
        "--enable-prompt-tokens-details",
        *where,
    ]
    sim = make_command(parse_arm("a=sim:stock"), "m", 81, ["--x", "1"])
    assert sim == [*tenuto, "--engine", "sim", "--model", "m", "--policy", "stock", *where]

"""The command's options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tenuto.client.options import AbOptions
from tenuto.core.errors import ConfigError
from tests.client.ab.conftest import parse

TWO = ("--arm", "a=http://h:1", "--arm", "b=http://h:2")


def test_options_as_parsed() -> None:
    options = parse(
        *("--arm", "a=vllm", "--arm", "b=policy:stock", "--model", "m", "--out", "d", "--repeats", "8"),
        *("--serve-args", "--x 'y z'", "--arm-args", "b=--p 1", "--arm-args", "b=--q", "--keep-up"),
        *(
            "--port",
            "9000",
            "--warmup-jobs",
            "0",
            "--threshold",
            "2.5",
            "--json",
            "--jps",
            "2",
            "--hints",
            "job",
        ),
        *("--api-key", "k", "--gpu", "G", "--start-limit", "5"),
    )
    assert options.serve_args == ("--x", "y z")
    assert options.arm_args == {"b": ("--p", "1", "--q")}
    assert (options.model, options.out, options.repeats, options.port) == ("m", Path("d"), 8, 9000)
    assert (options.keep_up, options.warmup_jobs, options.threshold, options.as_json) == (
        True,
        0,
        0.025,
        True,
    )
    bench = options.get_run_options(options.arms[1], "http://h:9", 3, "r")
    assert (bench.urls, bench.policy, bench.run_id, bench.load.seed) == (("http://h:9",), "b", "r", 45)
    assert (bench.load.jps, bench.load.hints, bench.api_key, bench.gpu) == (2.0, "job", "k", "G")
    assert (bench.model, bench.out) == (None, None)


def test_the_first_arm_may_be_several_engines() -> None:
    options = parse("--arm", "a=http://h:1,http://h:2", "--arm", "b=http://h:3", "--out", "d", "--jps", "1")
    arm = options.arms[0]
    assert options.get_run_options(arm, arm.target, 0, "r").urls == ("http://h:1", "http://h:2")


def test_the_model_of_urls() -> None:
    options = parse(*TWO, "--model", "m", "--out", "d")
    assert options.get_run_options(options.arms[0], "http://h:1", 0, "r").model == "m"
    mixed = parse(*TWO[:2], "--arm", "b=vllm", "--model", "m", "--out", "d")
    assert [mixed.get_run_options(arm, "http://h:1", 0, "r").model for arm in mixed.arms] == ["m", None]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "at least two arms"),
        (("--arm", "a=http://h"), "at least two arms"),
        (("--arm", "a=http://h", "--arm", "a=http://i"), "two arms have one name"),
        (("--arm", "a=http://h", "--arm", "b=vllm"), "--model is missing: the model that the server of 'b'"),
        ((*TWO, "--arm-args", "c=--x"), "there is no arm 'c'"),
        ((*TWO, "--arm-args", "x"), "--arm-args wants NAME=TEXT"),
        ((*TWO, "--serve-args", "'x"), "--serve-args: No closing quotation"),
        ((*TWO, "--repeats", "0"), "--repeats must be at least 1"),
        ((*TWO, "--warmup-jobs", "-1"), "--warmup-jobs must be at least 0"),
        ((*TWO, "--threshold", "100"), "--threshold must be below 100"),
        ((*TWO, "--port", "70000"), "--port must be at most 65535"),
        ((*TWO, "--start-limit", "0"), "--start-limit must be"),
        ((*TWO, "--retries", "-1"), "--retries must be"),
    ],
)
def test_options_out_of_range(
    options: Callable[..., AbOptions], arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        options(*arguments)


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help-all")
    text = capsys.readouterr().out
    for name in ("--arm", "--repeats", "--keep-up", "--serve-args", "--workload", "--hints", "--out"):
        assert name in text

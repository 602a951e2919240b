"""Which `prefix_cache_retention_interval` a server with Tenuto needs, by its model's config, and why."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

FLAG = "--prefix-cache-retention-interval"
STATES = ("linear_attention", "mamba", "mamba2", "recurrent")


def describe_interval(model: str, given: str | None, *, retains: bool) -> str | None:
    """What to tell the operator of a hybrid model about the interval; None for other models, and if unknown.

    `given`: the interval among vLLM's arguments. `retains`: whether the policy grants leases.
    """
    layers = read_layers(model)
    if layers is None or len(layers) < 2:
        return None
    text = ", ".join(f"{number} layers with {kind}" for kind, number in layers.items())
    if given is not None and given != "0":
        advice = "without that flag Tenuto caches less, and what jobs share" if retains else "as you asked"
        return f"{FLAG} {given}: {text}; {advice}"
    if not retains:
        return (
            f"{FLAG} stays 0: {text}. This policy holds nothing, so each turn computes the answer before it "
            "again; None avoids that while the cache is large"
        )
    return (
        f"{FLAG} stays 0: {text}. Leases hold what the next turn hits, its answer too, and what jobs "
        "share is pinned (limits.max_pinned_share); other intervals fill the cache with what nobody hits"
    )


def read_layers(model: str) -> dict[str, int] | None:
    """The number of layers by kind, of a model's folder or its name in the local cache of downloads.

    None if its config is not here or does not say.
    """
    config = _read_config(model)
    if config is None:
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
    """The kinds of layers where a config has only the distance of two layers with full attention."""
    num_layers = config.get("num_hidden_layers") or 0
    for field, other in (
        ("sliding_window_pattern", "sliding_attention"),
        ("full_attention_interval", "linear_attention"),
    ):
        if period := config.get(field):
            return ["full_attention" if (n + 1) % period == 0 else other for n in range(num_layers)]
    return []


def _read_config(model: str) -> dict[str, Any] | None:
    path = Path(model) / "config.json"
    if not path.is_file():
        try:
            from huggingface_hub import try_to_load_from_cache
        except ImportError:
            return None
        try:
            found = try_to_load_from_cache(model, "config.json")
        except ValueError:
            return None
        if not isinstance(found, str):
            return None
        path = Path(found)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) and isinstance(config.get("text_config", {}), dict) else None

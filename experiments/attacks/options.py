"""The options that both commands share: which attacks, and every number of the scene."""

from __future__ import annotations

import argparse
from dataclasses import fields

from experiments.attacks.plans import ATTACKS, Attack, Scene

HELP = {
    "window_s": "agents and probes arrive for so many seconds",
    "probe_every_s": "seconds between two probes",
    "long_every_s": "seconds between two plain requests of several steps",
    "agents_per_s": "agents' jobs per second",
    "kv_tokens": "size of the KV cache in tokens",
    "num_seqs": "most turns that run at once",
    "lengths": "factor on the length of every text",
    "strength": "factor on the number of an attack's streams",
    "seed": "moves each arrival at random; 0: arrivals are even",
    "no_calls": "the attack's answers contain no tool call, so its requests look plain; live, they never do",
    "same_start": "the attack's prompts begin like those of the plain requests of several steps",
}


def add_options(parser: argparse.ArgumentParser, scene: Scene) -> None:
    """Add the options; their defaults are this scene's numbers."""
    parser.add_argument("--attacks", default=",".join(ATTACKS), help=f"some of {', '.join(ATTACKS)}")
    parser.add_argument("--json", action="store_true", help="one line of JSON per run instead of the table")
    for field in fields(Scene):
        name, value = f"--{field.name.replace('_', '-')}", getattr(scene, field.name)
        if value is False:
            parser.add_argument(name, action="store_true", help=HELP[field.name])
            continue
        parser.add_argument(
            name,
            type=type(value),
            default=value,
            help=f"{HELP[field.name]} (default {value})",
        )


def get_attacks(parsed: argparse.Namespace) -> dict[str, Attack]:
    """The attacks that were asked for. Ends the command with a message if one is unknown."""
    names = parsed.attacks.split(",")
    unknown = [name for name in names if name not in ATTACKS]
    if unknown:
        raise SystemExit(f"--attacks: unknown {', '.join(unknown)}; there are {', '.join(ATTACKS)}")
    return {name: ATTACKS[name] for name in names}


def get_scene(parsed: argparse.Namespace) -> Scene:
    """The scene that was asked for."""
    return Scene(**{field.name: getattr(parsed, field.name) for field in fields(Scene)})

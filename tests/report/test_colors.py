"""The palettes: apart from each other, apart for colour-blind eyes, apart from the background."""

from __future__ import annotations

import itertools
import math

import pytest

from tenuto.report.html.spec import (
    BLOCK_STATES,
    DARK,
    LIGHT,
    POLICIES_DARK,
    POLICIES_LIGHT,
    STATES_DARK,
    STATES_LIGHT,
)

SCHEMES = {"light": (LIGHT, POLICIES_LIGHT, STATES_LIGHT), "dark": (DARK, POLICIES_DARK, STATES_DARK)}
EYES = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)
    ),
    "no green": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)
    ),
    "no blue": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)
    ),
}  # fmt: skip
"""Machado and others (2009), severity 1.0: what eyes without one kind of cones make of linear RGB."""
Lab = tuple[float, float, float]


def to_linear(color: str) -> list[float]:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def to_lab(linear: list[float]) -> Lab:
    r, g, b = (min(1.0, max(0.0, part)) for part in linear)

    def f(t: float) -> float:
        return t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116

    x = f((0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505)
    y = f(0.2126 * r + 0.7152 * g + 0.0722 * b)
    z = f((0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def see(color: str, eyes: str) -> Lab:
    linear = to_linear(color)
    return to_lab([sum(m * c for m, c in zip(row, linear, strict=True)) for row in EYES[eyes]])


def get_luminance(color: str) -> float:
    return sum(part * share for part, share in zip(to_linear(color), (0.2126, 0.7152, 0.0722), strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_colour_of_one_palette_is_in_the_other(scheme: str) -> None:
    everything, policies, states = SCHEMES[scheme]
    assert not set(policies.values()) & set(states.values())
    nearest = min(
        math.dist(see(one, "usual"), see(other, "usual"))
        for one in policies.values()
        for other in states.values()
    )
    assert nearest > 12  # nobody takes one for the other
    assert len(set(everything.values())) == len(everything)


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_colours_of_one_picture_are_apart_for_all_eyes(scheme: str, eyes: str) -> None:
    _, policies, states = SCHEMES[scheme]
    turns, blocks = (
        [states[name] for name in names] for names in (STATES_LIGHT.keys() - {*BLOCK_STATES}, BLOCK_STATES)
    )
    for picture in (policies.values(), turns, blocks):
        for one, other in itertools.combinations(picture, 2):
            assert math.dist(see(one, eyes), see(other, eyes)) >= 25, (one, other)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_colour_stands_out_from_the_page(scheme: str) -> None:
    everything, policies, states = SCHEMES[scheme]
    page = get_luminance(everything["bg"])
    for name, color in {**policies, **states}.items():
        low, high = sorted((page, get_luminance(color)))
        assert name == "free" or (high + 0.05) / (low + 0.05) >= 3, name


def test_both_schemes_have_the_same_names() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert {*BLOCK_STATES} < STATES_LIGHT.keys() == STATES_DARK.keys()

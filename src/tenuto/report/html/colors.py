"""The page's colours, in a light and a dark scheme: one palette for policies, another for states.

Within a palette any two colours differ by 25 or more (CIELAB) for usual and for colour-blind eyes, by the
model of G. Machado and others, "A Physiologically-based Model for Simulation of Color Vision Deficiency"
(2009). Each stands out from its background by 3 to 1; `free` is quiet on purpose. No colour is in both
palettes. The tests check all of this.
"""

from __future__ import annotations

POLICIES_LIGHT = {
    "p0": "#888f97", "p1": "#2095df", "p2": "#d47a1c", "p3": "#005540",
    "p4": "#780174", "p5": "#8f642d", "p6": "#5e00c3",
}  # fmt: skip
POLICIES_DARK = {
    "p0": "#7c7c7c", "p1": "#79d4fa", "p2": "#f84b00", "p3": "#98c699",
    "p4": "#b740b1", "p5": "#f1e079", "p6": "#a446ee",
}  # fmt: skip

TURN_STATES = ("queue", "wait", "prefill", "decode", "tool", "failed")
BLOCK_STATES = ("running", "leased", "cached", "free", "host", "disk")
"""The states of turns and those of blocks are never in one picture."""
STATES_LIGHT = {
    "queue": "#a98c07", "wait": "#850ea9", "prefill": "#7a2b00", "decode": "#199dba", "tool": "#464658",
    "failed": "#e0666b", "running": "#316077", "leased": "#f45b17", "cached": "#4d4920", "free": "#c3c9d0",
    "host": "#8e5cf7", "disk": "#a48b6f",
}  # fmt: skip
STATES_DARK = {
    "queue": "#f3da9f", "wait": "#bb73fc", "prefill": "#d75e67", "decode": "#3189a8", "tool": "#bed4e1",
    "failed": "#df2220", "running": "#3ff7fa", "leased": "#c84d1a", "cached": "#d3e99d", "free": "#4a535d",
    "host": "#0485ff", "disk": "#a5866c",
}  # fmt: skip

LIGHT = {
    "fg": "#1b1f24", "soft": "#59626c", "grid": "#d5d9de", "bg": "#fefefe", "link": "#0062a3",
    **POLICIES_LIGHT, **STATES_LIGHT,
}  # fmt: skip
DARK = {
    "fg": "#e8ebee", "soft": "#a9b2bc", "grid": "#3a424b", "bg": "#14181d", "link": "#7cc0f5",
    **POLICIES_DARK, **STATES_DARK,
}  # fmt: skip
"""The same names; every colour of LIGHT is different, as the page tells them apart by it."""

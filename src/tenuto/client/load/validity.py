"""Whether the figures of a run describe the server, or the delays of the client or of a simulated server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from tenuto.client.servers.scrape import Totals
from tenuto.records.metrics import get_percentile
from tenuto.records.schema import TurnRecord

MAX_SHARE = 0.05
"""Delays may be this share of the time to first token. With more, the figures are INVALID."""
FLOOR_S = 0.01
"""Delays up to this number of seconds never spoil figures. On a simulated server: simulated seconds."""
_LAG = "tenuto:sim_lag_seconds"


@dataclass(frozen=True, slots=True)
class SimulatedServer:
    """What a simulated server says about itself."""

    speed: float
    """Simulated seconds per real second."""
    mean_lag_s: float | None
    """Real seconds by which its tokens came later than the simulated machine would have sent them."""


def read_simulated_server(speed: float | None, growth: Totals | None) -> SimulatedServer | None:
    """The lag during a run; None for a real server. `growth`: of the server's metrics."""
    if speed is None:
        return None
    total_s, count = (growth or {}).get(f"{_LAG}_sum"), (growth or {}).get(f"{_LAG}_count")
    return SimulatedServer(speed, total_s / count if total_s is not None and count else None)


def find_invalid(
    done: Iterable[TurnRecord], loop_lags_s: Sequence[float], server: SimulatedServer | None
) -> tuple[str, ...]:
    """Return why the figures do not describe the server, one sentence each. `done`: the answered turns."""
    pairs = [
        (turn.ttft_s, turn.ttft_s - max(0.0, turn.lag_s))
        for turn in done
        if turn.ttft_s is not None and turn.lag_s is not None
    ]
    if not pairs:
        return ()
    floor_s = FLOOR_S / (server.speed if server else 1.0)
    seen_s, without_s = [seen for seen, _ in pairs], [without for _, without in pairs]
    reasons = []
    for name, one, other in (
        ("the mean", fmean(seen_s), fmean(without_s)),
        ("P95", get_percentile(seen_s, 95), get_percentile(without_s, 95)),
    ):
        if _spoils(one - other, one, floor_s):
            reasons.append(
                f"this client sent turns late: {name} of TTFT is {_ms(one)}, without its own delay "
                f"{_ms(other)}. Its machine is too busy, with the server or with others"
            )
            break
    mean_s = fmean(seen_s)
    if loop_lags_s and _spoils(late_s := fmean(loop_lags_s), mean_s, floor_s):
        reasons.append(
            f"this client read answers late, by {_ms(late_s)} in the mean at a TTFT of {_ms(mean_s)}. Its "
            "machine is too busy, with the server or with others"
        )
    if server and server.mean_lag_s is not None and _spoils(server.mean_lag_s, mean_s, floor_s):
        reasons.append(
            f"the simulated server was late, by {_ms(server.mean_lag_s)} in the mean at a TTFT of "
            f"{_ms(mean_s)}. Its machine is too busy, or too slow for --speed {server.speed:g}"
        )
    return tuple(reasons)


def _spoils(delay_s: float, whole_s: float, floor_s: float) -> bool:
    return delay_s > floor_s and delay_s > MAX_SHARE * whole_s


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"

"""Steady or overloaded: told from queueing systems whose capacity is known."""

from __future__ import annotations

import heapq
import random

import pytest

from tenuto.sim.steady import Settling, Verdict, find_warm_up, fit_trend, look


def serve(load: float, num_jobs: int, seed: int, num_servers: int = 1) -> tuple[list[float], list[float]]:
    """Arrivals and ends of an M/M/c queue whose servers finish one job a second together."""
    rng = random.Random(seed)
    free_s = [0.0] * num_servers
    now_s, arrivals_s, ends_s = 0.0, [], []
    for _ in range(num_jobs):
        now_s += rng.expovariate(load)
        end_s = max(now_s, heapq.heappop(free_s)) + rng.expovariate(1 / num_servers)
        heapq.heappush(free_s, end_s)
        arrivals_s.append(now_s)
        ends_s.append(end_s)
    return arrivals_s, sorted(ends_s)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("load", [0.1, 0.5, 0.8])
def test_a_system_below_its_capacity_is_never_growing(load: float, seed: int) -> None:
    arrivals_s, ends_s = serve(load, 3000, seed)
    states = [look(arrivals_s, ends_s, share * arrivals_s[-1]).state for share in (0.1, 0.2, 0.4, 0.7, 1.0)]
    assert "growing" not in states
    assert "steady" in states[2:]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("load", [1.2, 1.5, 2.0, 4.0])
def test_a_system_above_its_capacity_is_growing(load: float, seed: int) -> None:
    arrivals_s, ends_s = serve(load, 3000, seed)
    for share in (0.4, 0.7) if load > 1.2 else (0.7,):
        assert look(arrivals_s, ends_s, share * arrivals_s[-1]).state != "steady"
    last = look(arrivals_s, ends_s, arrivals_s[-1])
    assert last.state == "growing"
    assert last.finished_jps == pytest.approx(1.0, rel=0.15)
    assert last.offered_jps == pytest.approx(load, rel=0.15)


def test_a_system_that_still_fills_is_not_growing() -> None:
    """Many servers, each slow: until the first jobs leave, the backlog only grows."""
    arrivals_s, ends_s = serve(0.7, 3000, 1, num_servers=50)
    states = [look(arrivals_s, ends_s, now_s).state for now_s in (10, 30, 60, 100, 150, 250, 400)]
    assert "growing" not in states
    assert look(arrivals_s, ends_s, 2000).state == "steady"


def settle(arrivals_s: list[float], ends_s: list[float]) -> Verdict:
    """The verdict on a system that is watched for 600 to about 2,000 jobs; the mean service is 1 s."""
    settling = Settling(first_look_s=12.0, max_jobs=2000, shortest_s=arrivals_s[599])
    verdict = None
    while verdict is None:
        verdict = settling.decide(arrivals_s, ends_s, settling.next_look_s)
    return verdict


@pytest.mark.parametrize("num_servers", [1, 8])
@pytest.mark.parametrize(("load", "fewest", "most"), [(0.9, 40, 40), (1.1, 0, 10), (1.2, 0, 0)])
def test_how_often_a_system_counts_as_steady(load: float, fewest: int, most: int, num_servers: int) -> None:
    verdicts = [settle(*serve(load, 4000, seed, num_servers)) for seed in range(40)]
    assert fewest <= verdicts.count("steady") <= most


def serve_together(arrivals_per_s: float, num_jobs: int, seed: int) -> tuple[list[float], list[float]]:
    """Arrivals and ends where all jobs run at once and slow each other down; at most 16 a second end."""
    rng = random.Random(seed)
    now_s, num_open, arrivals_s, ends_s = 0.0, 0, [], []
    while len(arrivals_s) < num_jobs:
        ends_per_s = 16 * num_open / (num_open + 12)
        now_s += rng.expovariate(arrivals_per_s + ends_per_s)
        is_arrival = rng.random() * (arrivals_per_s + ends_per_s) < arrivals_per_s
        num_open += 1 if is_arrival else -1
        (arrivals_s if is_arrival else ends_s).append(now_s)
    return arrivals_s, ends_s


def test_a_system_that_fills_for_many_times_the_time_of_a_job_is_not_overloaded() -> None:
    verdicts = [settle(*serve_together(14.5, 6000, seed)) for seed in range(40)]
    assert verdicts.count("overloaded") <= 1
    assert verdicts.count("steady") >= 20


def test_the_warm_up_is_cut() -> None:
    rng = random.Random(2)
    values = [min(n / 40, 1.0) * 10 + rng.gauss(0, 0.5) for n in range(200)]
    assert 30 <= find_warm_up(values) <= 60
    assert find_warm_up([float(n) for n in range(200)]) == 100


def test_the_trend_of_a_line() -> None:
    growth, error = fit_trend([3.0 + 0.5 * n for n in range(200)])
    assert growth == pytest.approx(100.0)
    assert error == pytest.approx(0.0, abs=1e-9)

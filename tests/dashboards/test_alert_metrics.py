"""What the alerts look at moves when what they warn of happens, and not before.

promtool checks the rules themselves, on made-up series (`alerts_test.yml`). Here the exporter makes the
series.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from tenuto.core.jobs import UNVERIFIED
from tenuto.core.limits import Limits
from tenuto.core.policy import Policy
from tenuto.core.requests import Hints
from tenuto.core.types import Decision, EngineView, Keep, Release, ToolCall, Turn
from tenuto.vllm.metrics import NUM_TENANTS, Metrics
from tests.dashboards.promql import find_uses
from tests.dashboards.test_dashboards import RULES
from tests.support.toy_engine import ToyEngine, make_tokens


@dataclass
class Switchable(Policy):
    """Keeps for a long time, or not, or fails."""

    how: str = "keep"

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        if self.how == "fail":
            raise RuntimeError("on purpose")
        return Keep(view.now_s + 600) if self.how == "keep" else Release()


class Server:
    """An engine, and the metrics it exports."""

    def __init__(self, *, tenant_labels: bool = True, **limits: Any) -> None:
        config = SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="tiny"),
            additional_config={"tenuto": {"tenant_labels": tenant_labels}},
        )
        self.metrics = Metrics(config, 0)
        self.policy = Switchable()
        self.engine = ToyEngine(self.policy, 1000, limits=Limits(**limits))
        # The engine's driver counts into its own statistics; the exporter shows the same ones.
        self.engine.driver.stats.tool_s = self.metrics.stats.tool_s
        self.metrics.stats = self.engine.driver.stats
        self.num_turns = 0
        self.now_s = 0.0

    def serve(self, tenant: str | None = None) -> None:
        turn_id = self.arrive(tenant)
        while self.engine.start_first(self.now_s) not in (turn_id, None):
            pass
        self.engine.finish(turn_id, self.now_s, tool=ToolCall("ls"))

    def arrive(self, tenant: str | None = None) -> str:
        self.num_turns += 1
        self.now_s += 0.1
        turn_id = f"t{self.num_turns}"
        hints = Hints(job_id=f"{tenant}\t{turn_id}", tenant=tenant)
        self.engine.arrive(turn_id, self.now_s, make_tokens(100 * self.num_turns, 18), [1, 2, 3], hints)
        return turn_id

    def read(self) -> dict[str, float]:
        """All samples by name, labels but the engine's own in braces."""
        self.metrics.refresh(self.engine.driver, self.now_s, idle=True)
        samples = {}
        for family in self.metrics._registry.collect():
            for sample in family.samples:
                more = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                name = f"{sample.name}{{{','.join(f'{k}={v}' for k, v in more.items())}}}" if more else None
                samples[name or sample.name] = sample.value
        return samples


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.metrics.close()


def get_rule(name: str) -> str:
    [expression] = [rule["expr"] for rule in RULES if rule["alert"] == name]
    return str(expression)


def get_thresholds(name: str) -> dict[str, float]:
    """Each metric of an alert, with the number that it, or an expression of it, is compared with."""
    pattern = r"(tenuto:\w+)[^<>=]*?(?:[<>]=?|==)\s*([\d.]+)"
    return {metric: float(number) for metric, number in re.findall(pattern, get_rule(name))}


def count(samples: dict[str, float], prefix: str) -> float:
    return sum(value for name, value in samples.items() if name.split("{")[0] == prefix)


def test_faults_of_the_policy_are_seen(server: Server) -> None:
    server.serve()
    assert count(server.read(), "tenuto:policy_faults_total") == 0
    server.policy.how = "fail"
    server.serve()
    assert count(server.read(), "tenuto:policy_faults_total") == 1
    assert find_uses(get_rule("TenutoPolicyFaults")).matched.keys() == {"tenuto:policy_faults_total"}


def test_what_other_jobs_share_is_not_kept_for_jobs_that_return(server: Server) -> None:
    engine, used = server.engine, find_uses(get_rule("TenutoComputesAgain")).matched
    assert used.keys() == {f"tenuto:{name}_tokens_total" for name in ("reused", "reusable", "recomputed")}

    def serve(job: str) -> list[float]:
        server.num_turns += 1
        engine.arrive(f"t{server.num_turns}", 1.0, make_tokens(0, 18), [1], Hints(job_id=job, tool="ls"))
        engine.finish(engine.start_first(1.0) or "", 1.0)
        samples = server.read()
        return [samples[f"tenuto:{name}_tokens_total"] for name in ("hit", "reused", "reusable")]

    serve("a")
    hit, *own = serve("b")
    assert hit > 0 and own == [0, 0], "b has a's prompt, and none has returned"
    assert serve("a") == [2 * hit, hit, hit]
    engine.reset()
    assert serve("a") == [2 * hit, hit, 2 * hit]


def test_a_long_wait_is_seen_and_ends(server: Server) -> None:
    assert server.read()["tenuto:oldest_waiting_timestamp_seconds"] == 0
    turn_id = server.arrive()
    server.arrive()
    server.now_s += 130
    wait_s = time.time() - server.read()["tenuto:oldest_waiting_timestamp_seconds"]
    assert wait_s == pytest.approx(130.1, abs=5)
    assert "oldest_waiting_timestamp_seconds > 0) > 120" in get_rule("TenutoTurnWaitsLong")
    assert server.engine.start_first(server.now_s) == turn_id
    server.engine.start_first(server.now_s)
    assert server.read()["tenuto:oldest_waiting_timestamp_seconds"] == 0


def test_the_end_of_leasing_is_seen(server: Server) -> None:
    for _ in range(5):
        server.serve()
    before = server.read()
    server.policy.how = "release"
    for _ in range(12):
        server.serve()
    after = server.read()
    assert find_uses(get_rule("TenutoLeasingStopped")).matched.keys() == {
        "tenuto:leases_granted_total",
        "tenuto:lease_refusals_total",
    }
    assert after["tenuto:leases_granted_total"] == before["tenuto:leases_granted_total"] == 5
    grown = count(after, "tenuto:lease_refusals_total") - count(before, "tenuto:lease_refusals_total")
    assert grown == 12 > get_thresholds("TenutoLeasingStopped")["tenuto:lease_refusals_total"]


def test_a_tenant_that_holds_most_is_seen_once_there_is_another(server: Server) -> None:
    thresholds = get_thresholds("TenutoOneTenantHoldsMost")
    assert (thresholds["tenuto:largest_tenant_share"], thresholds["tenuto:active_tenants"]) == (0.8, 1)
    for _ in range(80):
        server.serve("hoarder")
    alone = server.read()
    assert (alone["tenuto:largest_tenant_share"], alone["tenuto:active_tenants"]) == (1, 1)
    server.serve("other")
    both = server.read()
    assert both["tenuto:largest_tenant_share"] == pytest.approx(80 / 81)
    assert both["tenuto:active_tenants"] == 2
    assert both["tenuto:retained_blocks"] / both["tenuto:kv_blocks"] > thresholds["tenuto:retained_blocks"]
    assert both["tenuto:tenant_leased_blocks{tenant=hoarder}"] == 400
    assert both["tenuto:tenant_leased_blocks{tenant=other}"] == 5


def test_the_number_of_series_is_bounded_and_tenants_that_leave_vanish(server: Server) -> None:
    for number in range(30):
        for _ in range(2 if number == 7 else 1):
            server.serve(f"tenant{number}")
    server.serve(None)
    shown = {name: value for name, value in server.read().items() if "tenant_leased_blocks" in name}
    assert len(shown) == NUM_TENANTS + 1
    assert shown["tenuto:tenant_leased_blocks{tenant=tenant7}"] == 10
    assert sum(shown.values()) == 5 * 32
    server.engine.driver.drop_all(server.now_s)
    server.serve(None)
    shown = {name: value for name, value in server.read().items() if "tenant_leased_blocks" in name}
    assert shown == {"tenuto:tenant_leased_blocks{tenant=(none)}": 5}


def test_a_tenant_named_like_a_label_of_tenuto_s_counts_among_the_others(server: Server) -> None:
    for tenant in (None, "(none)", "(others)", *(f"tenant{number}" for number in range(NUM_TENANTS))):
        server.serve(tenant)
        samples = server.read()
    for metric in ("tenant_leased_blocks", "tenant_tokens_total"):
        shown = {name: value for name, value in samples.items() if f"tenuto:{metric}" in name}
        assert {name.partition("tenant=")[2].split(",")[0].rstrip("}") for name in shown} == {
            "(none)", "(others)", *(f"tenant{number}" for number in range(NUM_TENANTS - 1)),
        }  # fmt: skip
    assert samples["tenuto:tenant_leased_blocks{tenant=(none)}"] == 5
    assert samples["tenuto:tenant_leased_blocks{tenant=(others)}"] == 15


def test_without_the_setting_no_tenant_is_named() -> None:
    server = Server(tenant_labels=False)
    for tenant in ("ann", "bob", UNVERIFIED, None):
        server.serve(tenant)
    shown = {name: value for name, value in server.read().items() if "tenant_leased_blocks" in name}
    metric = "tenuto:tenant_leased_blocks"
    labels = {"(none)": 5, UNVERIFIED: 5, "(others)": 10}
    assert shown == {f"{metric}{{tenant={name}}}": value for name, value in labels.items()}
    server.metrics.close()


def test_overdue_turns_are_counted() -> None:
    server = Server()
    server.engine.driver.decided.num_overdue_turns += 3
    assert server.read()["tenuto:overdue_turns_total"] == 3
    server.metrics.close()

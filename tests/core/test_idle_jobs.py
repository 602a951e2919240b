"""Idle jobs: which is forgotten first, and that a tenant's many ids cost others nothing."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from tenuto.core.jobs import IdleJobs
from tenuto.core.limits import Limits
from tenuto.core.requests import Hints
from tenuto.core.types import LeaseEnd, ToolCall
from tests.support.small_policies import KeepFor
from tests.support.toy_engine import ToyEngine, make_tokens


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40))
def test_the_first_to_forget_is_the_oldest_of_the_tenant_with_most(changes: list[tuple[bool, int]]) -> None:
    idle, model = IdleJobs(), {}
    for adds, number in changes:
        job_id, tenant = f"j{number}", "ab"[number % 2] if number else None
        model.pop(job_id, None)
        if adds:
            model[job_id] = tenant or ""
            idle.add(job_id, tenant)
        else:
            idle.discard(job_id, tenant)
        counts = Counter(model.values())
        most = max(counts.values(), default=0)
        # Of several tenants with as many jobs, any may lose one.
        oldest = {
            next(each for each in model if model[each] == name) for name in counts if counts[name] == most
        }
        assert idle.get_first_to_forget() in (oldest or {None})
        assert set(idle) == set(model)
        assert len(idle) == len(model)


def test_tenants_without_idle_jobs_take_no_memory() -> None:
    idle = IdleJobs()
    tracemalloc.start()
    for number in range(20_000):
        idle.add(f"j{number}", f"tenant {number}")
        if number < 10_000:
            idle.get_first_to_forget()
        idle.discard(f"j{number}", f"tenant {number}")
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(idle) == 0
    assert num_bytes < 100_000


def test_a_thousand_ids_of_one_tenant_do_not_end_the_leases_of_another() -> None:
    engine = ToyEngine(KeepFor(ttl_s=600), 100_000, limits=Limits(max_remembered_jobs=100))

    def run(name: str, tenant: str, number: int) -> None:
        hints = Hints(job_id=f"{tenant}\t{name}", tenant=tenant)
        engine.arrive(name, number, make_tokens(100 * number, 18), [1], hints)
        engine.start_first(number)
        engine.finish(name, number, tool=ToolCall("ls"))

    for number in range(10):
        run(f"agent{number}", "agents", number)
    for number in range(10, 400):
        run(f"fresh{number}", "flood", number)
    assert sum(lease.tenant == "agents" for lease in engine.driver.leases) == 10
    assert len(engine.driver.leases) == 100
    assert engine.driver.stats.num_leases_ended[LeaseEnd.FORGOTTEN] == 300

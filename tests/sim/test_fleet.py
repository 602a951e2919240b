"""A simulated fleet: one engine of it is exactly the simulator's, and no fault loses a turn."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from tenuto.core.errors import ConfigError
from tenuto.records.schema import TurnRecord
from tenuto.sim.run import Extras, Outcome, prepare, run
from tenuto.sim.setup import Fleet, Setup, read_servers, write_servers
from tenuto.workload import Job, LoadOptions, Span, TurnSpec, Workload

SMALL = Setup(step_cost="roofline", kv_tokens=100_000, host_gb=0.0, offload="none")
LOAD = LoadOptions(jps=3.0, window_s=8.0, seed=3)


def simulate(router: str = "sticky-least-loaded", load: LoadOptions = LOAD, **fleet: object) -> Outcome:
    fleet = {"servers": ("",) * 3, **fleet}
    setup = dataclasses.replace(SMALL, policy="stock", fleet=Fleet(router=router, **fleet))  # type: ignore[arg-type]
    return run(setup, load, extras=Extras(strict=True))


def check_served_once(outcome: Outcome) -> None:
    """Each turn of the workload has exactly one record, jobs go on in order, and no turn starts too early."""
    wanted = {(job.job_id, number + 1) for job in outcome.workload.jobs for number in range(len(job.turns))}
    assert Counter((turn.job, turn.turn) for turn in outcome.turns) == Counter(wanted)
    ends: dict[str, float] = {}
    for turn in sorted(outcome.turns, key=lambda turn: (turn.job, turn.turn)):
        assert turn.start_s is not None and turn.last_token_s is not None
        assert ends.get(turn.job, 0.0) <= turn.due_s <= turn.start_s
        ends[turn.job] = turn.last_token_s


def without_engine(turns: list[TurnRecord]) -> list[TurnRecord]:
    return [dataclasses.replace(turn, engine=None) for turn in turns]


@pytest.mark.parametrize(
    ("policy", "workload", "hints"),
    [("stock", "ab8", "last"), ("tenuto", "ab8", "last"), ("tenuto", "bfcl", "none")],
)
def test_a_fleet_of_one_is_the_engine_itself(policy: str, workload: str, hints: str) -> None:
    """To the last bit of every time: with quiet stretches, leases that expire, ticks, and loads from host."""
    setup = Setup(step_cost="roofline", kv_tokens=40_000, policy=policy)
    load = LoadOptions(workload=workload, jps=2.5, window_s=6.0, seed=5, hints=hints)
    alone = run(setup, load)
    fleet = run(dataclasses.replace(setup, fleet=Fleet(servers=("",), router="random")), load)
    assert without_engine(fleet.turns) == alone.turns
    assert {turn.engine for turn in fleet.turns} == {"0"}
    assert fleet.record["itl_s"] == alone.record["itl_s"]
    assert alone.record["fleet" if "fleet" in alone.record else "kind"] == "run", "no word of a fleet"
    assert "engine" not in alone.turns[0].to_json()


@pytest.mark.parametrize("servers", [("H100", "A100-40"), ("A100-40", "H100", "A100-40")])
def test_rough_step_times_of_one_engine_are_said_of_all(servers: tuple[str, ...]) -> None:
    pytest.importorskip("aiconfigurator_core")
    setup = Setup(policy="stock", fleet=Fleet(servers=servers, router="random"))
    record = run(setup, LoadOptions(workload="requests", jps=3.0, window_s=4.0)).record
    assert record["step_cost"] == "roofline, tables"
    (note,) = (each for each in record["notes"] if "roofline" in each)
    assert note.startswith("step times on A100-40 are a roofline's")


@pytest.mark.parametrize("router", ["random", "kv-aware", "least-loaded", "tenuto", "ideal"])
def test_routers_serve_every_turn_once_and_twice_the_same(router: str) -> None:
    outcome = simulate(router)
    check_served_once(outcome)
    engines = outcome.record["fleet"]["engines"]
    assert sum(engine["turns"] for engine in engines) == len(outcome.turns)
    assert outcome.record["policy"] == f"stock@{router}"
    assert outcome.record["gpu"] == "3xH100"
    assert simulate(router).turns == outcome.turns


def test_sticky_jobs_recompute_nothing_and_dealt_out_ones_do() -> None:
    sticky, dealt = simulate("sticky-least-loaded"), simulate("round-robin")
    assert sticky.record["recomputed_tokens"] == 0
    assert dealt.record["recomputed_tokens"] > 0.2 * dealt.record["prompt_tokens"]
    assert all(
        len({t.engine for t in sticky.turns if t.job == job}) == 1 for job in {t.job for t in sticky.turns}
    )
    assert sticky.record["fleet"]["moves"] == 0 < dealt.record["fleet"]["moves"]


def test_one_queue_and_all_kv_is_at_least_as_good_as_routing_blindly() -> None:
    ideal = simulate("ideal").record
    assert ideal["recomputed_tokens"] == 0
    assert ideal["job_s"]["mean"] < simulate("random").record["job_s"]["mean"]


def test_engines_of_the_yardstick_that_find_no_room_wait_for_others() -> None:
    setup = dataclasses.replace(SMALL, kv_tokens=12_000, fleet=Fleet(servers=("",) * 3, router="ideal"))
    outcome = run(setup, LOAD)
    check_served_once(outcome)
    assert outcome.record["preemptions"] > 0


@pytest.mark.parametrize("router", ["sticky-least-loaded", "tenuto", "cache-aware", "consistent-hash"])
def test_faults_lose_no_turn_and_serve_none_twice(router: str) -> None:
    faults = (
        "die:0@3",
        "drain:1@4",
        "join@4.5",
        "restart@5.3",
        "join:L40S@6",
        "die:1@7",
        "restart@8.1",
        "die:3@9",
    )
    outcome = simulate(router, LoadOptions(jps=14.0, window_s=4.0, seed=3), faults=faults)
    check_served_once(outcome)
    by_name = {engine["name"]: engine for engine in outcome.record["fleet"]["engines"]}
    assert sorted(by_name) == ["0", "1", "2", "3", "4"]
    assert by_name["0"]["died"] and by_name["1"]["died"] and not by_name["2"]["died"]
    assert by_name["4"]["speed"] < 0.6 < by_name["3"]["speed"] == 1.0
    assert all((turn.last_token_s or 0) <= 3.0 for turn in outcome.turns if turn.engine == "0")
    again = [turn for turn in outcome.turns if turn.failures]
    assert again
    for turn in again:
        assert turn.sent_s == turn.failures[0].sent_s
        assert turn.failures[-1].failed_s <= (turn.start_s or 0)
    assert {"engine 0 died", "the router restarted"} <= {f.detail for t in again for f in t.failures}


def test_an_engine_that_drains_finishes_what_it_has_and_its_jobs_go_on_elsewhere() -> None:
    outcome = simulate(faults=("drain:0@3",))
    check_served_once(outcome)
    assert all(turn.due_s <= 3.0 for turn in outcome.turns if turn.engine == "0")
    assert not any(turn.failures for turn in outcome.turns)


@pytest.mark.parametrize("router", ["sticky-least-loaded", "tenuto", "cache-aware", "consistent-hash"])
def test_engines_that_died_or_drained_come_back_under_their_names(router: str) -> None:
    faults = ("die:0@2.5", "rejoin:0@3", "drain:1@3.5", "rejoin:1@4")
    outcome = simulate(router, LoadOptions(jps=6.0, window_s=6.0, seed=3), faults=faults)
    check_served_once(outcome)
    engines = outcome.record["fleet"]["engines"]
    assert [(engine["name"], engine["died"]) for engine in engines] == [
        ("0", True),
        ("1", False),
        ("2", False),
    ]
    assert sum(engine["turns"] for engine in engines) == len(outcome.turns)
    assert {turn.engine for turn in outcome.turns if turn.due_s > 4.0} == {"0", "1", "2"}
    assert not any(2.5 < turn.due_s < 3.0 for turn in outcome.turns if turn.engine == "0")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("rejoin:0@1", "died or drained"),
        ("rejoin:9@1", "died or drained"),
        ("rejoin@1", "name an engine"),
    ],
)
def test_only_an_engine_that_left_can_rejoin(fault: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(faults=(fault,))


def test_turns_wait_for_an_engine_and_a_fleet_without_one_says_so() -> None:
    outcome = simulate("tenuto", servers=("",), faults=("die:0@2", "join@5"))
    check_served_once(outcome)
    assert {turn.engine for turn in outcome.turns} == {"0", "1"}
    with pytest.raises(ConfigError, match="no engine takes turns"):
        simulate(servers=("",), faults=("die:0@2",))
    for router in ("tenuto", "least-loaded"):  # the second reads metrics as long as that can help
        with pytest.raises(ConfigError, match="no engine takes turns"):
            simulate(router, servers=("", ""), faults=("drain:0@1", "drain:1@1"))
    with pytest.raises(ConfigError, match="no engine '7'"):
        simulate(faults=("die:7@1",))


def write_router(folder: Path, *lines: str) -> str:
    """A router with these lines in its `route`. Returns its name."""
    head = ["from tenuto.core.router import *", "@dataclass", "class Own(Router):"]
    body = ["    def route(self, turn, fleet):", *(f"        {line}" for line in lines)]
    (folder / "own.py").write_text("\n".join([*head, *body, ""]))
    return f"{folder / 'own.py'}:Own"


def test_faults_of_a_router_before_its_restart_are_counted(tmp_path: Path) -> None:
    fleet = Fleet(servers=("", ""), router=write_router(tmp_path, "raise ValueError"), faults=("restart@60",))
    outcome = run(dataclasses.replace(SMALL, policy="stock", fleet=fleet), LOAD)
    record = outcome.record["fleet"]
    assert record["router_faults"] >= record["sent"] == len(outcome.turns) > 0


def test_a_turn_whose_engine_dies_while_its_kv_is_copied_there_waits_for_another(tmp_path: Path) -> None:
    router = write_router(
        tmp_path,
        "others = [name for name in fleet.engines if name != turn.engine]",
        "return Send(others[0], turn.engine) if others else Send(turn.engine)",
    )
    faults = ("die:0@6", "die:1@6.01", "rejoin:0@20")
    outcome = simulate(router, servers=("", ""), copy_gb_s=0.05, faults=faults)
    check_served_once(outcome)
    assert outcome.record["fleet"]["copied_tokens"] > 0


def test_turns_are_short_enough_for_an_engine_that_joins() -> None:
    turns = (TurnSpec((Span("long", 100_000),), Span("out", 10)),)
    jobs = (Job("a", 0.0, (TurnSpec((Span("a", 100),), Span("a/out", 1)),)), Job("b", 5.0, turns))
    extras = Extras(workload=Workload("w", (*jobs, dataclasses.replace(jobs[1], job_id="c"))))
    fleet = Fleet(servers=("",), router="round-robin", faults=("join:RTX5090@4",))
    outcome = run(Setup(step_cost="roofline", policy="stock", fleet=fleet), LOAD, extras=extras)
    check_served_once(outcome)
    assert ([turn.job for turn in outcome.turns], outcome.record["turns"]["refused"]) == (["a"], 2)


def test_a_hot_tenant_does_not_starve_others() -> None:
    """Engines that are full: a tenant with twenty jobs at once, and one with a single job a bit later."""

    def make_job(name: str, arrival_s: float, tenant: str) -> Job:
        prompt = (Span(f"{name}/task", 9000),)
        first = TurnSpec(prompt, Span(f"{name}/out", 50), tool="x", tool_s=0.5)
        return Job(
            name,
            arrival_s,
            (first, TurnSpec((*prompt, Span(f"{name}/t", 900)), Span(f"{name}/o", 50))),
            tenant,
        )

    jobs = [make_job(f"hot{n}", 0.01 * n, "hot") for n in range(30)] + [make_job("cold", 1.0, "cold")]
    setup = dataclasses.replace(SMALL, kv_tokens=25_000, policy="stock", fleet=Fleet(servers=("", "")))
    outcome = run(setup, LOAD, extras=Extras(workload=Workload("w", tuple(jobs)), strict=True))
    times_s = outcome.record["job_times_s"]
    assert outcome.record["fleet"]["held"] > 10
    assert times_s["cold"] < 0.4 * max(times_s.values())


def test_kv_can_be_copied_where_engines_are_linked() -> None:
    load = LoadOptions(jps=16.0, window_s=5.0, seed=3)
    linked = simulate("tenuto", load, copy_gb_s=50.0).record
    assert linked["fleet"]["copied_tokens"] > 0
    assert linked["fleet"]["copied_tokens"] <= linked["fleet"]["moved_tokens"]
    assert linked["recomputed_tokens"] < simulate("tenuto", load).record["recomputed_tokens"]


def test_unlike_engines_get_work_by_their_speed() -> None:
    outcome = simulate("tenuto", servers=("H100", "L40S"), load=LoadOptions(jps=3.0, window_s=12.0))
    fast, slow = outcome.record["fleet"]["engines"]
    assert outcome.record["gpu"] == "1xH100+1xL40S"
    assert fast["turns"] > 1.5 * slow["turns"] > 0


def test_events_grow_with_turns_and_not_with_engines() -> None:
    """The same jobs on four and on forty engines take about as many events."""

    def count(num_engines: int) -> int:
        calls = 0

        def watch(now_s: float, scheduler: object) -> None:
            nonlocal calls
            calls += 1

        setup = dataclasses.replace(SMALL, fleet=Fleet(servers=("",) * num_engines, router="round-robin"))
        run(dataclasses.replace(setup, policy="stock"), LOAD, watch=watch)
        return calls

    assert count(40) < 3 * count(4)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [("3", ("", "", "")), ("H100:2,l40s", ("H100", "H100", "L40S")), ("A100-80:1", ("A100-80",))],
)
def test_servers_are_a_number_or_a_list(text: str, gpus: tuple[str, ...]) -> None:
    assert read_servers(text) == read_servers(write_servers(gpus)) == gpus


@pytest.mark.parametrize("text", ["0", "-1", "", "H100:0", "H100:x", "nogpu:2", "99999", "2,", "1.5"])
def test_bad_servers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_servers(text)


@pytest.mark.parametrize("router", ["sticky-least-loaded", "kv-aware"])
def test_planning_quiet_steps_beyond_what_others_do_changes_nothing(router: str) -> None:
    """Engines that step one by one end up with the same times, to the last bit."""
    setup = dataclasses.replace(SMALL, policy="tenuto", fleet=Fleet(servers=("",) * 3, router=router))
    ends = []
    for fast_forwards in (True, False):
        simulation = prepare(setup, LoadOptions(jps=4.0, window_s=5.0, seed=3)).simulation
        for engine in simulation.engines:
            engine.fast_forwards = fast_forwards
        ends.append((simulation.run(), [engine.num_steps for engine in simulation.engines]))
    assert ends[0] == ends[1]

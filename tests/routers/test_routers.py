"""Where each router sends turns, computed by hand; and the contract that all of them keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tenuto.core.contracts import check_router
from tenuto.core.dispatcher import Dispatcher
from tenuto.core.errors import ConfigError, PolicyError
from tenuto.core.loader import ROUTERS, load_router
from tenuto.core.router import (
    Arrival,
    EngineInfo,
    EngineMetrics,
    EngineSeen,
    FleetView,
    Hold,
    Part,
    Route,
    RoutedTurn,
    Router,
    Send,
)
from tenuto.routers._prefixes import MEAN_PART_TOKENS, Prefixes
from tenuto.routers.tenuto import MAX_AWAY_S, Tenuto

SYSTEM = Part("system", 400)


def make_fleet(*num_open: int, **kwargs: float) -> FleetView:
    engines = {name: EngineSeen(EngineInfo(name), num) for name, num in zip("abcd", num_open, strict=False)}
    return FleetView(0.0, engines, **kwargs)


def make_turn(turn_id: str = "t", engine: str | None = None, parts: tuple[Part, ...] = ()) -> RoutedTurn:
    return RoutedTurn(turn_id, f"job-{turn_id}", 0.0, 1000, parts, engine=engine)


@pytest.mark.parametrize("name", ROUTERS.get_names())
def test_every_router_keeps_the_contract(name: str) -> None:
    check_router(load_router(name))
    assert ROUTERS.get_name(type(load_router(name))) == name


def test_random_spreads_turns_and_round_robin_deals_them_out() -> None:
    fleet = make_fleet(9, 0, 0, 0)
    router = load_router("random")
    counts = Counter(router.route(make_turn(str(n)), fleet) for n in range(400))
    assert len(counts) == 4
    assert min(counts.values()) > 60
    router = load_router("round-robin")
    dealt = []
    for n in range(5):
        answer = router.route(make_turn(str(n)), fleet)
        assert isinstance(answer, Send)
        router.on_turn_sent(make_turn(str(n)), answer.engine, 0.0)
        dealt.append(answer.engine)
    assert dealt == ["a", "b", "c", "d", "a"]


def test_least_loaded_by_its_own_count_or_by_metrics() -> None:
    engines = {
        "a": EngineSeen(EngineInfo("a"), 5, metrics=EngineMetrics(0.0, 1, 0, 0.1)),
        "b": EngineSeen(EngineInfo("b"), 2, metrics=EngineMetrics(0.0, 3, 3, 0.9)),
    }
    fleet = FleetView(0.0, engines)
    assert load_router("least-loaded").route(make_turn(), fleet) == Send("b")
    assert load_router("least-loaded", {"by_metrics": True}).route(make_turn(), fleet) == Send("a")


def test_power_of_two_never_takes_the_fullest_and_works_with_one_engine() -> None:
    router = load_router("power-of-two")
    counts = Counter(router.route(make_turn(str(n)), make_fleet(5, 1, 2, 9)) for n in range(200))
    assert Send("d") not in counts
    assert counts[Send("b")] > counts[Send("c")] > counts[Send("a")]
    assert router.route(make_turn(), make_fleet(7)) == Send("a")


def test_a_consistent_hash_moves_only_the_sessions_of_the_engine_that_left() -> None:
    router = load_router("consistent-hash")
    fleet = make_fleet(0, 0, 0, 0)
    for engine in fleet.engines.values():
        router.on_engine_joined(engine, 0.0)
    before = {n: router.route(make_turn(str(n)), fleet) for n in range(300)}
    router.on_engine_left("b", 0.0)
    after = {n: router.route(make_turn(str(n)), make_fleet(0)) for n in range(300)}
    moved = {n for n in before if before[n] != after[n]}
    assert moved == {n for n in before if before[n] == Send("b")}
    assert 30 < len(moved) < 130


def test_sticky_stays_whatever_the_load_is() -> None:
    router = load_router("sticky-least-loaded")
    assert router.route(make_turn(), make_fleet(3, 1)) == Send("b")
    assert router.route(make_turn(engine="a"), make_fleet(99, 0)) == Send("a")


def test_cache_aware_follows_the_prefix_until_loads_differ_too_much() -> None:
    router = load_router("cache-aware")
    own = (SYSTEM, Part("task", 300))
    router.on_turn_sent(make_turn(parts=own), "b", 0.0)
    turn = make_turn(parts=(*own, Part("tool", 300)))
    assert router.route(turn, make_fleet(0, 60)) == Send("b")
    assert router.route(turn, make_fleet(0, 65)) == Send("a"), "65 more than 0, and 65 > 1.5 · 0"
    assert router.route(turn, make_fleet(150, 215)) == Send("b"), "215 < 1.5 · 150"
    short = make_turn(parts=(Part("system", 200), Part("z", 800)))
    assert router.route(short, make_fleet(3, 5)) == Send("a"), "no match: the least loaded"
    few = load_router("cache-aware", {"smallest_tree": True})
    few.on_turn_sent(make_turn(parts=own), "a", 0.0)
    assert few.route(short, make_fleet(3, 5)) == Send("b"), "the least text"


def test_cache_aware_forgets_what_was_sent_longest_ago_and_engines_that_left() -> None:
    router = load_router("cache-aware", {"max_tree_tokens": 1000})
    first, second = (SYSTEM, Part("one", 500)), (SYSTEM, Part("two", 500))
    router.on_turn_sent(make_turn(parts=first), "b", 0.0)
    router.on_turn_sent(make_turn(parts=second), "b", 0.0)
    tree = router._prefixes  # type: ignore[attr-defined]
    assert tree.find(first) == {"b": 400}
    assert tree.find(second) == {"b": 900}
    assert tree.get_num_tokens("b") == 900
    router.on_engine_left("b", 0.0)
    assert tree.find(second) == {}
    assert tree._root.children == {}


def test_prompts_of_tiny_messages_are_forgotten_before_they_fill_the_memory() -> None:
    tree = Prefixes(10 * MEAN_PART_TOKENS)
    prompts = [[Part(f"{prompt}/{message}", 1) for message in range(4)] for prompt in range(5)]
    for parts in prompts:
        tree.add("a", parts)
    assert [tree.find(parts).get("a", 0) for parts in prompts] == [0, 0, 2, 4, 4]


def test_kv_aware_weighs_caches_against_what_the_engines_have_to_do() -> None:
    router = load_router("kv-aware")
    fleet = make_fleet(0, 0)
    cached = RoutedTurn("x", "x", 0.0, 1000, cached_tokens={"b": 900})
    assert router.route(cached, fleet) == Send("b")
    router.on_turn_sent(make_turn("1"), "b", 0.0)  # 1000 to compute, 1000 active
    assert router.route(cached, fleet) == Send("a"), "1000 + 1000 against 1000 + 100 + 1000 + 1000"
    router.on_first_token(make_turn("1"), "b", 0.0)
    assert router.route(cached, fleet) == Send("a"), "1000 + 1000 against 100 + 1000 + 1000"
    light = RoutedTurn("y", "y", 0.0, 3000, cached_tokens={"b": 2900})
    assert router.route(light, fleet) == Send("b"), "3000 + 3000 against 100 + 3000 + 1000"


def drive(
    dispatcher: Dispatcher, job: str, prompts: list[int], *, output: int = 10, now_s: float = 0.0
) -> str:
    """Run a whole job, one turn after the other. Returns the engine of its last turn."""
    engine = ""
    for number, num_tokens in enumerate(prompts):
        [sending] = dispatcher.arrive(Arrival(f"{job}/{number}", job, num_tokens), now_s)
        engine = sending.engine
        dispatcher.first_token(sending.turn_id, now_s)
        dispatcher.finish(sending.turn_id, now_s, output, is_last=number == len(prompts) - 1)
    return engine


def make_ours(speeds: dict[str, float], kv: int | None = None, **options: float) -> Dispatcher:
    dispatcher = Dispatcher(load_router("tenuto", options), strict=True)
    for name, speed in speeds.items():
        dispatcher.join(EngineInfo(name, speed, kv), 0.0)
    for number in range(10):
        drive(dispatcher, f"past{number}", [1000, 2000])
    return dispatcher


def send(dispatcher: Dispatcher, turn_id: str, job: str, num_tokens: int, parent: str | None = None) -> str:
    [sending] = dispatcher.arrive(Arrival(turn_id, job, num_tokens, parent=parent), 1.0)
    return sending.engine


def test_ours_gives_an_engine_work_by_its_speed() -> None:
    dispatcher = make_ours({"slow": 1.0, "fast": 3.0})
    sent = Counter(send(dispatcher, f"{n}", f"job{n}", 1000) for n in range(40))
    assert sent == {"fast": 30, "slow": 10}


def test_ours_expects_as_much_work_as_jobs_had_whose_prompts_begin_alike() -> None:
    dispatcher = Dispatcher(load_router("tenuto"), strict=True)
    for name in "ab":
        dispatcher.join(EngineInfo(name, 1.0, None), 0.0)
    parts = {"short": (Part("short", 400),), "long": (Part("long", 400),)}
    for number in range(20):
        for kind, num_turns in (("short", 1), ("long", 10)):
            for turn in range(num_turns):
                job = f"past {kind} {number}"
                [sending] = dispatcher.arrive(
                    Arrival(f"{job}/{turn}", job, 1000 * (turn + 1), parts=parts[kind]), 0.0
                )
                dispatcher.finish(sending.turn_id, 0.0, 10, is_last=turn == num_turns - 1)
    sent = [
        dispatcher.arrive(Arrival(f"{number}", f"new {number}", 1000, parts=parts[kind]), 1.0)[0].engine
        for number, kind in enumerate(["long", *["short"] * 4])
    ]
    assert len(set(sent[1:])) == 1 and sent[1] != sent[0], "four short jobs are less work than a long one"


def test_ours_stays_while_its_engine_is_as_busy_as_others_and_moves_when_that_pays() -> None:
    dispatcher = make_ours({"a": 1.0, "b": 1.0})
    assert send(dispatcher, "0/0", "job0", 1000) == "a"
    dispatcher.finish("0/0", 1.0, 10)
    assert send(dispatcher, "1/0", "job1", 1000) == "b"
    assert send(dispatcher, "2/0", "job2", 1000) == "a"
    assert send(dispatcher, "0/1", "job0", 2000) == "a", "one job each: moving gains nothing"
    dispatcher.finish("0/1", 1.0, 10)
    for number in range(3, 13):
        send(dispatcher, f"{number}/0", f"job{number}", 1000)
    dispatcher.drain("b", 2.0)
    dispatcher.die("b", 2.0)
    dispatcher.join(EngineInfo("b"), 2.0)
    assert send(dispatcher, "0/2", "job0", 3000) == "b", "all others are on a now"
    assert dispatcher.stats.num_moves == 1


def test_ours_holds_new_jobs_back_while_no_engine_has_room_for_them() -> None:
    dispatcher = make_ours({"a": 1.0, "b": 1.0}, kv=6100)  # contexts of 2010 tokens: three jobs fit
    for number in range(6):
        send(dispatcher, f"{number}", f"job{number}", 1000)
    assert dispatcher.arrive(Arrival("6", "job6", 1000), 1.0) == []
    assert dispatcher.finish("0", 2.0, 10, is_last=False) == [], "it will come back"
    [sending] = dispatcher.finish("3", 2.0, 10, is_last=True)
    assert (sending.turn_id, sending.engine) == ("6", "b")


def test_ours_counts_a_text_that_jobs_share_once() -> None:
    dispatcher = make_ours({"a": 1.0, "b": 1.0}, kv=6100)
    text, sent = Part("text", 1900), []
    for number in range(8):
        arrival = Arrival(f"{number}", f"job{number}", 2000, (text, Part(f"question {number}", 100)))
        sent += dispatcher.arrive(arrival, 1.0)
    assert len(sent) == 8, "six contexts of 2,000 tokens fill both engines, but these have 1,900 in common"


def test_ours_counts_the_jobs_of_an_engine_that_died_no_more_when_it_comes_back() -> None:
    dispatcher = make_ours({"a": 1.0, "b": 1.0}, kv=6100)
    for number in range(6):
        send(dispatcher, f"{number}", f"job{number}", 1000)
        dispatcher.finish(f"{number}", 2.0, 10, is_last=False)
    dispatcher.die("a", 3.0)
    dispatcher.join(EngineInfo("a", 1.0, 6100), 4.0)
    sent = [send(dispatcher, f"{number}", f"job{number}", 1000) for number in (6, 7, 8)]
    assert sent == ["a", "a", "a"], "it is empty, and b is full"
    router = dispatcher.router
    assert isinstance(router, Tenuto)
    for number in range(6):
        dispatcher.arrive(Arrival(f"{number}/1", f"job{number}", 2000), 4.0)
        dispatcher.finish(f"{number}/1", 5.0, 10, is_last=True)
    assert sum(router._placed.count_jobs(name) for name in "ab") == 3


def test_ours_counts_a_job_whose_turn_got_no_answer_no_more_until_it_comes_back() -> None:
    dispatcher = make_ours({"a": 1.0, "b": 1.0}, kv=6100)
    for number in range(6):
        send(dispatcher, f"{number}", f"job{number}", 1000)
    assert dispatcher.arrive(Arrival("6", "job6", 1000), 1.0) == []
    [sending] = dispatcher.abort("0", 2.0)
    assert (sending.turn_id, sending.engine) == ("6", "a")
    router = dispatcher.router
    assert isinstance(router, Tenuto)
    assert router._placed.get("job0") is None
    dispatcher.fail("1", 2.0)
    dispatcher.arrive(Arrival("0/1", "job0", 1000), 3.0)
    assert sum(router._placed.count_jobs(name) for name in "ab") == 7, "one was sent again, one came back"


def test_ours_counts_a_job_as_long_as_one_of_its_turns_runs() -> None:
    dispatcher = make_ours({"a": 1.0, "b": 1.0})
    router = dispatcher.router
    assert isinstance(router, Tenuto)
    for number, end in enumerate(
        (dispatcher.abort, lambda turn_id, now_s: dispatcher.finish(turn_id, now_s, 10))
    ):
        job = f"job{number}"
        engine = send(dispatcher, f"{number}/long", job, 50_000)
        send(dispatcher, f"{number}/short", job, 1000)
        end(f"{number}/short", 2.0)
        dispatcher.tick(2.0 + 2 * MAX_AWAY_S)
        placed = router._placed.get(job)
        assert placed is not None and (placed.engine, placed.held) == (engine, 50_000)
    for number in range(2):
        dispatcher.finish(f"{number}/long", 100.0, 10)
    dispatcher.tick(100.0 + MAX_AWAY_S)
    assert router._placed.get("job0") is router._placed.get("job1") is None
    assert not router._open


def test_ours_counts_silent_jobs_no_more_where_clients_do_not_say_that_a_job_ends() -> None:
    dispatcher = make_ours({"a": 1.0, "b": 1.0}, kv=6100)
    for number in range(6):
        send(dispatcher, f"{number}", f"job{number}", 1000)
        dispatcher.finish(f"{number}", 2.0, 10)
    assert dispatcher.arrive(Arrival("6", "job6", 1000), 3.0) == [], "they may come back"
    assert dispatcher.get_next_tick_s() == 4.0
    assert dispatcher.tick(31.0) == []
    assert [each.turn_id for each in dispatcher.tick(33.0)] == ["6"]


@pytest.mark.parametrize(("tool_s", "engines"), [(0.0, "aaaa"), (2.0, "aaaa"), (20.0, "aaba")])
def test_ours_does_not_take_an_engine_for_idle_whose_jobs_are_in_tool_calls(
    tool_s: float, engines: str
) -> None:
    """Four jobs each, all of b's are away; a's come back one after the other. 1000 tokens take a second.

    The third finds 2 x 990 tokens before it: 2970 + 990 x 2 and what jobs delay that come back meanwhile,
    against 2000 at b, for 1010 tokens more. With tools that take 20 s few come back before 2000 tokens are
    computed, and it moves. With 2 s, or if nothing is known of them, all of b's do, and it stays.
    """
    dispatcher = Dispatcher(load_router("tenuto"), strict=True)
    for name in "ab":
        dispatcher.join(EngineInfo(name), 0.0)
    drive_slowly(dispatcher, tool_s)
    for number in range(8):
        assert send(dispatcher, f"{number}/0", f"job{number}", 1000) == "ab"[number % 2]
    for number in range(8):
        dispatcher.finish(f"{number}/0", 1.0, 10, is_last=False)
    sent = [send(dispatcher, f"{number}/1", f"job{number}", 2000) for number in (0, 2, 4, 6)]
    assert "".join(sent) == engines


def test_ours_forgets_prefill_of_answers_whose_first_token_nobody_told_of() -> None:
    dispatcher = make_ours({"a": 1.0, "b": 1.0})
    for number in range(10):
        send(dispatcher, f"{number}", f"job{number}", 1000)
        dispatcher.finish(f"{number}", 2.0, 10, is_last=True)
    router = dispatcher.router
    assert isinstance(router, Tenuto)
    assert router._pending == router._unstarted == {}


def drive_slowly(dispatcher: Dispatcher, tool_s: float) -> None:
    """One job of two turns, whose tool takes so long. Nothing is learned of times if it takes none."""
    for number, now_s in enumerate((-100.0, -100.0 + tool_s)):
        begin_s = now_s - (1000 / 1000 if tool_s else 0.0)
        dispatcher.arrive(Arrival(f"past/{number}", "past", 1000 * (number + 1)), begin_s)
        dispatcher.first_token(f"past/{number}", now_s)
        dispatcher.finish(f"past/{number}", now_s, 0, is_last=number == 1)


def test_ours_puts_sub_agents_near_the_prompt_that_they_share() -> None:
    dispatcher = make_ours({"a": 1.0, "b": 1.0})
    send(dispatcher, "x", "x", 1000)
    long = Part("long", 1500)
    [first] = dispatcher.arrive(Arrival("p", "p", 1500, (long,)), 1.0)
    [second] = dispatcher.arrive(Arrival("q", "q", 1600, (long, Part("q", 100)), parent="p"), 1.0)
    assert first.engine == second.engine == "b"


@pytest.mark.parametrize("name", ROUTERS.get_names())
@pytest.mark.parametrize("leave", [Dispatcher.die, Dispatcher.drain])
def test_engines_that_come_and_go_leave_nothing_behind(name: str, leave: Callable[..., object]) -> None:
    """An autoscaler gives each new engine a new name."""
    router = load_router(name)
    dispatcher = Dispatcher(router, strict=True)
    for number in range(9):
        engine = f"engine-{number}"
        dispatcher.join(EngineInfo(engine), 0.0)
        for turn_id in (f"{number}/0", f"{number}/1"):
            dispatcher.arrive(Arrival(turn_id, None, 10, (Part("system", 10),)), 0.0)
        dispatcher.first_token(f"{number}/0", 0.0)
        leave(dispatcher, engine, 0.0)
    dispatcher.join(EngineInfo("last"), 0.0)
    for turn_id in [f"{number}/{turn}" for number in range(9) for turn in range(2)]:
        dispatcher.finish(turn_id, 0.0, 1)
    assert "engine-" not in repr(router)


def test_a_fault_of_a_router_is_found() -> None:
    class Impure(Router):
        def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
            self.seen = turn
            return super().route(turn, fleet)

    class Holds(Router):
        def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
            return Hold()

    class Raises(Router):
        def on_engine_left(self, name: str, now_s: float) -> None:
            raise KeyError(name)

    for router, words in ((Impure(), "changed"), (Holds(), "must go"), (Raises(), "on_engine_left")):
        with pytest.raises(PolicyError, match=words):
            check_router(router)
    with pytest.raises(PolicyError, match="did you mean route"):

        class Misspelt(Router):
            def rout(self, turn: RoutedTurn, fleet: FleetView) -> Route:
                return Hold()

    with pytest.raises(PolicyError, match="must be a method"):

        class Short(Router):
            def route(self, turn: RoutedTurn) -> Route:  # type: ignore[override]
                return Hold()


def test_routers_of_a_file_are_loaded_and_names_are_suggested(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from tenuto.core.router import Router\n"
        "@dataclass\nclass Mine(Router):\n    '''Mine.'''\n"
    )
    assert type(load_router(f"{file}:Mine")).__name__ == "Mine"
    with pytest.raises(PolicyError, match="its routers are: Mine"):
        load_router(f"{file}:Other")
    with pytest.raises(PolicyError, match="did you mean round-robin"):
        load_router("round-robbin")
    with pytest.raises(ConfigError, match="seed"):
        load_router("random", {"sead": 1})

"""The Ray Serve router's books, without Ray: jobs stay, replicas come and go, every request ends."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tenuto.ray.router import MAX_REFUSALS, RETRY_S, SILENT_S, ReplicaBooks


def ask(number: int, turn: int = 0) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"task {number} " * 100}]
    for n in range(turn):
        messages += [{"role": "assistant", "content": f"a{n}"}, {"role": "user", "content": f"r{n} " * 50}]
    return {"messages": messages}


def make(*names: str, **options: Any) -> ReplicaBooks:
    clock = iter(range(10**6))
    books = ReplicaBooks(get_now_s=lambda: float(next(clock)), **options)
    books.set_replicas(names)
    return books


def answer(books: ReplicaBooks, turn_id: str) -> None:
    """The replica takes a request and completes it."""
    books.take(turn_id)
    books.complete(turn_id)


def make_at(now: list[float]) -> ReplicaBooks:
    books = ReplicaBooks(get_now_s=lambda: now[0])
    books.set_replicas(["a", "b"])
    return books


def test_jobs_stay_with_their_replica_with_and_without_an_id() -> None:
    books = make("a", "b")
    homes: dict[int, set[str | None]] = {}
    for turn in range(3):
        for job in range(8):
            session = f"s{job}" if job % 2 else ""
            homes.setdefault(job, set()).add(books.propose(f"{job}/{turn}", ask(job, turn), session))
        for job in range(8):
            answer(books, f"{job}/{turn}")
    assert all(len(each) == 1 for each in homes.values())
    assert Counter(name for each in homes.values() for name in each) == {"a": 4, "b": 4}
    assert books.num_open == 0


def test_a_replica_that_goes_leaves_its_requests_to_the_others() -> None:
    books = make("a", "b")
    first = {n: books.propose(str(n), ask(n)) for n in range(4)}
    books.set_replicas(["b", "c"])
    again = {n: books.propose(str(n), ask(n)) for n in range(4)}
    for n in first:
        assert again[n] in ("b", "c")
        assert again[n] == first[n] or first[n] == "a"
    for n in first:
        answer(books, str(n))
    assert books.num_open == 0
    assert {each.num_open for each in books.dispatcher.engines.ready.values()} == {0}


def test_requests_of_the_last_replica_that_goes_end_as_well() -> None:
    books = make("a")
    for n in range(3):
        books.propose(str(n), ask(n))
    books.set_replicas([])
    for n in range(3):
        answer(books, str(n))
    books.set_replicas(["b"])
    assert [each.num_open for each in books.dispatcher.engines.ready.values()] == [0]


def test_no_replica_at_first() -> None:
    books = make()
    assert books.propose("1", ask(1)) is None
    books.set_replicas(["a"])
    assert books.propose("1", ask(1)) == "a"


def test_a_request_that_is_refused_again_and_again_is_routed_again() -> None:
    books = make("a", "b")
    for _ in range(MAX_REFUSALS):
        assert books.propose("1", ask(1)) is not None
    assert books.dispatcher.stats.num_resent == 0
    books.propose("1", ask(1))
    assert books.dispatcher.stats.num_resent == 1
    assert books.num_open == 1


def test_a_request_that_its_replica_refuses_stays_the_same_turn_of_its_job() -> None:
    """Ray calls the refused request completed, and asks again, maybe after others that wait."""
    now = [0.0]
    books = make_at(now)
    home = books.propose("0", ask(1))
    answer(books, "0")
    for _ in range(MAX_REFUSALS):
        assert books.propose("1", ask(1, 1), is_waiting=lambda: True) == home
        books.complete("1")
        now[0] += 3 * RETRY_S
        books.propose("other", ask(2), "other")
    [turn] = [one.turn for turn_id, one in books.dispatcher._turns.items() if turn_id == "1"]
    assert (turn.num_turns, turn.num_attempts) == (2, 0)
    books.propose("1", ask(1, 1), is_waiting=lambda: True)
    assert books.dispatcher.stats.num_resent == 1, "a replica that refuses it again and again is full"
    books.take("1")
    now[0] += 2 * SILENT_S
    books.propose("2", ask(1))
    assert books.dispatcher.is_open("1"), "it takes that long"
    books.complete("1")
    assert not books.dispatcher.is_open("1")


def test_a_request_that_no_replica_is_known_to_have_taken_ends_soon_after_it_is_completed() -> None:
    now = [0.0]
    books = make_at(now)
    books.propose("1", ask(1))
    books.complete("1")
    now[0] += RETRY_S
    books.complete("unknown")
    assert books.num_open == 0
    books.propose("2", ask(1, 1))
    assert books.dispatcher._turns["2"].turn.num_context_tokens > 0, "it was answered"


def test_a_replica_that_was_chosen_for_nothing_has_no_load_in_the_end() -> None:
    now = [0.0]
    books = make_at(now)
    for number in range(1000):
        books.propose(str(number), ask(number), is_waiting=lambda: True)
        now[0] += 1.0
    assert books.num_open == SILENT_S
    assert sum(each.num_open for each in books.dispatcher.engines.ready.values()) == SILENT_S


def test_requests_end_once_and_unknown_ones_do_no_harm() -> None:
    books = make("a")
    books.propose("1", {})
    for end in (books.abort, books.take, books.complete, books.abort):
        end("1")
        end("unknown")
    assert books.num_open == 0
    assert [each.num_open for each in books.dispatcher.engines.ready.values()] == [0]


def test_prompts_that_no_replica_takes_do_not_send_new_jobs_elsewhere() -> None:
    """A client sends them to all replicas but one, and these refuse them at once."""

    def count(**options: Any) -> Counter[str | None]:
        now = [0.0]
        books = ReplicaBooks(get_now_s=lambda: now[0], **options)
        books.set_replicas("abcd")
        events = [
            (job / 2 + 3 * turn, f"{job}/{turn}", ask(job, turn)) for job in range(80) for turn in range(6)
        ]
        for number in range(12):
            at_s = 10.0 * (number // 3) + number / 1000
            events.append((at_s, f"long/{number}", {"prompt": [number] + [0] * 1_000_000}))
        first = Counter[str | None]()
        for at_s, name, request in sorted(events, key=lambda event: event[0]):
            now[0] = at_s
            replica = books.propose(name, request, name.partition("/")[0] if "long" not in name else "")
            now[0] += 0.05
            answer(books, name)
            first[replica] += name.endswith("/0") and "long" not in name
        return first

    assert max(count().values()) > 40
    assert max(count(max_model_len=131_072).values()) < 30

"""The driver's bookkeeping of jobs and turns: who is who, what is told, what is counted."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tenuto.core.driver import Driver
from tenuto.core.engine import StepSize
from tenuto.core.jobs import Arrival, Finish
from tenuto.core.limits import Limits
from tenuto.core.policy import Policy
from tenuto.core.requests import Hints
from tenuto.core.types import Job, ToolCall, Turn
from tests.support.prefix import hash_blocks
from tests.support.small_policies import KeepFor
from tests.support.toy_engine import ToyEngine, make_tokens

LS = ToolCall("ls", "ls -l")
PROMPT = make_tokens(0, 18)
OUTPUT = make_tokens(500, 3)
RESULT = make_tokens(600, 7)


def get_job(engine: ToyEngine, turn_id: str) -> Job:
    return engine.driver._retention.get_turn_view(engine.driver._turns[turn_id]).job


def run(engine: ToyEngine, turn_id: str, now_s: float, prompt, output=OUTPUT, hints=None, **finish) -> None:
    """A turn arrives, runs for a second and finishes."""
    engine.arrive(turn_id, now_s, prompt, output, hints)
    assert engine.start_first(now_s) == turn_id
    engine.finish(turn_id, now_s + 1, **finish)


def test_the_policy_hears_a_job_s_whole_life() -> None:
    engine = ToyEngine(KeepFor(), 20)
    run(engine, "t1", 0, PROMPT, hints=Hints(job_id="job"), tool=LS)
    run(engine, "t2", 4, PROMPT + OUTPUT + RESULT, hints=Hints(job_id="job"), is_last=True)
    assert engine.driver.policy.heard == [
        ("arrived", "t1"),
        ("started", "t1", 0),
        ("finished", "t1", LS, None),
        # Arrival at 4 s − finish at 1 s.
        ("tool returned", "t2", LS, 3.0),
        ("arrived", "t2"),
        # Turn 1 computed 18 + 3 − 1 = 20 tokens: 5 whole blocks of 4.
        ("started", "t2", 20),
        ("finished", "t2", None, True),
        ("job ended", "job", 2),
    ]


def test_the_tool_s_time_is_not_known_while_another_turn_of_the_job_lives() -> None:
    engine = ToyEngine(KeepFor(), 40)
    engine.arrive("parallel", 0, PROMPT, OUTPUT, Hints(job_id="job"))
    run_hints = Hints(job_id="job")
    engine.start_first(0)
    engine.arrive("t1", 1, make_tokens(100, 10), OUTPUT, run_hints)
    engine.start_first(1)
    engine.finish("t1", 2, tool=LS)
    engine.arrive("t2", 5, make_tokens(100, 30), OUTPUT, run_hints)
    assert not [heard for heard in engine.driver.policy.heard if heard[0] == "tool returned"]
    assert sum(engine.driver.stats.tool_s.counts) == 0


def test_a_tool_s_time_is_told_once_even_if_the_client_gives_up_and_asks_again() -> None:
    engine = ToyEngine(KeepFor(), 40)
    job, prompt = Hints(job_id="job"), PROMPT + OUTPUT + RESULT
    run(engine, "t1", 0, PROMPT, hints=job, tool=LS)
    engine.arrive("t2", 4, prompt, OUTPUT, job)
    engine.start_first(4)
    engine.abort("t2", 64)
    run(engine, "again", 65, prompt, hints=job, tool=LS)
    run(engine, "t3", 68, prompt + OUTPUT + RESULT, hints=job)
    returned = [each[1:] for each in engine.driver.policy.heard if each[0] == "tool returned"]
    assert returned == [("t2", LS, 3.0), ("t3", LS, 2.0)]
    assert engine.driver.stats.tool_s.total == 5.0


@pytest.mark.parametrize("is_call_first", [False, True])
@pytest.mark.parametrize("is_said", [False, True])
def test_an_answer_without_a_call_does_not_end_the_job_of_its_siblings(
    is_call_first: bool, is_said: bool
) -> None:
    """As with `n` above 1."""
    engine = ToyEngine(KeepFor(100), 40)
    for turn_id, output, is_last in (("call", OUTPUT, None), ("end", RESULT, is_said or None)):
        engine.arrive(turn_id, 0, PROMPT, output, Hints(job_id="job", is_last=is_last))
        engine.start_first(0)
    ends = [("call", LS, False), ("end", None, True)]
    for now_s, (turn_id, tool, is_last) in enumerate(ends if is_call_first else ends[::-1], 1):
        engine.finish(turn_id, now_s, tool=tool, is_last=is_last)
    is_ended = is_said and is_call_first
    assert ("job" in engine.driver.leases) is not is_ended
    assert (("job ended", "job", 2) in engine.driver.policy.heard) is is_ended
    # The next turn continues the one that called, and ends the job as ever.
    run(engine, "next", 5, PROMPT + OUTPUT + RESULT, hints=Hints(job_id="job"), is_last=True)
    heard = engine.driver.policy.heard
    assert ("started", "next", 20) in heard
    assert is_ended or ("tool returned", "next", LS, 4.0 if is_call_first else 3.0) in heard
    assert not engine.driver._jobs.jobs


SESSION = Hints(job_id="job", is_session=True)
ASIDE = make_tokens(3000, 30)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_request_beside_a_session_s_job_leaves_the_job_as_it_was(is_cut: bool) -> None:
    """Harnesses have a page summarized, or a title written, while the tool runs."""
    engine = ToyEngine(KeepFor(100), 40)
    run(engine, "t1", 0, PROMPT, hints=SESSION, tool=LS)
    run(engine, "aside", 2, ASIDE, hints=SESSION, is_last=None if is_cut else True)
    engine.arrive("gone", 4, ASIDE, hints=SESSION)
    engine.abort("gone", 4)
    assert len(engine.driver.leases.get("job").blocks) == 5
    run(engine, "t2", 5, PROMPT + OUTPUT + RESULT, hints=SESSION, is_last=True)
    told = [heard[1:] for heard in engine.driver.policy.heard if heard[0] == "tool returned"]
    assert told == [("t2", LS, 4.0)]
    assert engine.driver.stats.num_reusable_tokens == 20
    assert engine.driver.policy.heard[-1] == ("job ended", "job", 4)


@pytest.mark.parametrize(
    ("first", "hints", "tool"),
    [
        (LS, Hints(job_id="job"), None),  # an id of the job itself
        (None, SESSION, None),  # no tool runs
        (LS, Hints(job_id="job", is_session=True, is_last=True), None),
        (LS, SESSION, LS),  # a rewritten history
    ],
)
def test_other_rewritten_prompts_take_their_job_over(first, hints: Hints, tool) -> None:
    engine = ToyEngine(KeepFor(100), 40)
    run(engine, "t1", 0, PROMPT, hints=hints if hints.is_last is None else SESSION, tool=first)
    run(engine, "t2", 2, ASIDE, hints=hints, tool=tool, is_last=tool is None)
    assert tool is not None or engine.driver.policy.heard[-1] == ("job ended", "job", 2)
    # Who rewrites each prompt is not beside his job.
    if tool is not None:
        assert len(engine.driver.leases.get("job").blocks) == 8
        run(engine, "t3", 4, make_tokens(4000, 30), hints=hints, is_last=True)
        assert engine.driver.policy.heard[-1] == ("job ended", "job", 3)


def test_a_job_without_an_id_is_recognised_turn_after_turn() -> None:
    engine = ToyEngine(KeepFor(), 40)
    prompt = PROMPT
    for number in range(4):
        run(engine, f"t{number}", number * 2, prompt, tool=LS)
        prompt = prompt + OUTPUT + make_tokens(1000 * (number + 1), 7)
    engine.arrive("t4", 10, prompt)
    assert get_job(engine, "t4").num_turns == 5
    assert len(engine.driver._jobs.jobs) == 1


def test_the_same_content_is_another_job_for_another_tenant() -> None:
    engine = ToyEngine(KeepFor(), 40)
    run(engine, "t1", 0, PROMPT, hints=Hints(tenant="a"), tool=LS)
    for number, (tenant, num_turns) in enumerate((("b", 1), (None, 1), ("a", 2))):
        engine.arrive(f"next-{number}", 2, PROMPT + OUTPUT + RESULT, hints=Hints(tenant=tenant))
        assert get_job(engine, f"next-{number}").num_turns == num_turns


def test_jobs_are_not_inferred_when_that_is_switched_off() -> None:
    engine = ToyEngine(KeepFor(), 40, limits=Limits(infer_jobs=False))
    run(engine, "t1", 0, PROMPT, tool=LS)
    engine.arrive("t2", 2, PROMPT + OUTPUT + RESULT)
    assert get_job(engine, "t2").num_turns == 1


def test_an_explicit_id_counts_more_than_the_content() -> None:
    engine = ToyEngine(KeepFor(), 40)
    run(engine, "t1", 0, PROMPT, hints=Hints(job_id="one"), tool=LS)
    engine.arrive("t2", 2, PROMPT + OUTPUT + RESULT, hints=Hints(job_id="two"))
    job = get_job(engine, "t2")
    assert (job.job_id, job.arrival_s, job.num_turns) == ("two", 2, 1)


def test_a_client_cannot_name_a_job_that_was_inferred() -> None:
    engine = ToyEngine(KeepFor(), 40)
    run(engine, "t1", 0, PROMPT, tool=LS)
    [inferred] = engine.driver._jobs.jobs
    assert not inferred.isprintable()  # ids from clients are (see test_hints)
    engine.arrive("t2", 2, PROMPT, hints=Hints(job_id="turn:t1"))
    assert get_job(engine, "t2").num_turns == 1


def test_a_job_s_arrival_and_tenant_are_those_of_its_first_turn() -> None:
    engine = ToyEngine(KeepFor(), 40)
    run(engine, "t1", 3, PROMPT, hints=Hints(job_id="job", tenant="a"), tool=LS)
    engine.arrive("t2", 9, PROMPT, hints=Hints(job_id="job", tenant="b"))
    job = get_job(engine, "t2")
    assert (job.job_id, job.arrival_s, job.num_turns, job.tenant) == ("job", 3, 2, "a")


@pytest.mark.parametrize(
    ("hints", "tool", "is_last", "expected"),
    [
        (Hints(), LS, None, (LS, None)),
        (Hints(tool="cat"), LS, None, (ToolCall("cat", "ls -l"), False)),
        (Hints(tool="cat"), None, True, (ToolCall("cat"), False)),
        (Hints(is_last=True), LS, False, (LS, True)),
        (Hints(is_last=False), None, True, (None, False)),
        (Hints(), None, True, (None, True)),
    ],
)
def test_the_client_s_word_counts_before_the_output_s(hints, tool, is_last, expected) -> None:
    engine = ToyEngine(KeepFor(), 40)
    run(engine, "t1", 0, PROMPT, hints=hints, tool=tool, is_last=is_last)
    [finished] = [heard for heard in engine.driver.policy.heard if heard[0] == "finished"]
    assert finished[2:] == expected


def test_a_job_with_another_live_turn_does_not_end() -> None:
    engine = ToyEngine(KeepFor(), 40)
    hints = Hints(job_id="job")
    engine.arrive("other", 0, make_tokens(300, 10), OUTPUT, hints)
    engine.start_first(0)
    run(engine, "last", 1, PROMPT, hints=hints, is_last=True)
    assert "job" in engine.driver._jobs.jobs
    engine.finish("other", 3, is_last=True)
    assert engine.driver._jobs.jobs == {}
    assert engine.driver.policy.heard[-1] == ("job ended", "job", 2)


def test_an_ended_job_is_forgotten_and_may_begin_anew() -> None:
    engine = ToyEngine(KeepFor(), 40)
    for now_s in (0, 5):
        run(engine, f"t{now_s}", now_s, PROMPT, hints=Hints(job_id="job"), tool=LS)
        run(engine, f"t{now_s + 2}", now_s + 2, PROMPT + OUTPUT, hints=Hints(job_id="job"), is_last=True)
    assert engine.driver.policy.heard.count(("job ended", "job", 2)) == 2
    assert engine.driver._jobs.jobs == {}
    assert len(engine.driver._jobs.lineage) == 0


def test_events_of_unknown_turns_are_ignored() -> None:
    engine = ToyEngine(KeepFor(), 20)
    run(engine, "t1", 0, PROMPT, is_last=True)
    heard = list(engine.driver.policy.heard)
    engine.driver.start("t1", 2, 0)
    engine.driver.preempt("nobody", 2, 0)
    engine.driver.finish("t1", 2, Finish(3))
    assert engine.driver.policy.heard == heard


def test_a_job_of_which_nothing_was_finished_is_not_remembered() -> None:
    engine = ToyEngine(KeepFor(), 40)
    engine.arrive("t1", 0, PROMPT, OUTPUT, Hints(job_id="job"))
    engine.start_first(0)
    engine.arrive("t2", 1, PROMPT, OUTPUT, Hints(job_id="job"))
    engine.abort("t1", 2)
    assert "job" in engine.driver._jobs.jobs
    engine.abort("t2", 3)
    assert engine.driver._jobs.jobs == {}
    assert engine.driver.policy.heard[-1] == ("job ended", "job", 2)


def test_a_policy_that_tells_no_jobs_apart_needs_none_recognised() -> None:
    for policy, is_recognised in ((Policy(), False), (KeepFor(), True)):
        engine = ToyEngine(policy, 40)
        run(engine, "t1", 0, PROMPT, tool=LS)
        assert len(engine.driver._jobs.lineage) == is_recognised
        engine.arrive("t2", 2, PROMPT + OUTPUT + RESULT)
        assert get_job(engine, "t2").num_turns == 1 + is_recognised


def test_jobs_are_recognised_by_hashes_finer_than_the_engine_s_blocks() -> None:
    @dataclass
    class Listening(Policy):
        def on_turn_started(self, turn: Turn, now_s: float):
            pass

    engine = ToyEngine(Listening(), 40, block_size=16)
    engine.hash_block_size = 4
    driver = Driver(Listening(), engine)
    # 40 tokens are two blocks of 16, but ten hashes of 4: the prompt's marks are the ninth and the tenth.
    # Taken for those of two blocks, they would be the first and the second, and end at 8 tokens.
    prompt = make_tokens(0, 40)
    driver.arrive("t1", 0, Arrival(Hints(), 40, prompt, hash_blocks(prompt, 4)))
    driver.finish("t1", 1, Finish(3, LS))
    others = [prompt[:8] + make_tokens(700, 8) + prompt[16:] + RESULT, prompt + RESULT]
    for number, prompt in enumerate(others):
        turn_id = f"other-{number}"
        driver.arrive(turn_id, 2, Arrival(Hints(), len(prompt), prompt, hash_blocks(prompt, 4)))
    assert [driver._turns[f"other-{number}"].job.num_turns for number in range(2)] == [1, 2]


def test_the_longest_silent_job_is_forgotten_first_and_its_lease_ends() -> None:
    engine = ToyEngine(KeepFor(ttl_s=100), 60, limits=Limits(max_remembered_jobs=2))
    for number, job_id in enumerate("abca"):
        prompt = make_tokens(ord(job_id) * 1000, 8)
        run(engine, f"t{number}", number * 2, prompt, hints=Hints(job_id=job_id), tool=LS)
    # Two may be idle: a is forgotten when c falls idle, b when the new a does.
    assert [heard[1] for heard in engine.driver.policy.heard if heard[0] == "job ended"] == ["a", "b"]
    assert set(engine.driver._jobs.jobs) == {"c", "a"}
    assert len(engine.driver._jobs.lineage) == 2


@pytest.mark.parametrize("max_idle", [0, 1, 2])
def test_of_jobs_that_end_together_those_idle_longest_are_forgotten(max_idle: int) -> None:
    """One of them ends with its turn."""
    engine = ToyEngine(KeepFor(ttl_s=100), 60, limits=Limits(max_remembered_jobs=max_idle))
    driver = engine.driver
    for number, job_id in enumerate("abcd"):
        prompt = make_tokens(number * 1000, 8 + number)
        engine.arrive(f"{job_id}1", 0, prompt, OUTPUT, Hints(job_id=job_id))
        engine.start_first(1)
    for job_id in "abcd":
        engine.finish(f"{job_id}1", 2, tool=LS, is_last=job_id == "b")
    waits = driver._fairness.waits
    kept = list("acd"[3 - max_idle :])
    assert list(driver._jobs.jobs) == kept == [lease.job_id for lease in driver.leases]
    assert all(driver._jobs.jobs[job_id].last_marks is not None for job_id in kept)
    assert set(driver._jobs.lineage._finished) == set(waits._evicted_at) == set(kept)
    assert driver.ledger.total.get_figures(3)["turns"] == 4


def test_a_forgotten_job_leaves_no_lease() -> None:
    engine = ToyEngine(KeepFor(ttl_s=100), 60, limits=Limits(max_remembered_jobs=1))
    run(engine, "t1", 0, PROMPT, hints=Hints(job_id="a"), tool=LS)
    run(engine, "t2", 2, make_tokens(900, 18), hints=Hints(job_id="b"), tool=LS)
    assert [lease.job_id for lease in engine.driver.leases] == ["b"]


def test_tokens_computed_again_are_counted() -> None:
    engine = ToyEngine(Policy(), 7)
    run(engine, "t1", 0, PROMPT, hints=Hints(job_id="job"), tool=LS)
    # 7 blocks: all 28 tokens of somebody else evict the job's.
    run(engine, "t2", 2, make_tokens(900, 26), hints=Hints(job_id="other"), tool=LS)
    engine.arrive("t3", 4, PROMPT + OUTPUT + make_tokens(600, 3), OUTPUT, Hints(job_id="job"))
    engine.start_first(4)
    # Turn 1 had computed 18 + 3 − 1 = 20 tokens; none was hit.
    assert engine.driver.stats.num_recomputed_tokens == 20
    engine.preempt("t3", 5)
    engine.start_first(6)
    # The preemption gave 24 prompt tokens away; 5 blocks = 20 were still cached ((24 − 1) // 4 = 5).
    assert engine.driver.stats.num_recomputed_tokens == 20 + 4


def test_tokens_that_a_shorter_prompt_has_no_use_for_are_not_counted() -> None:
    engine = ToyEngine(Policy(), 7)
    run(engine, "t1", 0, PROMPT, hints=Hints(job_id="job"), tool=LS)
    run(engine, "t2", 2, make_tokens(900, 26), hints=Hints(job_id="other"), tool=LS)
    engine.arrive("t3", 4, PROMPT[:10], OUTPUT, Hints(job_id="job"))
    engine.start_first(4)
    # 20 had been computed, all are evicted; of 10 prompt tokens 9 could have been hit, that is 2 blocks.
    assert engine.driver.stats.num_recomputed_tokens == 8
    assert engine.driver.stats.num_reusable_tokens == 8


def test_waiting_time_runs_from_arrival_to_the_first_start_only() -> None:
    engine = ToyEngine(Policy(), 20)
    engine.arrive("t1", 0, PROMPT, OUTPUT)
    engine.start_first(3)
    engine.preempt("t1", 5)
    engine.start_first(50)
    assert engine.driver.stats.queue_s.total == 3
    assert sum(engine.driver.stats.queue_s.counts) == 1


# Admission, budget, victims.


@dataclass
class AtMostOneJob(Policy):
    """Lets a job start only when nothing runs."""

    def admit(self, turn: Turn, view):
        return view.num_running == 0


def test_admission_is_asked_for_jobs_that_have_not_started() -> None:
    engine = ToyEngine(AtMostOneJob(), 60)
    hints = Hints(job_id="job")
    run(engine, "t1", 0, PROMPT, hints=hints, tool=LS)
    engine.arrive("busy", 2, make_tokens(900, 8))
    engine.start_first(2)
    engine.arrive("new", 3, make_tokens(800, 8))
    engine.arrive("later", 3, PROMPT + OUTPUT + RESULT, hints=hints)
    assert not engine.driver.may_start("new", 3, idle=False)
    assert engine.driver.may_start("later", 3, idle=False)
    assert engine.driver.may_start("new", 3, idle=True)
    assert engine.driver.stats.num_admission_waits == 1


def test_two_turns_at_once_do_not_let_a_job_past_admission() -> None:
    engine = ToyEngine(AtMostOneJob(), 60)
    engine.arrive("busy", 0, PROMPT)
    engine.start_first(0)
    for turn_id in ("one", "two"):
        engine.arrive(turn_id, 1, make_tokens(900, 8), hints=Hints(job_id="job"))
    assert not engine.driver.may_start("one", 1, idle=False)
    assert not engine.driver.may_start("two", 1, idle=False)


def test_a_job_whose_first_turn_was_aborted_while_waiting_has_not_started() -> None:
    engine = ToyEngine(AtMostOneJob(), 60)
    engine.arrive("busy", 0, PROMPT)
    engine.start_first(0)
    engine.arrive("one", 1, make_tokens(900, 8), hints=Hints(job_id="job"))
    engine.abort("one", 2)
    engine.arrive("two", 3, make_tokens(900, 8), hints=Hints(job_id="job"))
    assert not engine.driver.may_start("two", 3, idle=False)


def test_a_preempted_turn_needs_no_second_admission() -> None:
    engine = ToyEngine(AtMostOneJob(), 60)
    for number in range(2):
        engine.arrive(f"t{number}", number, make_tokens(900 * number, 8))
        engine.start_first(number)
    engine.preempt("t1", 3)
    assert engine.driver.may_start("t1", 4, idle=False)


@pytest.mark.parametrize(
    ("answer", "expected", "num_faults"),
    [
        (None, 2048, 0),
        (100, 100, 0),
        (5000, 2048, 0),
        # Wrong answers: stock's is used.
        (0, 2048, 1),
        (-3, 2048, 1),
        (True, 2048, 1),
        ("x", 2048, 1),
    ],
)
def test_the_step_budget_is_bounded(answer, expected, num_faults) -> None:
    @dataclass
    class Budget(Policy):
        def step_budget(self, view):
            return answer

    driver = ToyEngine(Budget(), 20).driver
    assert driver.get_step_size(0, 2048) == (expected, 0)
    assert driver.num_policy_faults == num_faults


class Chooser:
    """Chooses always the same; remembers what it was told."""

    def __init__(self, answer) -> None:
        self.answer = answer if answer is None else StepSize(answer)
        self.steps, self.turns, self.waiting = [], [], []

    def observe_arrival(self, turn, num_new_tokens) -> None:
        self.waiting.append((turn.turn_id, num_new_tokens))

    def observe_start(self, turn_id) -> None:
        self.waiting = [each for each in self.waiting if each[0] != turn_id]

    def observe_step(self, step) -> None:
        self.steps.append(step)

    def observe_turn(self, turn, num_missed_tokens, pause_s) -> None:
        self.turns.append((turn.turn_id, num_missed_tokens, pause_s))

    def choose(self, num_running, budget, block_size):
        return self.answer


@pytest.mark.parametrize(
    ("chosen", "wanted", "expected"),
    [(None, None, 2048), (512, None, 512), (None, 100, 100), (512, 100, 100), (512, 600, 512), (0, None, 1)],
)
def test_the_step_gets_the_smaller_of_what_the_chooser_and_the_policy_say(chosen, wanted, expected) -> None:
    @dataclass
    class Budget(Policy):
        def step_budget(self, view):
            return wanted

    driver = ToyEngine(Budget(), 20, step_chooser=Chooser(chosen)).driver
    assert driver.bounds_steps and driver.hears_steps
    assert driver.get_step_size(0, 2048) == (expected, 0)


def test_a_chooser_hears_steps_and_turns_beside_a_policy_that_does_not() -> None:
    log = []
    chooser = Chooser(7)
    chooser.answer = StepSize(7, 3)
    engine = ToyEngine(Policy(), 60, step_chooser=chooser, log=log.append)
    engine.arrive("done", 0, PROMPT)
    assert chooser.waiting == [("done", len(PROMPT))]
    engine.start_first(0)
    assert not chooser.waiting
    engine.finish("done", 1)
    engine.arrive("gone", 2, PROMPT)
    assert chooser.waiting
    engine.abort("gone", 3)
    assert not chooser.waiting
    engine.driver.step("a step")
    assert (chooser.turns, chooser.steps) == ([("done", 0, None)], ["a step"])
    assert not any(record.get("hook") == "on_step" for record in log)  # the policy does not learn from it
    assert engine.driver.get_step_size(4, 2048) == (7, 3)
    assert log[-1] == {"kind": "chosen", "what": "step_tokens", "answer": 7}
    assert not ToyEngine(Policy(), 60).driver.bounds_steps


def test_a_chooser_hears_what_is_computed_again_and_for_how_long_the_job_was_away() -> None:
    chooser = Chooser(7)
    engine = ToyEngine(Policy(), 60, step_chooser=chooser)
    job = Hints(job_id="job")
    run(engine, "first", 0, PROMPT, hints=job, tool=LS)
    engine.arrive("second", 6, PROMPT + OUTPUT + RESULT, OUTPUT, job)
    num_reusable_tokens = engine.driver._turns["second"].num_reusable_tokens
    assert num_reusable_tokens > 1
    engine.driver.start("second", 7, num_hit_tokens=1)
    engine.driver.finish("second", 8, Finish(3))
    assert chooser.turns == [("first", 0, None), ("second", num_reusable_tokens - 1, 5)]


def test_a_step_that_only_decodes_has_the_engine_s_size_unless_the_policy_bounds_steps() -> None:
    log = []
    driver = ToyEngine(Policy(), 60, step_chooser=Chooser(7), log=log.append).driver
    assert driver.get_step_size(4, 2048, only_decodes=True) == (2048, 0)
    assert not log

    @dataclass
    class Budget(Policy):
        def step_budget(self, view):
            return 5

    assert ToyEngine(Budget(), 60).driver.get_step_size(4, 2048, only_decodes=True) == (5, 0)


@dataclass
class LongestFirst(Policy):
    """Preempts the turn with the longest prompt; has no opinion on those of 8 tokens."""

    def preempt_key(self, turn: Turn, view):
        if turn.num_prompt_tokens == 8:
            raise ValueError("no opinion")
        return ("by length", -turn.num_prompt_tokens)


def test_a_running_turn_shows_what_its_client_said_of_it() -> None:
    engine = ToyEngine(Policy(), 20)
    engine.arrive("t1", 0, PROMPT, hints=Hints(is_last=True, expected_tool_s=2.5, tenant="a"), priority=3)
    view = engine.driver._retention.get_turn_view(engine.driver._turns["t1"])
    assert (view.is_last, view.expected_tool_s, view.job.tenant, view.priority) == (True, 2.5, "a", 3)


def test_a_live_job_is_not_forgotten_however_long_it_takes() -> None:
    engine = ToyEngine(Policy(), 60, limits=Limits(max_remembered_jobs=1))
    run(engine, "t1", 0, PROMPT, hints=Hints(job_id="live"), tool=LS)
    engine.arrive("t2", 2, PROMPT, OUTPUT, Hints(job_id="live"))
    engine.start_first(2)
    for number in range(3):
        run(engine, f"o{number}", 3 + number, PROMPT, hints=Hints(job_id=f"other-{number}"), tool=LS)
    engine.arrive("t3", 9, PROMPT, OUTPUT, Hints(job_id="live"))
    assert get_job(engine, "t3").num_turns == 3


def test_many_live_jobs_do_not_make_the_engine_forget_how_others_go_on() -> None:
    engine = ToyEngine(KeepFor(ttl_s=100), 200, limits=Limits(max_remembered_jobs=1))
    for number in range(4):
        prompt, hints = make_tokens(1000 * number, 8), Hints(job_id=f"job-{number}")
        run(engine, f"t{number}", 3 * number, prompt, hints=hints, tool=LS)
        engine.arrive(f"next-{number}", 3 * number + 2, prompt, OUTPUT, hints)
        engine.start_first(3 * number + 2)
    assert len(engine.driver._jobs.lineage) == 4


def start_all(engine: ToyEngine, *lengths: int) -> list[str]:
    for number, length in enumerate(lengths):
        engine.arrive(f"t{number}", number, make_tokens(100 * number, length))
        engine.start_first(number)
    return list(engine.running)


def test_the_victim_is_the_policy_s_choice() -> None:
    engine = ToyEngine(LongestFirst(), 60)
    turn_ids = start_all(engine, 10, 30, 20)
    assert engine.driver.get_victim(turn_ids, 5) == "t1"
    assert engine.driver.get_victim(["t0", "t2", "unknown"], 5) == "t2"
    assert engine.driver.get_victim(["unknown"], 5) is None


def test_of_equal_victims_the_last_to_arrive_is_first() -> None:
    engine = ToyEngine(LongestFirst(), 60)
    turn_ids = start_all(engine, 10, 10)
    assert {engine.driver.get_victim(ids, 5) for ids in (turn_ids, turn_ids[::-1])} == {"t1"}


def test_without_the_hook_the_engine_chooses_the_victim() -> None:
    engine = ToyEngine(Policy(), 60)
    assert engine.driver.get_victim(start_all(engine, 10, 30), 5) is None


def test_a_hook_that_fails_now_and_then_still_yields_an_order() -> None:
    # Stock's key stands in for t1's: (−arrival,) = (−1,) against ("by length", −10).
    engine = ToyEngine(LongestFirst(), 60)
    turn_ids = start_all(engine, 10, 8)
    assert engine.driver.get_victim(turn_ids, 5) == "t1"
    assert engine.driver.num_policy_faults == 1


def test_the_queue_survives_a_key_hook_that_fails_now_and_then() -> None:
    @dataclass
    class Moody(Policy):
        def queue_key(self, turn: Turn, now_s: float):
            return ("policy", turn.turn_id) if turn.turn_id != "t1" else 1 / 0

    engine = ToyEngine(Moody(), 60)
    for number in range(3):
        engine.arrive(f"t{number}", number, make_tokens(100 * number, 8))
    # Numbers (stock's key) go before strings (the policy's).
    assert [engine.start_first(5) for _ in range(3)] == ["t1", "t0", "t2"]

"""The five rules at the top of `tenuto.policies.tenuto`, each on a toy engine."""

from __future__ import annotations

import re
from pathlib import Path

from tenuto.core.limits import Limits
from tenuto.core.requests import Hints
from tenuto.core.types import Job, LeaseEnd, LeaseRefusal, StepView, ToolCall, Turn
from tenuto.policies import tenuto
from tenuto.policies.tenuto import Tenuto
from tests.support.toy_engine import ToyEngine, make_tokens

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
TOOL = ToolCall("bash")
TOOL_TURN = Turn("x/1", Job("x", 0.0, 1), 0.0, 10, tool=TOOL)
BLOCK = 4


class Server:
    """A toy engine whose policy knows what a token costs: 1 ms of prompt, 10 ms of a step that decodes."""

    def __init__(self, num_blocks: int = 1000) -> None:
        self.policy = Tenuto()
        # The bound on waits is the driver's, and would start turns in another order.
        self.engine = ToyEngine(
            self.policy, num_blocks, BLOCK, limits=Limits(max_wait_over_stock=None, max_leased_share=1.0)
        )
        for count in range(1, 21):
            self.policy.on_step(StepView(0.0, 0.01 + 1e-4 * count, count, count))
            self.policy.on_step(StepView(0.0, 1e-3 * 100 * count, 100 * count, 1))
        self.policy.on_tick(self.engine.driver.get_view(0.0))
        self.num_turns = 0
        self.numbers: dict[str, int] = {}
        """Jobs, for texts that have nothing in common."""

    def arrive(self, name: str, now_s: float, num_tokens: int, *, is_last: bool | None = None) -> str:
        """A turn of the job `name` with so many prompt tokens, behind those of its earlier turns."""
        self.num_turns += 1
        turn_id = f"{name}/{self.num_turns}"
        first = 10_000 * (1 + self.numbers.setdefault(name, len(self.numbers)))
        kind = len(name.rstrip("0123456789"))
        prompt = [kind] * BLOCK + make_tokens(first, num_tokens - BLOCK)
        self.engine.arrive(turn_id, now_s, prompt, [1], Hints(job_id=name, is_last=is_last))
        return turn_id

    def serve(self, name: str, now_s: float, num_tokens: int, *, tool: ToolCall | None = TOOL) -> str:
        """A turn that arrives, runs and ends at once."""
        turn_id = self.arrive(name, now_s, num_tokens)
        assert self.engine.start_first(now_s) == turn_id
        self.engine.finish(turn_id, now_s, tool=tool, is_last=tool is None)
        return turn_id


def test_the_page_and_the_file_say_the_same_five_sentences() -> None:
    assert tenuto.__doc__ is not None
    rules = re.findall(r"^\d\. .*(?:\n   .*)*", tenuto.__doc__, re.MULTILINE)
    assert len(rules) == 5
    page = PAGE.read_text(encoding="utf-8")
    assert all(re.sub(r"\n +", " ", rule) + "\n" in page for rule in rules)
    assert all(rule.count(".") == 2 for rule in rules), "one sentence each"


def test_1_the_job_with_the_least_work_left_goes_first_and_jobs_move_up_as_they_grow_old() -> None:
    def get_first(long_arrives_s: float) -> str | None:
        server = Server()
        for n in range(60):
            num_tokens = 40 if n % 2 else 400
            server.serve(f"old{n}", 0.0, num_tokens)
            server.serve(f"old{n}", 1.0, num_tokens + 10, tool=None)
        server.arrive("long", long_arrives_s, 400)
        server.arrive("short", 1000.0, 40)
        return server.engine.start_first(1000.0)

    first = get_first(999.0)
    assert first is not None and first.startswith("short")
    # Half a second of work puts it back by some minutes, and no further.
    first = get_first(0.0)
    assert first is not None and first.startswith("long")


def test_1_a_turn_that_its_client_calls_the_last_has_only_itself_left() -> None:
    def get_first(*, is_last: bool | None) -> str | None:
        server = Server()
        for n in range(60):
            server.serve(f"old{n}", 0.0, 40)
            server.serve(f"old{n}", 1.0, 50, tool=None)
            server.serve(f"wide{n}", 0.0, 60)
            for turn in range(1, 20):
                server.serve(f"wide{n}", turn, 60 + 40 * turn, tool=TOOL if turn < 19 else None)
        server.arrive("old", 1000.0, 40)
        server.arrive("wide", 1000.0, 44, is_last=is_last)
        return server.engine.start_first(1000.0)

    first = get_first(is_last=None)
    assert first is not None and first.startswith("old")
    first = get_first(is_last=True)
    assert first is not None and first.startswith("wide")


def make_busy() -> Server:
    """A server of 40 blocks on which a turn runs. Were it idle, any turn would start."""
    server = Server(num_blocks=40)
    running = server.arrive("running", 0.0, 20)
    assert server.engine.start_first(0.0) == running
    return server


def test_2_kv_stays_until_a_turn_that_goes_before_the_job_needs_the_memory() -> None:
    server = make_busy()
    # KV is worth its memory for 20 ms here, and the tool takes 10 ms.
    for _ in range(20):
        server.policy.on_tool_returned(TOOL_TURN, TOOL, 0.01)
    server.serve("job", 500.0, 60)
    leased = server.engine.driver.get_num_leased_blocks()
    assert leased == 15
    later = server.arrive("later", 900.0, 130)
    assert server.engine.start_first(900.0) is None
    assert server.engine.driver.get_num_leased_blocks() == leased
    server.engine.abort(later, 900.0)
    # Its job is older by 100 s, and 60 tokens cost 60 ms: 30 s at 500 s a second.
    server.arrive("job before", 400.0, 130)
    assert server.engine.start_first(901.0) is not None
    assert server.engine.driver.get_num_leased_blocks() < leased


def test_3_kv_that_lies_idle_for_longer_than_it_is_worth_goes_first_to_any_turn() -> None:
    server = make_busy()
    for _ in range(20):
        server.policy.on_tool_returned(TOOL_TURN, TOOL, 300.0)
    server.serve("job", 2.0, 60)
    leased = server.engine.driver.get_num_leased_blocks()
    # KV is worth its memory for 20 ms here, also if nobody waited when it was judged.
    server.arrive("later", 20.0, 100)
    assert server.engine.start_first(20.0) is not None
    assert server.engine.driver.get_num_leased_blocks() < leased


def test_4_jobs_whose_kind_rarely_comes_back_keep_nothing() -> None:
    server = Server(num_blocks=10_000)
    for n in range(600):
        server.serve(f"stranger{n}", float(n), 1200)
    stats = server.engine.driver.stats
    assert stats.num_lease_refusals[LeaseRefusal.NOT_EXPECTED_BACK] > 50


def test_4_while_most_new_jobs_do_not_those_that_did_go_first() -> None:
    server = Server(num_blocks=10_000)
    server.serve("agent", 0.0, 400)
    server.serve("agent", 1.0, 800)
    assert server.engine.driver.stats.num_leases_ended[LeaseEnd.HIT] == 1
    for n in range(200):
        server.serve(f"stranger{n}", 2.0, 1200)
    server.arrive("new", 500.0, 40)
    agent = server.arrive("agent", 500.0, 3000)
    assert server.engine.start_first(500.0) == agent


def test_5_plain_requests_go_before_all_jobs_while_they_take_less_than_half() -> None:
    server = Server(num_blocks=100_000)
    for n in range(30):
        server.serve(f"agent{n}", 0.0, 2000)
        server.serve(f"agent{n}", 1.0, 2100)
        server.serve(f"question{n}", 1.0, 40, tool=None)
    agent = server.arrive("agent0", 2.0, 2104)
    plain = server.arrive("question", 3.0, 80)
    assert server.engine.start_first(3.0) == plain
    assert server.engine.start_first(3.0) == agent

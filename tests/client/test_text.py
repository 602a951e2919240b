"""What prompts hold: lengths, what they share, whose words they quote."""

from __future__ import annotations

import json
from itertools import combinations, takewhile
from typing import Any

import pytest

from tenuto.client.http import WORDS, Answer, Conversation, TokenIds, Words
from tenuto.wire.response import Usage
from tenuto.workload import Job, Span, TurnSpec, count_shared_tokens, load_workload

FORMS = [TokenIds(), Words()]


def make_answer(*token_ids: int, text: str = "") -> Answer:
    return Answer(0.0, 0.0, token_ids or None, text, Usage())


def read_ids(field: str) -> list[int]:
    """The token ids of a prompt field."""
    prompt: list[int] = json.loads(f"{{{field}}}")["prompt"]
    return prompt


def count_common(a: list[int], b: list[int]) -> int:
    """Leading tokens that are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def write_all(
    jobs: tuple[Job, ...], salt: str = "run", **answers: Answer
) -> dict[tuple[str, int], list[int]]:
    """Every prompt, as ids; the jobs share their answers."""
    prompts = {}
    for job in jobs:
        conversation = Conversation(job, TokenIds(), salt, answers)
        for index, turn in enumerate(job.turns):
            prompts[job.job_id, index] = read_ids(conversation.write_prompt(turn))
    return prompts


def test_ids_are_in_range_and_as_many_as_asked_for() -> None:
    for num_tokens in (1, 2, 17, 4000):
        ids = [int(text) for text in TokenIds().write_text("a", num_tokens).split(",")]
        assert len(ids) == num_tokens
        assert all(10_000 <= each < 20_000 for each in ids)
    assert len({*ids}) > 3000  # 4,000 draws of 10,000 meet some 3,300 of them


def test_words_are_as_many_as_asked_for() -> None:
    assert len({*WORDS}) == 256
    for num_tokens in (1, 2, 17, 4000):
        assert len(Words().write_text("a", num_tokens).split(" ")) == num_tokens
    assert {*Words().write_text("a", 4000).split(" ")} == {*WORDS}


@pytest.mark.parametrize("form", FORMS)
def test_a_shorter_text_begins_the_longer_one(form: TokenIds | Words) -> None:
    assert form.write_text("a", 500).startswith(form.write_text("a", 499))
    assert form.write_text("a", 20) != form.write_text("b", 20)
    assert form.write_text("a", 20) == form.write_text("a", 20)


@pytest.mark.parametrize(("source", "window_s"), [("ab8", 5.0), ("swe-bench", 2.0)])
def test_prompts_share_what_their_spans_share(source: str, window_s: float) -> None:
    workload = load_workload(source, jps=1.0, window_s=window_s)
    prompts = write_all(workload.jobs)
    turns = {(job.job_id, n): turn for job in workload.jobs for n, turn in enumerate(job.turns)}
    assert len(turns) >= 16
    for key, turn in turns.items():
        assert len(prompts[key]) == turn.num_prompt_tokens
    for a, b in combinations(turns, 2):
        shared = count_common(prompts[a], prompts[b])
        # One token more may agree by chance.
        assert 0 <= shared - count_shared_tokens(turns[a].prompt, turns[b].prompt) <= 1


def test_another_run_shares_nothing() -> None:
    jobs = load_workload("ab8", jps=1.0, window_s=2.0).jobs
    here, there = write_all(jobs, "run-1"), write_all(jobs, "run-2")
    assert all(count_common(here[key], there[key]) <= 1 for key in here)


def make_job() -> Job:
    """A prompt of 3 tokens, an answer of 2, then 4 tokens of a tool."""
    task, out, tool = Span("task", 3), Span("out0", 2), Span("tool", 4)
    first = TurnSpec((task,), out, tool="ls", tool_s=1.0)
    return Job("j", 0.0, (first, TurnSpec((task, out, tool), Span("out1", 2))))


def test_prompts_quote_the_servers_answer() -> None:
    job = make_job()
    answers: dict[str, Answer] = {}
    conversation = Conversation(job, TokenIds(), "run", answers)
    first = read_ids(conversation.write_prompt(job.turns[0]))
    answers["out0"] = make_answer(31, 32, 33)
    second = read_ids(conversation.write_prompt(job.turns[1]))
    assert second[:3] == first
    assert second[3:5] == [31, 32]
    assert len(second) == 9
    # Told of another answer later, the conversation stays the one that was sent.
    answers["out0"] = make_answer(41, 42)
    assert read_ids(conversation.write_prompt(job.turns[1])) == second


@pytest.mark.parametrize("answer", [make_answer(31), make_answer(text="no ids")])
def test_an_answer_too_short_or_without_ids_is_written_like_any_text(answer: Answer) -> None:
    job = make_job()
    quoted = write_all((job,), out0=answer)
    assert quoted == write_all((job,))
    assert len(quoted["j", 1]) == 9


def test_chat_messages_alternate() -> None:
    job = make_job()
    conversation = Conversation(job, Words(), "run", {"out0": make_answer(text='I\'ll say "ls"')})

    def read_messages(turn: TurnSpec) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = json.loads(f"{{{conversation.write_prompt(turn)}}}")["messages"]
        return messages

    (first,) = read_messages(job.turns[0])
    assert first["role"] == "user"
    assert len(first["content"].split()) == 3
    messages = read_messages(job.turns[1])
    assert messages[0] == first
    assert messages[1] == {"role": "assistant", "content": 'I\'ll say "ls"'}
    assert messages[2]["role"] == "user"
    assert len(messages[2]["content"].split()) == 4


def test_neighbouring_texts_of_one_role_are_one_message() -> None:
    turn = TurnSpec((Span("system", 2), Span("task", 3)), Span("out", 1))
    field = Conversation(Job("j", 0.0, (turn,)), Words(), "run", {}).write_prompt(turn)
    (message,) = json.loads(f"{{{field}}}")["messages"]
    assert len(message["content"].split()) == 5


def test_any_content_id_makes_a_text() -> None:
    assert len(TokenIds().write_text("job\ud800 \n", 5).split(",")) == 5

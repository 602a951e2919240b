"""Equal text has equal tokens, and an answer's text is the tokens it was generated as."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.core.errors import ConfigError
from tenuto.sim.server.request import render_chat
from tenuto.sim.server.tokens import HfTokenizer, PieceTokenizer, TokenIds, Tokenizer
from tenuto.wire.openai_chat import read_prompt
from tenuto.wire.request import RequestError
from tests.sim_server.live import serve

PIECES = PieceTokenizer(128_256)


def render(messages: list[dict[str, Any]], max_tokens: int = 10**6) -> TokenIds:
    return render_chat(PIECES, read_prompt({"messages": messages}), (), max_tokens)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with whole words, made here."""
    tokenizers = pytest.importorskip("tokenizers")
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefgh", k=4)) for _ in range(120)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    lines = [" ".join(chance.choices(words, k=20)) for _ in range(500)] + words * 20
    tokenizer.train_from_iterator(lines, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def check_answers(tokenizer: Tokenizer) -> None:
    chance, words = random.Random(1), tokenizer.words
    for begins in (True, False):
        for _ in range(50):
            first = chance.choice(words.first if begins else words.other)
            token_ids = [first, *chance.choices(words.other, k=chance.randrange(40))]
            text = words.spell(token_ids, begins=begins)
            assert text.startswith(" ") != begins
            # Behind a prompt, and in pieces as they are streamed.
            assert list(tokenizer.encode(text)) == token_ids
            cut = chance.randrange(len(token_ids)) or 1
            pieces = words.spell(token_ids[:cut], begins=begins) + words.spell(token_ids[cut:], begins=False)
            assert pieces == text


def test_answers_in_pieces() -> None:
    check_answers(PIECES)
    check_answers(PieceTokenizer(1000))


def test_answers_of_a_real_tokenizer(folder: Path) -> None:
    check_answers(HfTokenizer(str(folder)))


@given(st.text(), st.text())
def test_pieces_are_ids_of_the_vocabulary_and_bounded(a: str, b: str) -> None:
    token_ids = PIECES.encode(a)
    assert token_ids == PIECES.encode(a)
    assert all(0 <= each < PIECES.vocab_size for each in token_ids)
    assert PIECES.max_chars is not None
    assert len(a) <= len(token_ids) * PIECES.max_chars
    # Behind a line's end nothing changes what stands before it.
    line = a + "x\n"
    assert PIECES.encode(line + b.lstrip())[: len(PIECES.encode(line)) - 1] == PIECES.encode(line)[:-1]


def test_pieces_are_about_as_long_as_tokens_are() -> None:
    text = (Path(__file__).parents[2] / "docs" / "design.md").read_text(encoding="utf-8")
    assert 3.3 < len(text) / len(PIECES.encode(text)) < 4.3


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=30)), min_size=1))
def test_a_conversation_begins_like_its_beginning(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in turns]
    opening = PIECES.encode("<|assistant|>")
    whole = render(messages)
    for end in range(1, len(messages)):
        part = render(messages[:end])[: -len(opening)]
        assert whole[: len(part)] == part


def test_content_in_parts_and_lone_surrogates() -> None:
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " you"}]}
    ]
    whole = [{"role": "user", "content": "Hello you"}]
    assert render(parts, 99) == render(whole, 99)
    broken = json.loads('[{"role": "user", "content": "\\ud800"}]')
    assert len(render(broken, 99)) > 0
    with pytest.raises(RequestError, match="longer than"):
        render(whole, 3)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(ConfigError, match=r"there is no .*tokenizer\.json"):
        HfTokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json:"):
        HfTokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="too few"):
        PieceTokenizer(50)


def test_a_conversation_with_a_real_tokenizer_hits(folder: Path) -> None:
    with serve(tokenizer=str(folder)) as live:
        messages = [{"role": "user", "content": "abcd efgh " * 30}]
        last_total = 0
        for _ in range(3):
            answer = live.chat(messages, max_tokens=30)
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == max(0, last_total - 1) // 16 * 16
            last_total = usage["total_tokens"]
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "go on " * 9}]

"""What a prompt's spans hold: token ids of exact length, or words where a server takes no ids.

A text is a fixed function of the run's salt and its content id, and the shorter of two texts of one id
begins the longer one. So prompts share on the server exactly what their spans share, and another run, with
another salt, finds nothing of this one in the cache. (Of 10,000 pairs of texts one agrees in its first token
by chance, none in its first block.)

- `TokenIds` sends `/v1/completions` a prompt of token ids: its length is exact on every server, without a
  tokenizer, and so is the answer that the server's own ids put into the next prompt.
- `Words` sends `/v1/chat/completions` messages of words that are one token each in the common
  vocabularies: about as long as planned, plus what the chat template adds. Records then show what the server
  counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import shake_128
from typing import NamedTuple, Protocol

from tenuto.client.http.stream import Answer
from tenuto.workload.schema import Job, Span, TurnSpec

NUM_DIGITS = 4
"""Ids are 10,000 to 19,999: within every vocabulary of 20,000 or more, and clear of the special tokens that
vocabularies begin or end with."""
_DIGITS = bytes(ord("0") + byte % 10 for byte in range(256))

_WORD_LIST = """
that with from this have your their they will which more other about were also part into these some self
when time under there than over know people like year such been help what would need through work import
many used only first child system between learn where health should well every high world even form water
sign just make years call then result those each because effect while process found count long after general
return read using lead list fact test life very being find right person back both follow does much main
before level great food start good school within class often around made said show same power design again
small allow care less example down take support human state called point number build play though body must
plan common three cell pass social method known real public still change better hand another report place
present project light energy open mean keep others best include direct name history create perform home stand
move among mark look type large think against group rest control here based pain area family object current
program early focus access last turn risk success making print certain period land case since local head post
along value order come text cost areas cause able problem view major course model else press hard line tool
special future natural plant complex role until second country works always step today given strong little
results range ways book next percent flow four similar short working past space amount free heart later
author words give paper
"""
WORDS = _WORD_LIST.split()
"""256 words, one token each in the vocabularies of SmolLM2, Mistral 7B and Mistral Nemo."""


class Part(NamedTuple):
    """A span's text, and whether the model wrote it."""

    text: str
    is_answer: bool


class Form(Protocol):
    """How a prompt goes to the server."""

    path: str
    """Where it is sent."""
    is_exact: bool
    """Whether prompts are token ids, and answers quoted by theirs: lengths are then as planned."""

    def write_text(self, name: str, num_tokens: int) -> str:
        """The first tokens of the text with that name."""

    def write_answer(self, answer: Answer, num_tokens: int) -> str | None:
        """The first tokens of an answer; None if they are not known."""

    def write_prompt(self, parts: Iterable[Part]) -> str:
        """The request's field for a prompt, as JSON without braces."""


class TokenIds:
    """Prompts of token ids."""

    path = "/v1/completions"
    is_exact = True

    def write_text(self, name: str, num_tokens: int) -> str:
        """Ids with commas between."""
        # Digit by digit for all ids at once, a hundred times as fast as id by id: a client that is busy with
        # writing prompts is late for everything else.
        digits = _make_bytes(name, NUM_DIGITS * num_tokens).translate(_DIGITS)
        text = bytearray(b"1....," * num_tokens)
        for place in range(NUM_DIGITS):
            text[place + 1 :: NUM_DIGITS + 2] = digits[place::NUM_DIGITS]
        return text[:-1].decode()

    def write_answer(self, answer: Answer, num_tokens: int) -> str | None:
        """The ids the server sent, if they are enough."""
        if answer.token_ids is None or len(answer.token_ids) < num_tokens:
            return None
        return ",".join(map(str, answer.token_ids[:num_tokens]))

    def write_prompt(self, parts: Iterable[Part]) -> str:
        """One list of ids."""
        return f'"prompt": [{",".join(part.text for part in parts)}]'


class Words:
    """Chat messages: the model's answers as the assistant's, all else as the user's."""

    path = "/v1/chat/completions"
    is_exact = False

    def write_text(self, name: str, num_tokens: int) -> str:
        """As many words."""
        return " ".join([WORDS[byte] for byte in _make_bytes(name, num_tokens)])

    def write_answer(self, answer: Answer, num_tokens: int) -> str | None:
        """What the server wrote, whole."""
        return answer.text or None

    def write_prompt(self, parts: Iterable[Part]) -> str:
        """Messages of alternating roles, as some chat templates want them."""
        messages: list[dict[str, str]] = []
        for text, is_answer in parts:
            role = "assistant" if is_answer else "user"
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += f" {text}"
            else:
                messages.append({"role": role, "content": text})
        return f'"messages": {json.dumps(messages)}'


FORMS: dict[str, type[TokenIds] | type[Words]] = {"ids": TokenIds, "words": Words}


class Conversation:
    """One job's prompts, each text written once while the prompts go on holding it.

    `answers` holds the server's answers by the content id of the output that was planned; it is shared with
    the jobs that this job started. An output that is not in it is written like any other text.
    """

    def __init__(self, job: Job, form: Form, salt: str, answers: dict[str, Answer]) -> None:
        self._form = form
        self._salt = salt
        self._answers = answers
        self._outputs = frozenset(turn.output.content_id for turn in job.turns)
        self._parts: dict[Span, Part] = {}

    def write_prompt(self, turn: TurnSpec) -> str:
        """The request's field for a turn's prompt, as JSON without braces."""
        self._parts = {span: self._parts.get(span) or self._write_part(span) for span in turn.prompt}
        return self._form.write_prompt(self._parts[span] for span in turn.prompt)

    def _write_part(self, span: Span) -> Part:
        answer = self._answers.get(span.content_id)
        text = None if answer is None else self._form.write_answer(answer, span.num_tokens)
        if text is None:
            text = self._form.write_text(f"{self._salt}/{span.content_id}", span.num_tokens)
        return Part(text, span.content_id in self._outputs)


def _make_bytes(name: str, num_bytes: int) -> bytes:
    # Of an extendable-output function, a shorter output begins every longer one.
    return shake_128(name.encode(errors="surrogatepass")).digest(num_bytes)

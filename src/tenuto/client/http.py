"""Requests to an OpenAI-compatible server: how they are written and sent, and their answers or errors.

A prompt's texts are a fixed function of the run's salt and their content ids. If two texts have the same id,
the longer one begins with the shorter one. So prompts share prefixes on the server exactly as the workload
says. Another run uses another salt and gets no prefix hits from this one. (By chance, 1 of 10,000 pairs of
texts has the same first token; no pair has the same first block.)

- `TokenIds` sends prompts of token ids to `/v1/completions`. Prompt lengths are exact on every server,
  without a tokenizer. The answer in the next prompt is also exact, because it consists of the server's own
  token ids.
- `Words` sends messages of words to `/v1/chat/completions`. Each word is one token in common vocabularies. A
  prompt has about the planned length, plus the tokens of the chat template. The records then contain the
  server's counts.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import shake_128
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp

from tenuto.client.address import get_base_url
from tenuto.core.errors import ConfigError, TenutoError
from tenuto.core.requests import SESSION_HEADER, get_bounded_id, make_fields
from tenuto.wire import Format, get_format, openai_chat, openai_completions
from tenuto.wire.request import Message, write_openai_request
from tenuto.wire.response import (
    LineReader,
    MalformedEvent,
    Response,
    Usage,
    get_data,
    get_error_message,
    is_error,
    parse_event,
)
from tenuto.workload.hints import SayHints, say_job
from tenuto.workload.schema import Job, Prompt, Span, TurnSpec

KEEP_ALIVE_S = 3.0
"""Idle connections are not used after this time. Uvicorn, which vLLM and SGLang use, closes them after 5 s. A
request that is sent while the connection closes is lost."""
AFTER_DONE_S = 1.0
"""How many seconds a connection may stay open after the last event before the client drops it."""
SHORT_REQUEST_S = 10.0
"""Time limit for questions about the server itself, in seconds."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Largest size of an answer's stream or a page. A server that never stops would fill the client's memory."""
_MAX_ERROR_BYTES = 2000
_SHOWN_CHARS = 200
_RETRIED_STATUS = frozenset({408, 409, 425, 429})


class RequestFailed(TenutoError):
    """A request got no complete answer.

    `kind` is one of: `connect` (no connection), `reset` (the connection broke), `timeout`, `http N` (an error
    status), `malformed` (not HTTP, or not an event stream), `cut off` (the stream ended early), `empty` (no
    token), `server error` (an error within the stream).
    """

    def __init__(
        self, kind: str, detail: str, *, can_retry: bool = True, retry_after_s: float | None = None
    ) -> None:
        super().__init__(make_printable(detail))
        self.kind = kind
        self.can_retry = can_retry
        """False if the same request would fail again, because the server understood and refused it."""
        self.retry_after_s = retry_after_s
        """Seconds that the server asks to wait before a retry; None if it does not say."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. Times are on the clock that was passed to `AnswerStream.feed`."""

    first_token_s: float
    last_token_s: float
    token_ids: tuple[int, ...] | None
    """None if the server did not send the ids, or did not send them for every piece of text."""
    text: str
    usage: Usage
    gaps_s: tuple[float, ...] = field(default=(), compare=False)
    """Seconds between the pieces that held tokens. A piece may hold several."""

    @property
    def num_tokens(self) -> int | None:
        """The number of token ids if they were sent; otherwise the server's own count."""
        return self.usage.output_tokens if self.token_ids is None else len(self.token_ids)


class Client:
    """Sends requests to one server. An async context manager.

    `timeout_s` limits each request from its sending to its last event. Times are on the event loop's clock.
    """

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        self.url = get_base_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._ending: set[aiohttp.ClientResponse] = set()
        """Responses whose last event has come, and perhaps not their end."""

    async def __aenter__(self) -> Self:
        # Each connection is an open file. Many systems allow only 1,024 by default.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            headers={"Content-Type": "application/json", **self._headers},
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for response in self._ending:
            response.close()
        await self._session.close()

    async def stream_answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send a streaming request and read the whole answer. Raises RequestFailed."""
        stream = AnswerStream(get_format(path))
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read_stream(path, body, headers, stream)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _explain(error, self._timeout_s) from error
        return stream.finish()

    async def _read_stream(
        self, path: str, body: bytes, headers: Mapping[str, str], stream: AnswerStream
    ) -> None:
        # Pass a file object: aiohttp sends it in pieces, so a large prompt does not block other requests.
        data = io.BytesIO(body)
        loop = asyncio.get_running_loop()
        response = await self._session.post(
            self.url + path, data=data, headers=headers, allow_redirects=False
        )
        try:
            if response.status != 200:
                raise await _read_refusal(response)
            # The turn ends with the last event, as for an agent. Servers and proxies may end the response
            # later, or never.
            while not stream.is_done and (piece := await response.content.readany()):
                stream.feed(piece, loop.time())
        finally:
            if stream.is_done:
                # If it ends in time, its connection is used again.
                self._ending.add(response)
                loop.call_later(AFTER_DONE_S, self._drop, response)
            else:
                response.close()

    def _drop(self, response: aiohttp.ClientResponse) -> None:
        self._ending.discard(response)
        response.close()

    async def get_text(self, path: str) -> str:
        """Fetch a page of the server as text. Raises RequestFailed."""
        try:
            async with (
                asyncio.timeout(SHORT_REQUEST_S),
                # What another server says does not count, and the key is for this one.
                self._session.get(self.url + path, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise await _read_refusal(response)
                page = bytearray()
                async for piece in response.content.iter_any():
                    page += piece
                    _check_size(len(page), path)
                return page.decode(errors="replace")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _explain(error, SHORT_REQUEST_S) from error

    async def get_json(self, path: str) -> Any:
        """Fetch a page of the server as JSON. Raises RequestFailed."""
        text = await self.get_text(path)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise RequestFailed("malformed", f"{path} is not JSON: {text[:200]!r}", can_retry=False) from None


def _check_size(num_bytes: int, what: str) -> None:
    if num_bytes > MAX_ANSWER_BYTES:
        raise RequestFailed("malformed", f"{what} has more than {MAX_ANSWER_BYTES // 2**20} MiB")


async def _read_refusal(response: aiohttp.ClientResponse) -> RequestFailed:
    body = (await response.content.read(_MAX_ERROR_BYTES)).decode(errors="replace")
    try:
        message = get_error_message(json.loads(body))
    except (ValueError, RecursionError):
        message = None
    status, pause = response.status, response.headers.get("Retry-After", "")
    return RequestFailed(
        f"http {status}",
        message or body.strip() or response.reason or "without a word",
        can_retry=status >= 500 or status in _RETRIED_STATUS,
        # HTTP also allows a date here, but no inference server sends one.
        retry_after_s=float(pause) if pause.isdecimal() else None,
    )


def _explain(error: Exception, timeout_s: float) -> RequestFailed:
    if isinstance(error, TimeoutError):
        return RequestFailed("timeout", f"no whole answer within {timeout_s:g} s")
    kind = "connect" if isinstance(error, aiohttp.ClientConnectorError) else "reset"
    if isinstance(error, aiohttp.ClientResponseError):
        return RequestFailed("malformed", f"not HTTP: {error.message}")
    if isinstance(error, aiohttp.InvalidURL):
        return RequestFailed("connect", f"not a URL: {error}", can_retry=False)
    # aiohttp names its default for TLS, also without TLS.
    return RequestFailed(kind, str(error).replace(" ssl:default", "") or type(error).__name__)


class AnswerStream:
    """One answer while it is being received; no I/O. `feed` and `finish` raise RequestFailed.

    The bytes may arrive in pieces of any size. The answer's times are the arrival times of the pieces that
    contain its first and its last token.
    """

    def __init__(self, form: Format) -> None:
        self.is_done = False
        self._format = form
        self._num_bytes = 0
        self._last_s = 0.0
        """When the last bytes arrived."""
        self._lines = LineReader()
        self._response = Response()

    def feed(self, data: bytes, now_s: float) -> None:
        """Process the next bytes, which arrived at `now_s`."""
        self._num_bytes += len(data)
        self._last_s = now_s
        _check_size(self._num_bytes, "the answer")
        for line in self._lines.feed(data):
            self._read_line(line, now_s)

    def finish(self) -> Answer:
        """Return the answer after all bytes have arrived."""
        response = self._response
        self._read_line(self._lines.finish(), self._last_s)
        if not (self.is_done or response.is_finished):
            raise RequestFailed(
                "cut off", f"the stream ended after {response.num_pieces} pieces of the answer"
            )
        if response.first_token_s is None:
            raise RequestFailed("empty", "the answer holds no token")
        calls = [
            {"index": key, "function": {"name": name, **({"arguments": arguments} if arguments else {})}}
            for key, name, arguments in response.calls
        ]
        return Answer(
            first_token_s=response.first_token_s,
            last_token_s=response.last_token_s,
            token_ids=None if response.token_ids is None else tuple(response.token_ids),
            # All that the model wrote, as the next prompt quotes it.
            text="".join(response.reasoning) + response.text + (json.dumps(calls) if calls else ""),
            usage=response.usage,
            gaps_s=tuple(response.gaps_s),
        )

    def _read_line(self, line: bytes, now_s: float) -> None:
        try:
            data = get_data(line, strict=True)
            if data is None:
                return
            event = parse_event(data)
        except MalformedEvent as error:
            raise RequestFailed("malformed", f"{error.reason}: {_show(error.data)}") from None
        if event is None:
            self.is_done = True
            return
        if is_error(event):
            raise RequestFailed("server error", get_error_message(event) or _show(data))
        choices = event.get("choices")
        if choices and not (isinstance(choices, list) and isinstance(choices[0], dict)):
            raise RequestFailed("malformed", f"an event's choices are not a list of objects: {_show(data)}")
        self._response.add(self._format.read_event(event), now_s)


def make_printable(text: str) -> str:
    """Turn a server's message into one line of limited length that is safe to print on a terminal."""
    line = " ".join(text.split())
    shown = line if len(line) <= 2 * _SHOWN_CHARS else line[: 2 * _SHOWN_CHARS] + "…"
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in shown)


def _show(data: bytes) -> str:
    text = data.decode(errors="replace")
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")


@dataclass(frozen=True, slots=True)
class RequestWriter:
    """Writes the requests of one run.

    The output's length is fixed (`min_tokens` = `max_tokens`, `ignore_eos`) unless its format is forced.
    Decoding is greedy, so the same prompts get the same answers. The job's id goes into `X-Session-ID`, which
    every server and router accepts. All other hints about the job go into `vllm_xargs`.
    """

    model: str
    form: Form
    run_id: str
    """Prefix of every job id that is sent, so that a server distinguishes the jobs of two runs."""
    say_hints: SayHints = say_job
    quotes_answers: bool = True
    """Later prompts quote the answers, so ask for token ids. vLLM then repeats the prompt's token ids too."""
    forced_format: Mapping[str, Any] | None = None
    """vLLM's `structured_outputs`. The answer ends with its format, or at the planned length."""

    def write_headers(self, job: Job, index: int = 0) -> dict[str, str]:
        """The headers of a job's turn."""
        job_id = self.say_hints(job, index).job_id
        return {SESSION_HEADER: self._make_job_id(job_id)} if job_id is not None else {}

    def write_body(self, job: Job, index: int, prompt_field: str) -> bytes:
        """The body of a job's turn. `prompt_field` is the prompt, already written."""
        turn = job.turns[index]
        fields = {**write_openai_request(self.model, turn.num_output_tokens), "temperature": 0}
        if self.forced_format is None:
            fields |= {"min_tokens": turn.num_output_tokens, "ignore_eos": True}
        else:
            fields["structured_outputs"] = self.forced_format
        if self.form.is_exact and self.quotes_answers:
            fields["return_token_ids"] = True
        hints = self.say_hints(job, index)
        if hints.job_id is not None:
            hints = replace(hints, job_id=self._make_job_id(hints.job_id))
        hint_fields = make_fields(hints)
        if hint_fields.keys() - {"job_id"}:  # if the hints have only the id, the header is enough
            fields["vllm_xargs"] = hint_fields
        # Join the parts as text: prompts are long, and most of the text was written for an earlier turn.
        return f"{json.dumps(fields)[:-1]}, {prompt_field}}}".encode()

    def write_alone(self, name: str, prompt: Prompt, num_tokens: int) -> tuple[bytes, dict[str, str]]:
        """The body and the headers of a job's only turn, whose answer has `num_tokens`."""
        turn = TurnSpec(prompt, Span(f"{name}/out", num_tokens))
        job = Job(name, 0.0, (turn,))
        text = Conversation(job, self.form, self.run_id, {}).write_prompt(turn)
        return self.write_body(job, 0, text), self.write_headers(job)

    def _make_job_id(self, job_id: str) -> str:
        # A trace's ids may be invalid in a header. Those are replaced by a digest.
        return get_bounded_id(f"{self.run_id}/{job_id}") or self.run_id


class Conversation:
    """The prompts of one job. Each text is written once and kept while later prompts still contain it.

    `answers` maps the content id of a planned output to the server's answer. It is shared with the jobs that
    this job started. An output without an entry is written like any other text.
    """

    def __init__(self, job: Job, form: Form, salt: str, answers: dict[str, Answer]) -> None:
        self._form = form
        self._salt = salt
        self._answers = answers
        self._outputs = frozenset(turn.output.content_id for turn in job.turns)
        self._parts: dict[Span, Part] = {}

    def write_prompt(self, turn: TurnSpec) -> str:
        """The request's field for a turn's prompt, as JSON without the surrounding braces."""
        self._parts = {span: self._parts.get(span) or self._write_part(span) for span in turn.prompt}
        return self._form.write_prompt(self._parts[span] for span in turn.prompt)

    def _write_part(self, span: Span) -> Part:
        answer = self._answers.get(span.content_id)
        text = None if answer is None else self._form.write_answer(answer, span.num_tokens)
        if text is None:
            text = self._form.write_text(f"{self._salt}/{span.content_id}", span.num_tokens)
        return Part(text, span.content_id in self._outputs)


NUM_DIGITS = 4
"""Token ids are 10,000 to 19,999. Every vocabulary of 20,000 or more tokens contains them, and they avoid the
special tokens at the beginning or end of vocabularies."""
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


class TokenIds:
    """Prompts of token ids."""

    path = openai_completions.PATH
    is_exact = True
    """Prompts quote answers by their token ids, so that all lengths match the plan."""

    def write_text(self, name: str, num_tokens: int) -> str:
        """The first token ids of the text with that name, separated by commas."""
        # Compute each digit for all ids at once, which is 100 times as fast as one id at a time. While the
        # client writes prompts, everything else is delayed.
        digits = _make_bytes(name, NUM_DIGITS * num_tokens).translate(_DIGITS)
        text = bytearray(b"1....," * num_tokens)
        for place in range(NUM_DIGITS):
            text[place + 1 :: NUM_DIGITS + 2] = digits[place::NUM_DIGITS]
        return text[:-1].decode()

    def write_answer(self, answer: Answer, num_tokens: int) -> str | None:
        """The first token ids that the server sent. None if there are too few."""
        if answer.token_ids is None or len(answer.token_ids) < num_tokens:
            return None
        return ",".join(map(str, answer.token_ids[:num_tokens]))

    def write_prompt(self, parts: Iterable[Part]) -> str:
        """The request's field for a prompt: one list of token ids, as JSON without the braces."""
        return openai_completions.write_prompt(part.text for part in parts)


class Words:
    """Chat messages. The model's answers have the role assistant; all other texts have the role user."""

    path = openai_chat.PATH
    is_exact = False

    def write_text(self, name: str, num_tokens: int) -> str:
        """The first words of the text with that name, one per token."""
        return " ".join([WORDS[byte] for byte in _make_bytes(name, num_tokens)])

    def write_answer(self, answer: Answer, num_tokens: int) -> str | None:
        """The complete text that the server wrote."""
        return answer.text or None

    def write_prompt(self, parts: Iterable[Part]) -> str:
        """The request's field for a prompt: messages with alternating roles, as some chat templates need."""
        by_role = groupby(parts, lambda part: "assistant" if part.is_answer else "user")
        return openai_chat.write_prompt(
            Message(role, [" ".join(part.text for part in group)]) for role, group in by_role
        )


Form = TokenIds | Words
FORMS: dict[str, type[TokenIds] | type[Words]] = {"ids": TokenIds, "words": Words}


def _make_bytes(name: str, num_bytes: int) -> bytes:
    # With an extendable-output function, a longer output begins with every shorter one.
    return shake_128(name.encode(errors="surrogatepass")).digest(num_bytes)


def read_format(text: str) -> dict[str, Any]:
    """Make the request's `structured_outputs` from an option's text. Raises ConfigError.

    `json` means any JSON object; `regex:PATTERN` is a pattern. Any other text names a JSON schema file.
    """
    if text == "json":
        return {"json_object": True}
    if text.startswith("regex:"):
        pattern = text.removeprefix("regex:")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"--force-format: {pattern!r} is not a regular expression: {error}") from error
        if not pattern:
            raise ConfigError("--force-format: the regular expression is empty")
        return {"regex": pattern}
    try:
        schema = json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--force-format wants json, regex:PATTERN or a file with a JSON schema; {text}: {error}"
        ) from error
    if not isinstance(schema, dict):
        raise ConfigError(f"--force-format: {text} holds no JSON schema: not an object")
    return {"json": schema}

"""Makes jobs from conversations with text: agents' own logs, and the traffic that `tenuto record` sees.

Only these facts about the text are kept: lengths, which beginnings are equal, and the tools called. If a log
has no token counts, 4 characters count as one token, and the turn's `extra` says so.

A prompt is a sequence of pieces: blocks of 16 tokens if token ids are known, otherwise messages. A message is
normalised: role, text and tool calls, without anything that clients add or drop when they send an answer
back. So the next prompt of a conversation begins with the pieces of this one, followed by the pieces of its
answer. The hash of a piece covers everything before it, like the block hash of a KV cache. It is keyed with
the salt, so a guess of the text cannot be checked without the salt.

    turn 1   pieces a b c      →  [c 400]                            answer  [out1 20]
    turn 2   pieces a b c d e  →  [c 400][out1 20][e 112]            d is the answer
    another  pieces a b x      →  [c 290][x 85]                      alike up to b, then not

A beginning that was seen before keeps its spans. The rest becomes one new span, named by its last hash. An
answer with reasoning is part of the rest (d e): reasoning comes first in it, and is not sent again.
"""

from __future__ import annotations

import json
import re
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from tenuto.core.tool_calls import find_tool_call
from tenuto.core.types import ToolCall
from tenuto.records.codec import MAX_SECONDS, MAX_TOKENS, Fields
from tenuto.wire.openai_chat import read_message, read_reasoning
from tenuto.wire.request import Message
from tenuto.wire.response import read_usage
from tenuto.workload.schema import Job, Prompt, Span, TurnSpec

GUESSED = "guessed_lengths"
"""Key in a turn's `extra`, true where lengths were guessed from text."""
BLOCK_TOKENS = 16
"""Tokens per piece if token ids are known: vLLM's smallest block, so that every block size can be
replayed."""
HASH_BYTES = 8
"""Size of a piece's hash."""
TOKENS_START, TEXTS_START = b"tokens", b"texts"
"""Start values of the hash chains. They differ, so a block of tokens never has the hash of a text."""
MAX_REMEMBERED = 300_000
"""Number of latest pieces that are kept: 5 million tokens of different content."""
MAX_SPANS = 4096
"""Most spans of a prompt that grows turn by turn. A context of a million tokens is full after about a
thousand turns."""
TEXT_PIECE_CHARS = 256
"""A prompt that is one text is split into pieces of this length."""
CHARS_PER_TOKEN = 4
"""Used if token counts are missing. About the average for English and code in the common vocabularies."""
_TAIL_CHARS = 65_536
"""A tool call is searched for only in this many characters at the end of an output."""
_ASSIGNMENT = re.compile(r"\s*[A-Za-z_]\w*=(?:\"[^\"\\$`]*\"|'[^'\\]*'|[^\s\"'\\$`()<>|&;]*)\s+")
"""Of one plain word, or of quoted text. After another, nothing tells where the value ends, and the command
begins."""
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w.:+-]{0,63}")


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """One answer of a model, its prompt, and what is known about them."""

    place: Fields
    """Its place in the file, for error messages."""
    pieces: Sequence[str]
    """The conversation in pieces. Its turns share them: copies would have the square of its length."""
    num_pieces: int
    """How many of them are before it."""
    message: Mapping[str, Any] | None
    """The answer; None where the log ends before it."""
    usage: Mapping[str, Any]
    sent_s: float | None = None
    """When its request was sent, on the log's clock."""
    tool_s: float = 0.0
    """Seconds from its end until the next request."""
    calls: tuple[tuple[Any, Any], ...] = ()
    """Name and arguments of its tool calls, where the log has them beside the message."""


class JobMaker:
    """Makes jobs, and finds what their prompts share with each other."""

    def __init__(self) -> None:
        self._hasher = Hasher(secrets.token_bytes(32))
        self._contents = Contents(self._name)
        self._names: dict[bytes, str] = {}
        self._last: tuple[tuple[str, ...], Pieces] = ((), Pieces([], []))

    def make_job(self, job_id: str, logged: Sequence[LoggedTurn], start_s: float) -> Job:
        """The job of one conversation; `start_s` is the log's clock when the workload begins.

        Raises DataError if a time or a prompt is out of bounds.
        """
        start, *times = [_get_seconds(each, start_s) for each in logged]
        turns = [
            self._make_turn(f"{job_id}/out{index}", each, at_s)
            for index, (each, at_s) in enumerate(zip(logged, [None, *times], strict=True))
        ]
        turns[-1] = replace(turns[-1], tool_s=0.0)
        return Job(job_id, start or 0.0, tuple(turns))

    def _make_turn(self, output_id: str, logged: LoggedTurn, at_s: float | None) -> TurnSpec:
        texts = tuple(logged.pieces[: logged.num_pieces])
        pieces = self.hash_prompt(texts)
        num_prompt, num_output = _get_counts(logged)
        answer = read_message({"role": "assistant", **(logged.message or {})})
        is_guessed = num_prompt is None or num_output is None
        num_chars = sum(map(len, texts))
        beginning = self._contents.resolve(
            pieces, max(len(texts), num_prompt or num_chars // CHARS_PER_TOKEN)
        )
        prompt = beginning.prompt
        check_growth(prompt, logged.place)
        written = write_piece(answer)
        output = Span(output_id, num_output or max(1, len(written) // CHARS_PER_TOKEN))
        if logged.message is not None and not _has_reasoning(logged.message, logged.usage):
            after = self._hasher.hash_texts([written], pieces.hashes[-1])
            self._contents.remember(beginning.followed_by(output), after, 0, beginning.num_tokens)
        tool = find_tool(answer.text, logged.calls or answer.calls)
        return TurnSpec(
            prompt=prompt,
            output=output,
            tool=tool.name if tool else None,
            command=tool.command if tool else None,
            tool_s=logged.tool_s,
            at_s=at_s,
            extra={GUESSED: True} if is_guessed else {},
        )

    def hash_prompt(self, prompt: tuple[str, ...]) -> Pieces:
        """The hashes of its pieces."""
        # Most prompts continue the one before them. Only what is new is hashed.
        before, known = self._last
        if prompt[: len(before)] != before:
            before, known = (), Pieces([], [])
        new = self._hasher.hash_texts(prompt[len(before) :], *known.hashes[-1:])
        pieces = Pieces([*known.hashes, *new.hashes], [*known.weights, *new.weights])
        self._last = prompt, pieces
        return pieces

    def _name(self, last_hash: bytes) -> str:
        # The salt is random; numbers are the same each time a log is read.
        return self._names.setdefault(last_hash, f"text{len(self._names)}")


def _get_seconds(logged: LoggedTurn, start_s: float) -> float | None:
    if logged.sent_s is None:
        return None
    seconds = max(0.0, logged.sent_s - start_s)
    if (most := max(seconds, logged.tool_s)) > MAX_SECONDS:
        problem = f"must be within {MAX_SECONDS:g} seconds of the first, got {most:g}"
        raise logged.place.error("time", problem)
    return seconds


def _get_counts(logged: LoggedTurn) -> tuple[int | None, int | None]:
    """Tokens of the prompt and of the answer, as far as the log has counts."""
    found = [
        logged.usage.get(new, logged.usage.get(old))
        for new, old in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
    ]
    prompt, output = (value if type(value) is int and 0 < value <= MAX_TOKENS else None for value in found)
    return prompt, output


def _has_reasoning(message: Mapping[str, Any], usage: Mapping[str, Any]) -> bool:
    """Whether the next prompt leaves a part of the answer out, as text or hidden by the provider."""
    names = (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens"))
    counts = [found.reasoning_tokens for each in names if (found := read_usage(usage, *each))]
    return bool(read_reasoning(message)) or any(counts)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A prompt, or an answer that continues one, in pieces."""

    hashes: list[bytes]
    weights: list[int]
    """Tokens of each piece; characters if tokens are not known."""


class Hasher:
    """Makes the chained hashes of one recording."""

    def __init__(self, salt: bytes) -> None:
        self._key = blake2b(salt, digest_size=32).digest()

    def hash_tokens(self, token_ids: Sequence[int], after: bytes = TOKENS_START) -> Pieces:
        """In blocks, the last of which may not be full; `after` is the hash of the block before them."""
        ids = array("i", token_ids)
        blocks = [ids[at : at + BLOCK_TOKENS] for at in range(0, len(ids), BLOCK_TOKENS)]
        return self._chain([block.tobytes() for block in blocks], [len(block) for block in blocks], after)

    def hash_texts(self, texts: Sequence[str], after: bytes = TEXTS_START) -> Pieces:
        """Text by text; `after` is the hash of the text before them."""
        encoded = [text.encode(errors="surrogatepass") for text in texts]
        return self._chain(encoded, [max(1, len(text)) for text in encoded], after)

    def hash_id(self, text: str) -> str:
        """A name in place of an id."""
        return blake2b(
            text.encode(errors="surrogatepass"), digest_size=8, key=self._key, person=b"id"
        ).hexdigest()

    def _chain(self, encoded: list[bytes], weights: list[int], parent: bytes) -> Pieces:
        hashes = []
        for piece in encoded:
            parent = blake2b(b"\x00".join((parent, piece)), digest_size=HASH_BYTES, key=self._key).digest()
            hashes.append(parent)
        return Pieces(hashes, weights)


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """A beginning of a prompt: its last span, and the shorter beginning before that.

    Prompts share what they begin with, so a conversation's spans are in memory once, not once per turn.
    """

    before: Beginning | None
    """None if it is empty."""
    last: Span
    num_tokens: int

    @property
    def prompt(self) -> Prompt:
        """Its spans in order."""
        spans = []
        part = self
        while part.before is not None:
            spans.append(part.last)
            part = part.before
        return tuple(reversed(spans))

    def followed_by(self, span: Span) -> Beginning:
        """This beginning and one span more, if the span has tokens."""
        if not span.num_tokens:
            return self
        return Beginning(self, span, self.num_tokens + span.num_tokens)

    def cut(self, num_tokens: int) -> Beginning:
        """Its first tokens."""
        part = self
        while part.before is not None and part.num_tokens > num_tokens:
            before = part.before
            if before.num_tokens < num_tokens:
                return before.followed_by(Span(part.last.content_id, num_tokens - before.num_tokens))
            part = before
        return part


_EMPTY = Beginning(None, Span("", 0), 0)


class Contents:
    """The beginnings of the prompts seen so far, and their spans. Beyond a limit, the oldest are dropped."""

    def __init__(self, name: Callable[[bytes], str] = bytes.hex) -> None:
        """`name` makes the name of a new span from its last hash."""
        self._name = name
        self._seen: OrderedDict[bytes, tuple[Beginning, int]] = OrderedDict()

    def resolve(self, pieces: Pieces, num_tokens: int) -> Beginning:
        """A prompt of `num_tokens`. Later prompts with the same beginnings get the same spans.

        New pieces share the tokens that known pieces leave, by their weights.
        """
        known, start = self._find(pieces, num_tokens)
        rest = num_tokens - known.num_tokens
        # The last hash covers everything before it, so it is unique.
        whole = known.followed_by(Span(self._name(pieces.hashes[-1]), rest))
        self.remember(whole, pieces, start, known.num_tokens)
        return whole

    def remember(self, whole: Beginning, pieces: Pieces, start: int, num_before: int) -> None:
        """Remember the pieces from `start` on as what a prompt holds after its first `num_before` tokens."""
        rest = whole.num_tokens - num_before
        total = max(1, sum(pieces.weights[start:]))
        ends = accumulate(pieces.weights[start:])
        for piece_hash, weight in zip(pieces.hashes[start:], ends, strict=True):
            self._seen[piece_hash] = (whole, num_before + rest * weight // total)
        while len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)

    def _find(self, pieces: Pieces, num_tokens: int) -> tuple[Beginning, int]:
        """The longest beginning seen before that leaves a token for every piece after it."""
        num_pieces = len(pieces.hashes)
        for index in range(num_pieces - 1, -1, -1):
            seen = self._seen.get(pieces.hashes[index])
            if seen is None:
                continue
            num_after = num_pieces - 1 - index
            if seen[1] == num_tokens if num_after == 0 else seen[1] + num_after <= num_tokens:
                self._seen.move_to_end(pieces.hashes[index])
                whole, num_known = seen
                return whole.cut(num_known), index + 1
        return _EMPTY, 0


def check_growth(prompt: Prompt, place: Fields) -> None:
    """Raise DataError if a prompt has too many spans, because a conversation's prompts have their square."""
    if len(prompt) > MAX_SPANS:
        raise place.error("prompt", f"grows over more than {MAX_SPANS // 2} turns")


def read_choice(response: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The message of a response's first choice; None if it has none."""
    choices = response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    return message if isinstance(message, dict) else None


def cut_text(text: str) -> list[str]:
    """A text in pieces of one length; only the last may be shorter."""
    return [text[at : at + TEXT_PIECE_CHARS] for at in range(0, len(text), TEXT_PIECE_CHARS)]


def write_message(message: Mapping[str, Any]) -> str:
    """A chat message as a piece."""
    return write_piece(read_message(message))


def write_piece(message: Message) -> str:
    """A message in the form in which messages are compared."""
    return "\x00".join([str(message.role), message.text, *(write_call(*call) for call in message.calls)])


def write_call(name: Any, arguments: Any) -> str:
    """A tool call; arguments as an object or as the JSON of one."""
    if isinstance(arguments, str):
        try:
            # Streams of calls without arguments have no text for them; clients send them back as {}.
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return f"{name}\x01{arguments}"
    return f"{name}\x01{json.dumps(arguments, sort_keys=True)}"


def find_tool(text: str, calls: Sequence[tuple[Any, Any]]) -> ToolCall | None:
    """The tool call that an answer ends with: the last of `calls`, or what its text shows."""
    if not calls:
        return find_tool_call(text[-_TAIL_CHARS:])
    name, arguments = calls[-1]
    try:
        decoded = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
        call = json.dumps({"name": name, "arguments": decoded})
    except (ValueError, RecursionError):
        call = json.dumps({"name": name, "arguments": {}})
    return find_tool_call(f"<tool_call>\n{call}\n</tool_call>")


def get_plain_tool(tool: ToolCall) -> str:
    """A tool's name that reveals nothing else.

    A shell command's first word may be an assignment (of a key, say) or a path with a user's name in it.
    """
    name, command = tool.name, tool.command
    if "=" in name and command is not None:
        while match := _ASSIGNMENT.match(command):
            command = command[match.end() :]
        name = next(iter(command.split(None, 1)), "")
    name = name.rsplit("/", 1)[-1]
    return name if _PLAIN_NAME.fullmatch(name) else "other"

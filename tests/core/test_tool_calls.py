"""Tool calls as models write them, whole and cut, and text that means harm."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.core import tool_calls
from tenuto.core.requests import MAX_TOOL_CHARS
from tenuto.core.tool_calls import FORMS, MAX_COMMAND_CHARS, find_tool_call, is_cut
from tenuto.core.types import ToolCall

LS = ToolCall("ls", "ls -la /src")
WEATHER = ToolCall("get_weather", '{"city": "Oslo"}')


def write_invoke(prefix, end=""):
    """A shell call in the XML that Anthropic began and others prefix."""
    return (
        f'<{prefix}invoke name="bash">\n<{prefix}parameter name="command"{end}>ls -la /src'
        f"</{prefix}parameter>\n</{prefix}invoke>"
    )


SHELL_CALLS = {
    "bash block": "I look around.\n\n```bash\nls -la /src\n```",
    "bash block with a title": 'I look around.\n\n```bash title="look"\nls -la /src\n```',
    "bash block, Qwen's end": "```bash\nls -la /src\n```<|im_end|>",
    "bash block, Mistral's end": "```sh\nls -la /src\n```</s>",
    "bash block, MiniMax's end": "```sh\nls -la /src\n```[e~[\n",
    "mini-swe-agent": "THOUGHT: look around\n\n```mswea_bash_command\nls -la /src\n```\n<|eot_id|>",
    "Hermes": '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la /src"}}\n</tool_call>',
    "Codex": '<tool_call>{"name": "shell", "arguments": {"cmd": ["bash", "-lc", "ls -la /src"]}}</tool_call>',
    "words": '<tool_call>{"name": "shell", "arguments": {"command": ["ls", "-la", "/src"]}}</tool_call>',
    "Hermes, quoting thoughts": (
        '<tool_call>{"name": "bash", "arguments": {"command": "ls -la /src", "why": "<think>"}}</tool_call>'
    ),
    "Qwen3-Coder, quoting thoughts": (
        "<think>x</think>\n<tool_call>\n<function=bash>\n<parameter=command>ls -la /src</parameter>\n"
        "<parameter=why>from <think> to </think></parameter>\n</function>\n</tool_call><|im_end|>"
    ),
    "bash block, after one that quotes a thought": (
        "```py\nSTART = '<think>'\n```\n\n```bash\nls -la /src\n```"
    ),
    "OpenAI": (
        '{"tool_calls": [{"id": "1", "type": "function", "function": {"name": "run_command", '
        '"arguments": "{\\"cmd\\": \\"ls -la /src\\"}"}}]}'
    ),
    "Qwen3-Coder": (
        "<tool_call>\n<function=execute_bash>\n<parameter=command>\nls -la /src\n</parameter>\n"
        "<parameter=timeout>\n10\n</parameter>\n</function>\n</tool_call><|im_end|>"
    ),
    "OpenHands": "<function=execute_bash>\n<parameter=command>ls -la /src</parameter>\n</function>",
    "GLM 4.5": (
        "<tool_call>bash\n<arg_key>why</arg_key>\n<arg_value>the command comes next</arg_value>\n"
        "<arg_key>command</arg_key>\n<arg_value>ls -la /src</arg_value>\n</tool_call><|observation|>"
    ),
    "Anthropic": "<function_calls>\n" + write_invoke("") + "\n</function_calls>",
    "Anthropic, with a name space": "<x:function_calls>\n" + write_invoke("x:") + "\n</x:function_calls>",
    "DeepSeek V3.2": (
        "<｜DSML｜function_calls>\n"
        + write_invoke("｜DSML｜", ' string="true"')
        + "\n</｜DSML｜function_calls>"
    ),
    "DeepSeek V4.1": "<｜DSML｜ calls>\n"
    + write_invoke("｜DSML｜ ", ' string="true"')
    + "\n</｜DSML｜ calls>",
    "MiniMax M2": "<minimax:tool_call>\n" + write_invoke("") + "\n</minimax:tool_call>",
    "Step 3": "<｜tool_call_begin｜>function<｜tool_sep｜>"
    + write_invoke("steptml:")
    + "<｜tool_call_end｜>",
    "Kimi K2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>"
        '{"command": "ls -la /src"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    ),
    "Kimi K3": (
        '<|open|>tools<|sep|><|open|>call tool="bash" index="1"<|sep|>'
        '<|open|>argument key="command" type="string"<|sep|>ls -la /src<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>Need ```bash\nrm -rf /\n```?<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.exec_command <|constrain|>json"
        '<|message|>{"cmd": "ls -la /src"}<|call|>'
    ),
    "gpt-oss, block": "<|channel|>final<|message|>Look:\n```bash\nls -la /src\n```<|return|>",
    "Mistral": '[TOOL_CALLS]bash[ARGS]{"command": "ls -la /src"}</s>',
    "Hunyuan 3": (
        "<tool_calls:x9>\n<tool_call:x9>bash<tool_sep:x9>\n<arg_key:x9>command</arg_key:x9>\n"
        "<arg_value:x9>ls -la /src</arg_value:x9>\n</tool_call:x9>\n</tool_calls:x9>"
    ),
    "Hunyuan 4": (
        "<tool_calls:x9>\n<tool_call:x9>bash\n<arg_key:x9>command</arg_key:x9>\n"
        "<arg_value:x9>ls -la /src</arg_value:x9>\n</tool_call:x9>\n</tool_calls:x9>"
    ),
    "K2 Horizon": (
        "<ifm|tool_calls><ifm|tool_call>bash<ifm|arg_key>command</ifm|arg_key>"
        "<ifm|arg_type>string</ifm|arg_type><ifm|arg_value>ls -la /src</ifm|arg_value></ifm|tool_call>"
        "</ifm|tool_calls>"
    ),
    "PLaMo 3": (
        "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>"
        "<|plamo:begin_tool_name:plamo|>bash<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
        '<|plamo:constrain|>json<|plamo:msg|>{"command": "ls -la /src"}<|plamo:end_tool_arguments:plamo|>'
        "<|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|><|plamo:tag|>"
    ),
    "Apertus": 'So: <|tools_prefix|>[{"bash": {"command": "ls -la /src"}}]<|tools_suffix|><|assistant_end|>',
    "Gemma 4": '<|tool_call>call:bash{command:<|"|>ls -la /src<|"|>,timeout:3}<tool_call|><turn|>',
    "FunctionGemma": "<start_function_call>call:bash{command:<escape>ls -la /src<escape>}<end_function_call>",
    "Llama 4": '[think(), bash(why="x", command="ls -la /src")]<|eot|>',
}

OTHER_CALLS = {
    "Hermes": 'I see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "Hermes, two": (
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    ),
    "Hermes, quoting itself": (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}, "x": "<tool_call>{"}</tool_call>'
    ),
    "Llama 3": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}<|eom_id|>',
    "two": '{"name": "a", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Oslo"}}',
    "bare": '{"name": "get_weather", "parameters": {"city": "Oslo"}}<|eot_id|>',
    "bare, quoting a thought": (
        '{"name": "get_weather", "parameters": {"city": "Oslo"}, "x": ["<think>", "[THINK]"]}<|eot_id|>'
    ),
    "bare list": '[{"name": "a", "parameters": {}}, {"name": "get_weather", "parameters": {"city": "Oslo"}}]',
    "JSON block": '```json\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n```',
    "Mistral 7B": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}]</s>',
    "Mistral, two": '[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]get_weather[CALL_ID]x1[ARGS]{"city": "Oslo"}</s>',
    "DeepSeek R1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
    ),
    "DeepSeek V3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
    ),
    "gpt-oss": (
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json"
        '<|message|>{"city": "Oslo"}<|call|>'
    ),
    "K2 Horizon, JSON": (
        '<ifm|tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</ifm|tool_call>'
        "</ifm|tool_calls>"
    ),
    "Apertus, two": '<|tools_prefix|>[{"a": {}}, {"get_weather": {"city": "Oslo"}}]<|tools_suffix|>',
    "Dots": '<dots_function_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</dots_function_call>',
    "GigaChat 3": 'So:<|function_call|>{"name": "get_weather", "arguments": {"city": "Oslo"}}</s>',
    "GigaChat 3, before": (
        'function call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}</s>'
    ),
    "Granite 3": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|end_of_text|>',
    "Jamba": '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>',
    "Cohere": '<|START_ACTION|>[{"tool_name": "get_weather", "parameters": {"city": "Oslo"}}]<|END_ACTION|>',
    "Phi-4 mini": 'functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
    "Inkling": '<|content_invoke_tool_json|>{"name": "get_weather", "args": {"city": "Oslo"}}<|end_message|>',
    "InternLM 2": (
        '<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city": "Oslo"}}<|action_end|>'
    ),
}


@pytest.mark.parametrize("text", SHELL_CALLS.values(), ids=SHELL_CALLS)
def test_a_shell_call_is_named_by_its_command(text):
    assert find_tool_call(text) == LS
    assert not is_cut(text)


@pytest.mark.parametrize("text", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_any_other_call_is_named_by_its_tool(text):
    assert find_tool_call(text) == WEATHER
    assert not is_cut(text)


@pytest.mark.parametrize("text", [*SHELL_CALLS.values(), *OTHER_CALLS.values()])
def test_a_tail_that_misses_the_call_says_so(text):
    """Whatever the tail, it shows the same call as the whole or asks for more."""
    call = find_tool_call(text)
    end = max(text.find(mark) for mark in ("ls -la /src", '"city"'))
    for start in range(end):
        tail = text[start:]
        assert is_cut(tail) or find_tool_call(tail) == call, tail


@pytest.mark.parametrize(
    ("text", "name", "command"),
    [
        ('[get_weather(city="Oslo")]', "get_weather", 'city="Oslo"'),
        ('<|python_start|>[a(), b.c(x=[1, (2)], y="(]")]<|python_end|>', "b.c", 'x=[1, (2)], y="(]"'),
        ("<function_calls>a(x=1)\nb(x='it\\'s')</function_calls>", "b", "x='it\\'s'"),
        ("<|tool_call_start|>[a()]<|tool_call_end|>", "a", None),
        ("<tool_call>get_time</tool_call>", "get_time", None),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "now", "null"),
        (
            '<tool_call>{"name": "edit", "arguments": {"command": "view"}}</tool_call>',
            "edit",
            '{"command": "view"}',
        ),
        ('<|python_tag|>brave_search.call(query="x")<|eom_id|>', "brave_search", None),  # Llama 3's own tools
        ("Now:\n```bash\nls -la /src\n", "ls", "ls -la /src"),  # its end was a stop string
        ("```bash\ncd /src && FOO=1 make\n```", "cd", "cd /src && FOO=1 make"),
        ("```x y``` is not it.\n\n```bash\nls -la /src\n```", "ls", "ls -la /src"),
        ("```bash\nTOKEN='hunter 2' make\n```", "TOKEN=", "TOKEN='hunter 2' make"),
        ("```bash\n(TOKEN=hunter2 make)\n```", "(TOKEN=", "(TOKEN=hunter2 make)"),
        ("```bash\ncd;TOKEN=hunter2 make\n```", "cd;TOKEN=", None),
        ("```bash\n<<<hunter2 sudo -S make\n```", "<", "<<<hunter2 sudo -S make"),
        ("```bash\npasswd<<<hunter2\n```", "passwd<", "passwd<<<hunter2"),
        ("```bash\na\n```\nor\n```bash\nb 1\n```\nDone.", "b", "b 1"),
        ("```bash\ncat > x.md <<END\n```python\n1\n```\nEND\n```", "cat", "cat > x.md <<END\n```python\n1"),
        ('<tool_call>{"name": "w", "arguments": {"x": "```bash\\nls\\n```"}}</tool_call>', "w", None),
    ],
)
def test_other_spellings(text, name, command):
    call = find_tool_call(text)
    assert call is not None and call.name == name
    assert command is None or call.command == command


@pytest.mark.parametrize(
    "text",
    [
        "",
        "All tests pass now.",
        "Call get_weather(city) with `ls` or [a](b).",
        "```python\nprint(1)\n```",
        "```\nls\n```",
        '{"name": "Oslo", "population": 700000}',
        "[1, 2, 3]",
        '["a", {"b": 1}]',
        "Use <tool_call> tags, please: they <function=> are [TOOL_CALLS] fine.",
        "functools and itertools are [modules].",
        "<tool_call>{not json}</tool_call>",
        "```bash\n\n```",
        "```bash ls``` is what I ran.",
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        "<|channel|>final<|message|>Done.<|return|>",
        "<|channel|>analysis<|message|>I could run ```bash\nls\n```",
    ],
)
def test_no_call(text):
    assert find_tool_call(text) is None


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<think>", "</think>"),
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
        ("<|channel>thought\n", "<channel|>"),
        ("<think:x9>", "</think:x9>"),
        ("<ifm|think_fast>", "</ifm|think_fast>"),
        ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    ],
)
def test_thinking_is_not_calling(opening, closing):
    thought, block = "```bash\nrm -rf /\n```\n", SHELL_CALLS["bash block"]
    assert find_tool_call(f"{opening}{thought}{closing}{block}") == LS
    assert find_tool_call(f"{thought}{closing}{block}") == LS
    assert find_tool_call(f"{opening}{thought}{closing}Done.") is None
    assert find_tool_call(f"{thought}{closing}Done.") is None
    assert find_tool_call(f"{opening}{thought}") is None
    assert find_tool_call(f"{opening}x{closing}{block}\n{opening}{thought}{closing}") == LS


def test_an_argument_may_quote_the_end_of_thinking():
    text = '<think>x</think><tool_call>{"name": "grep", "arguments": {"for": "</think>"}}</tool_call>'
    assert find_tool_call(text) == ToolCall("grep", '{"for": "</think>"}')


@pytest.mark.parametrize("thoughts", ["<think>", "</think>", "<think></think>", "a <think> b </think> c"])
def test_an_argument_keeps_what_it_quotes(thoughts):
    command = f"grep -rn '{thoughts}' src"
    for text in (
        f'<tool_call>{{"name": "bash", "arguments": {{"command": "{command}"}}}}</tool_call>',
        f'{{"name": "bash", "parameters": {{"command": "{command}"}}}}',
        f"<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>{command}</arg_value>\n</tool_call>",
        f'<|channel|>commentary to=functions.exec_command<|message|>{{"cmd": "{command}"}}<|call|>',
        f"```bash\n{command}\n```",
    ):
        assert find_tool_call(text) == ToolCall("grep", command)
        assert find_tool_call(f"<think>x</think>{text}") == ToolCall("grep", command)


@pytest.mark.parametrize(
    "text",
    [
        "la /src</parameter>\n</function>\n</tool_call>",
        'la /src"}<|call|>',
        "END\n```",
        "```\nDone, and this is what I would run next.",
        '-la /src"}</s>',
        "```bash\nls\n```\nEND\n</parameter>\n</function>",
    ],
)
def test_cut(text):
    assert is_cut(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "All tests pass.",
        "ends thinking</think>All tests pass.",
        "```\nls\n```",
        "Some `code` here.",
        "```py\n1\n```",
    ],
)
def test_not_cut(text):
    assert not is_cut(text)


def test_size_is_bounded():
    name, command = "x" * 100_000, "echo " + "y" * 100_000
    call = find_tool_call(f'<tool_call>{{"name": "{name}", "arguments": {{"a": "{command}"}}}}</tool_call>')
    assert call is not None and call.command is not None
    assert (len(call.name), len(call.command)) == (MAX_TOOL_CHARS, MAX_COMMAND_CHARS)
    call = find_tool_call(f"```bash\n{name}\n```")
    assert call is not None and len(call.name) == MAX_TOOL_CHARS


def test_what_is_found_can_be_printed():
    call = find_tool_call('<tool_call>{"name": "a\\ud800\\u0000", "arguments": {"x": "\\ud800"}}</tool_call>')
    assert call == ToolCall("a??", '{"x": "?"}')


MARKS = [
    *sorted({mark for form in FORMS for mark in (form.opening, form.closing) if mark}),
    *("<think>", "</think>", "<|message|>", "to=functions.x", "<|call|>", "```bash\n", "\n```", "\n", " "),
    *('{"name": "bash", "arguments": {"command": "', '"}}', "name=", "command", *"[]{}()\"'\\,;:=<>a1|`"),
]


@given(st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=5)), max_size=60))
def test_any_text_is_read(parts):
    text = "".join(parts)
    is_cut(text)
    call = find_tool_call(text)
    assert call is None or (0 < len(call.name) <= MAX_TOOL_CHARS and call.name.isprintable())
    assert call is None or call.command is None or call.command.encode()


HOSTILE = {
    **{f"again and again {mark!r}": mark for mark in MARKS},
    "nested lists": '<tool_call>["',
    "lists, deep": "[TOOL_CALLS][[[[[[[[",
    "objects, deep": '<tool_call>{"a":',
    "JSON in a row": "<|python_tag|>{};",
    "escaped quotes": '<|python_start|>[a("\\"',
    "spaces": "<tool_call>" + " " * 50,
    "names": "<tool_call>aaaaaaaaaa",
    "parameters": "<function=bash><parameter=command ",
    "fences": "```bash\n```\n",
    "end tokens": "<|im_end|>",
    "half tokens": "<|a",
    "headers": "<|start|>to=",
}


def measure_s(text):
    # The fastest of several, as other work on the machine only ever adds.
    times = []
    for _ in range(3):
        start_s = time.process_time()
        find_tool_call(text)
        is_cut(text)
        times.append(time.process_time() - start_s)
    return min(times)


@pytest.mark.parametrize("pattern", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_takes_linear_time(pattern):
    """Eight times the text takes nowhere near 64 times as long."""
    for text in (pattern, "<tool_call>" + pattern, '[TOOL_CALLS]["' + pattern, "[a(" + pattern):
        short, long = ((text * (size // len(text) + 1))[:size] for size in (2**14, 2**17))
        assert measure_s(long) < 24 * measure_s(short) + 0.01


@pytest.mark.parametrize("filling", ["[", "(", "{},", '{"a":', '"a",'])
def test_a_text_with_every_opening_marker_is_not_read_from_each_of_them(filling, monkeypatch):
    """A client can force any answer (`structured_outputs`), and hundreds of answers to end in one step."""
    num_read = 0

    class Counting:
        def __init__(self, form):
            self.opening, self.closing, self._read = form.opening, form.closing, form.read

        def read(self, text):
            nonlocal num_read
            num_read += len(text)
            return self._read(text)

    monkeypatch.setattr(tool_calls, "FORMS", [*map(Counting, tool_calls.FORMS)])
    openings = "".join(4 * (form.opening + "[") for form in tool_calls.FORMS)
    for text in (openings + filling * 8000, openings * 4 + filling * 2000):
        num_read = 0
        assert find_tool_call(text[:48_000] + "}") is None
        assert 0 < num_read < 4 * 48_000


def test_values_in_a_row_are_read_up_to_a_number_of_them():
    """Each takes as long as many characters."""
    call = '{"name": "f", "arguments": {}}'
    assert find_tool_call(f"<tool_call>{'{},' * 500}{call}</tool_call>") == ToolCall("f", "{}")
    assert find_tool_call(f"<tool_call>{'{},' * 5000}{call}</tool_call>") is None
    assert find_tool_call(f"<|python_start|>[f(x=[{'[],' * 400}])]<|python_end|>").name == "f"
    assert find_tool_call(f"<|python_start|>[f(x=[{'[],' * 4000}])]<|python_end|>") is None


@pytest.mark.slow
def test_a_megabyte_of_each_mark_is_read_soon():
    for pattern in ("[", '{"a":', "<tool_call>", "```\n", "<think>", '"\\', "<function=a>"):
        assert measure_s(pattern * (2**20 // len(pattern))) < 5


@pytest.mark.parametrize("comment", ["# run the tests\n", "#!/bin/bash\n\n  # first\n", ""])
def test_a_comment_before_a_command_is_not_its_name(comment):
    assert find_tool_call(f"```bash\n{comment}pytest -q\n```") == ToolCall(
        "pytest", f"{comment}pytest -q".strip()
    )

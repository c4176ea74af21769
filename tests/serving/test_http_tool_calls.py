"""Tool calls in generated messages, whole and streamed, in each format, and what stays content."""

import json
from dataclasses import replace

import openai
import pytest
from chat_tokenizer import chat_tokenizer
from fake_engine import FakeEngine
from started import started

from meshwright.serving.http.openai.tool_calls import ToolParser

TAGGED = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
BARE = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("sun", "rain")]
SUN = '{"name": "sun", "arguments": {"city": "Köln"}}'
RAIN = '{"name": "rain", "arguments": {}}'
TWO = f"I look.\n<tool_call>\n{SUN}\n</tool_call>\n<tool_call>{RAIN}</tool_call>\n"


def tokenizer(form):
    """Of a model whose template asks for a form of calls."""
    found = chat_tokenizer()
    template = f"{{% if tools %}}{{{{ {json.dumps(form)} }}}}{{% endif %}}{found.config['chat_template']}"
    return replace(found, config={"chat_template": template.replace('\\"', '"') if form == BARE else template})


def read(form, text, size):
    """The content and the calls of a text that comes in pieces of so many characters."""
    reader = ToolParser(tokenizer(form), ["sun", "rain"])
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = [reader.add(piece, is_last=False) for piece in pieces] + [reader.add("", is_last=True)]
    calls = [call for _, calls in found for call in calls]
    assert reader.num_calls == len(calls) == len({call.id for call in calls})
    content = "".join(content for content, _ in found)
    return content, [(call.function.name, json.loads(call.function.arguments)) for call in calls]


CITY = ("sun", {"city": "Köln"})


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (TAGGED, TWO, "I look.", [CITY, ("rain", {})]),
        (TAGGED, f"<tool_call>{SUN}</tool_call>", "", [CITY]),
        (TAGGED, f"<tool_call>{SUN}</tool_call>\n and so\n", "\n and so", [CITY]),
        (TAGGED, "a < b, <tool and <tool_cal", "a < b, <tool and <tool_cal", []),
        (TAGGED, f" x <tool_call>{SUN}", f" x <tool_call>{SUN}", []),
        (
            TAGGED,
            f"<tool_call>{{</tool_call> <tool_call>{RAIN}</tool_call>",
            "<tool_call>{</tool_call>",
            [("rain", {})],
        ),
        (TAGGED, SUN, SUN, []),
        (BARE, '\n{"name": "sun", "parameters": {"city": "Köln"}}\n', "", [CITY]),
        (BARE, '{"name": "snow", "parameters": {}}', '{"name": "snow", "parameters": {}}', []),
        (BARE, 'It is {"name": "sun", "parameters": {}}', 'It is {"name": "sun", "parameters": {}}', []),
        (BARE, '{"city": "Köln"} ', '{"city": "Köln"} ', []),
        (BARE, " \n", " \n", []),
        ("", TWO, TWO, []),
    ],
)
def test_calls_are_taken_out_of_a_text_however_it_comes(form, text, content, calls, size):
    assert read(form, text, size) == (content, calls)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "snow", "arguments": {}}', '{"name": ["sun"], "arguments": {}}', '{"name": "sun", "arguments": "{}"}',
        '{"name": "sun"}', '{"name": "sun", "arguments": {"n": NaN}}', '{"name": "sun", "arguments": {"s": "\\ud800"}}',
        "[" * 100_000, "[]", "",
    ],
)  # fmt: skip
def test_what_is_no_call_of_a_tool_stays_text(call):
    text = f"<tool_call>{call}</tool_call>"
    assert read(TAGGED, text, len(text)) == (text, [])


@pytest.fixture(scope="module")
def client():
    engine = FakeEngine(tokenizer(TAGGED))
    engine.next_token = lambda request, text, step: [*TWO.encode(), 0][step]
    with started(engine) as found, openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as made:
        yield made


HELLO = {"model": "fake/model", "messages": [{"role": "user", "content": "hello"}]}


def test_a_message_has_its_calls(client):
    done = client.chat.completions.create(**HELLO, tools=TOOLS, n=2)
    for choice in done.choices:
        assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
        assert [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
            ("function", "sun", '{"city": "Köln"}'), ("function", "rain", "{}")
        ]  # fmt: skip
    # What was made can be sent back.
    calls = [call.model_dump() for call in done.choices[0].message.tool_calls]
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in calls]
    messages = [*HELLO["messages"], {"role": "assistant", "content": None, "tool_calls": calls}, *answers]
    client.chat.completions.create(**HELLO | {"messages": messages}, tools=TOOLS)


def test_a_stream_has_its_calls(client):
    stream = list(client.chat.completions.create(**HELLO, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "sun"), (1, "rain")]
    assert stream[-1].choices[0].finish_reason == "tool_calls"


def test_without_tools_or_with_none_to_choose_calls_stay_text(client):
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = client.chat.completions.create(**HELLO, **options).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (TWO, None, "stop")


def test_a_text_that_is_cut_says_so(client):
    (choice,) = client.chat.completions.create(**HELLO, tools=TOOLS, max_tokens=len(TWO.encode()) - 8).choices
    assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "length")
    assert choice.message.content == f"I look.\n<tool_call>{RAIN}</too"

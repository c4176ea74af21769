"""Tool calls in generated messages, whole and streamed, in each format, and what stays content."""

import json
import random
from dataclasses import replace

import httpx
import jsonschema
import openai
import pytest
from chat_tokenizer import chat_tokenizer
from fake_engine import FakeEngine
from started import started
from tokenizers import AddedToken
from tokenizers import Tokenizer as HuggingFaceTokenizer

from meshwright.execution.text.byte_files import byte_tokenizer_files
from meshwright.execution.text.tokenizer import _FromFile
from meshwright.serving.engine.grammars import compile_grammar, read_vocabulary
from meshwright.serving.http.openai.messages import Tool
from meshwright.serving.http.openai.tool_calls import ToolParser, call_constraint

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
        made.fake_engine = engine
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


SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Köln", "東京"]}},
}
PLACES = [Tool.model_validate({"type": "function", "function": {"name": "sün", "parameters": SCHEMA}}),
          Tool.model_validate({"type": "function", "function": {"name": "rain"}})]  # fmt: skip


def written(tokenizer, constraint, draw):
    """A text of a constraint, each token drawn from those that may come next, or that ends it."""
    vocabulary = read_vocabulary(tokenizer.to_json(), list(tokenizer.stop_tokens))
    matcher = compile_grammar(vocabulary, constraint.kind, constraint.source)
    tokens = []
    while not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(tokenizer.num_tokens) if mask >> token & 1]
        ends = [token for token in allowed if token in (*tokenizer.stop_tokens, 255)]
        # Strings and white space end soon.
        short = [token for token in allowed if chr(token) in '"}]' and draw.random() < 0.7]
        token = draw.choice(ends or short or allowed)
        if (ends and draw.random() < 0.5) or not matcher.consume_token(token) or token in ends:
            break
        tokens.append(token)
    return tokenizer.decode(tokens)


@pytest.mark.parametrize("form", [TAGGED, BARE])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_forced_message_is_calls_with_arguments_of_their_schema(form, is_parallel):
    """Whatever tokens a model prefers, its message is calls that the parser reads."""
    of = replace(tokenizer(form), stop_tokens=())
    constraint = call_constraint(of, PLACES, is_parallel=is_parallel)
    seen = set()
    for seed in range(12):
        text = written(of, constraint, random.Random(seed))
        content, calls = ToolParser(of, ["sün", "rain"]).add(text, is_last=True)
        assert content == "", text
        assert 1 <= len(calls) <= (16 if is_parallel and form == TAGGED else 1)
        for call in calls:
            arguments = json.loads(call.function.arguments)
            seen.add(call.function.name)
            if call.function.name == "sün":
                jsonschema.validate(arguments, SCHEMA)
    assert seen == {"sün", "rain"}
    assert call_constraint(tokenizer("other"), PLACES, is_parallel=True) is None


def test_a_tag_that_is_a_token_is_forced_as_this_token():
    of = HuggingFaceTokenizer.from_str(byte_tokenizer_files(None)["tokenizer.json"].decode())
    of.add_tokens([AddedToken(tag, special=False) for tag in ("<tool_call>", "</tool_call>")])
    made = replace(tokenizer(TAGGED), codec=_FromFile(of), num_tokens=258)
    constraint = call_constraint(made, PLACES, is_parallel=False)
    matcher = compile_grammar(read_vocabulary(made.to_json(), [0]), constraint.kind, constraint.source)
    tokens = made.encode('<tool_call>\n{"name": "rain", "arguments": {}}\n</tool_call>', add_special_tokens=False)
    assert tokens[0] == 256
    assert matcher.validate_tokens(tokens) == len(tokens)


def test_tool_choice_forces_all_tools_or_the_named_one(client):
    named = {"type": "function", "function": {"name": "rain"}}
    engine = client.fake_engine
    for choice, names, reason in (("required", ["sun", "rain"], "tool_calls"), (named, ["rain"], "stop")):
        done = client.chat.completions.create(**HELLO, tools=TOOLS, tool_choice=choice)
        source = engine.requests[-1].constraint.source
        assert [name for name in ("sun", "rain") if f'\\"name\\": \\"{name}\\"' in source] == names
        assert done.choices[0].finish_reason == reason
    client.chat.completions.create(**HELLO, tools=TOOLS, tool_choice="auto")
    assert engine.requests[-1].constraint is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "any", "tools": TOOLS}, 'tool_choice is "any"; it must be none, auto, required, or {type:'),
        ({"tool_choice": "required"}, "tool_choice is required, and the tools are none; name one of them"),
        ({"tool_choice": {"type": "function", "function": {"name": "snow"}}, "tools": TOOLS},
         "tool_choice is 'snow', and the tools are sun, rain; name one of them"),
        ({"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}},
         "tool_choice forces a tool call, and the output is constrained too; give one"),
        ({"reasoning_effort": "low"}, "reasoning_effort is given, and the chat template of fake/model does not read it;"
         " set chat_template_kwargs.enable_thinking instead"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "are both true; give one"),
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_is_said(client, fields, message):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**HELLO, extra_body=fields)
    assert message in error.value.body["message"]


def test_reasoning_effort_is_a_variable_of_the_template():
    of = chat_tokenizer()
    template = (
        of.config["chat_template"] + "{% if reasoning_effort is defined %} effort {{ reasoning_effort }}{% endif %}"
    )
    engine = FakeEngine(replace(of, config={"chat_template": template}))
    with started(engine) as found:
        httpx.post(f"{found.url}/v1/chat/completions",
                   json=HELLO | {"reasoning_effort": "low", "max_tokens": 1}).raise_for_status()  # fmt: skip
    assert bytes(engine.requests[-1].prompt).decode().endswith("assistant: effort low")

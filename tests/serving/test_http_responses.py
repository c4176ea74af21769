"""`/v1/responses` as OpenAI's client reads it, whole and streamed, and vLLM's `/tokenize` and `/detokenize`."""

import httpx
import openai
import pytest
from chat_tokenizer import chat_tokenizer
from fake_engine import ANSWER, FakeEngine
from started import started
from test_http_tool_calls import TAGGED, TWO, tokenizer

TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("sun", "rain")]


@pytest.fixture(scope="module")
def server():
    with started(FakeEngine(chat_tokenizer())) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def calling():
    """A client of a model that says something and calls two tools."""
    engine = FakeEngine(tokenizer(TAGGED))
    engine.next_token = lambda request, text, step: [*TWO.encode(), 0][step]
    with started(engine) as found, openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def prompt_of(server):
    return bytes(server.engine.requests[-1].prompt).decode()


def test_a_response_has_the_text_of_a_chat(server, client):
    found = client.responses.create(
        model="fake/model", instructions="Be brief.", input="hello", max_output_tokens=5, temperature=0
    )
    assert prompt_of(server) == "system: Be brief.\nuser: hello\nassistant:"
    assert found.output_text == ANSWER.encode()[:5].decode(errors="replace")
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.usage.output_tokens, found.usage.total_tokens) == (5, 5 + found.usage.input_tokens)
    assert found.store is False


def test_a_stream_has_the_events_of_a_message(client):
    options = {"model": "fake/model", "input": "hello", "max_output_tokens": 30, "temperature": 0}
    events = list(client.responses.create(**options, stream=True))
    final = events[-1].response
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-4].text == final.output_text != ""
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_calls_are_items_and_come_back_with_their_outputs(calling):
    done = calling.responses.create(model="fake/model", input="hello", tools=TOOLS)
    assert [item.type for item in done.output] == ["message", "function_call", "function_call"]
    assert (done.output_text, done.status) == ("I look.", "completed")
    assert [(item.name, item.arguments) for item in done.output[1:]] == [("sun", '{"city": "Köln"}'), ("rain", "{}")]
    outputs = [{"type": "function_call_output", "call_id": item.call_id, "output": "7"} for item in done.output[1:]]
    again = calling.responses.create(
        model="fake/model", input=[{"role": "user", "content": "hello"}, *done.output, *outputs], tools=TOOLS
    )
    assert again.output_text == "I look."

    with calling.responses.stream(model="fake/model", input="hello", tools=TOOLS, parallel_tool_calls=False) as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == "I look."
    ended = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in ended] == ["message", "function_call"]
    assert events[-1].response.output[1].arguments == '{"city": "Köln"}'


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"previous_response_id": "resp_1"}, "this server stores no responses; send the whole conversation as input"),
        ({"input": [{"type": "function_call", "name": "sun"}]}, "input[0].call_id is missing"),
        ({"input": [{"role": "user"}]}, "input[0].content is missing; an item of type message has role and content"),
        ({"tools": [{"type": "web_search"}]}, 'tools[0].type is "web_search"'),
        ({"background": True}, "background is true; it must be false"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort is given, and the chat template of fake/model does not"),
        ({"input": "a" * 400_000}, "input has 400,"),
    ],
)
def test_what_a_server_without_state_cannot_do_is_said(server, fields, message):
    found = httpx.post(f"{server.url}/v1/responses", json={"input": "hello"} | fields)
    assert found.status_code == 400
    assert message in found.json()["error"]["message"]


def test_texts_and_chats_become_tokens_and_text_again(server):
    def post(path, **fields):
        return httpx.post(f"{server.url}{path}", json=fields).raise_for_status().json()

    found = post("/tokenize", prompt="Grüße", return_token_strs=True)
    assert (found["tokens"], found["count"], found["max_model_len"]) == (list("Grüße".encode()), 7, 512)
    assert len(found["token_strs"]) == 7
    assert post("/detokenize", tokens=found["tokens"]) == {"prompt": "Grüße"}
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "I am "}]
    chat = post("/tokenize", messages=messages, continue_final_message=True)
    assert bytes(chat["tokens"]).decode() == "user: hello\nassistant: I am "
    chat = post("/tokenize", messages=messages, add_generation_prompt=False)
    assert bytes(chat["tokens"]).decode() == "user: hello\nassistant: I am \n"
    for path, fields, message in (
        ("/tokenize", {"prompt": "a", "messages": messages}, "needs one of prompt and messages"),
        ("/detokenize", {"tokens": [999]}, "tokens has 999; fake/model has the tokens 0 to 255"),
    ):
        error = httpx.post(f"{server.url}{path}", json=fields)
        assert error.status_code == 400
        assert message in error.json()["error"]["message"]

"""Drive a running server with clients of other libraries: instructor, LangChain, LiteLLM and OpenAI's own.

They are no dependencies of meshwright's, and need a virtual environment of their own:

    python -m venv /tmp/clients
    /tmp/clients/bin/pip install instructor langchain-openai litellm openai
    meshwright serve DIR --on cpu:1 --port 8000 &
    /tmp/clients/bin/python tests/serving/drive_clients.py http://127.0.0.1:8000/v1

DIR has a model with a chat template that writes tool calls, as Qwen's, Hermes' or Llama 3's; `--make DIR` makes a small
one with drawn parameters, which needs meshwright too. What such a model says has no sense: what is checked is that each
call comes back in the form that its library asked for. It ends with 0 where all do.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Literal

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    ' Answer with <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n{% endif %}'
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""With the format of Qwen's and Hermes' tool calls."""


def make(directory: Path) -> None:
    """Write a small model of bytes with this template."""
    import jax

    from meshwright.description.families.registry import PRESETS
    from meshwright.description.hardware.system import parse_system
    from meshwright.description.step.parameter_tree import parameters
    from meshwright.execution.models.inference.loaded import LoadedModel
    from meshwright.execution.runtime.arrays import initialise
    from meshwright.execution.runtime.mesh import build_mesh
    from meshwright.execution.runtime.sharding_context import ShardingContext
    from meshwright.execution.text.tokenizer import byte_tokenizer
    from meshwright.mesh import MeshShape

    config, shape = PRESETS["tiny"], MeshShape()
    devices = build_mesh(shape, jax.devices()[:1])
    with jax.set_mesh(devices):
        params = initialise(parameters(config), jax.random.key(0), devices, ShardingContext(shape), "f32")
    LoadedModel(
        config=config, params=params, mesh=devices, mesh_shape=shape, system=parse_system("cpu:1"), dtype="f32",
        stored_dtype="f32", tokenizer=byte_tokenizer(), source={}, seq_len=2048,
    ).save(directory)  # fmt: skip
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def check_openai(url: str, model: str) -> None:
    """Chat, its stream, a response and its stream."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "Hello"}]
    options = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    pieces = client.chat.completions.create(**options, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == whole
    options = {"model": model, "input": "Hello", "max_output_tokens": 8, "temperature": 0}
    assert client.responses.create(**options).output_text == whole
    events = list(client.responses.create(**options, stream=True))
    assert events[-1].response.output_text == whole


def check_instructor(url: str, model: str) -> None:
    """A pydantic model by instructor's default mode, which forces a tool, and by its other modes."""
    import instructor
    import openai
    from pydantic import BaseModel

    # A drawn model would write properties of its own without an end.
    class Weather(BaseModel, extra="forbid"):
        city: Literal["Köln", "Paris"]
        is_sunny: bool

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        found = instructor.from_openai(client, mode=mode).chat.completions.create(
            model=model, messages=[{"role": "user", "content": "The weather?"}], response_model=Weather,
            max_retries=0, max_tokens=300,
        )  # fmt: skip
        assert isinstance(found, Weather), found
        print(f"  instructor {mode.name}: {found}")


def check_langchain(url: str, model: str) -> None:
    """Structured outputs by function calling and by schema, and tools of which any, or a named one, is called."""
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Weather(BaseModel, extra="forbid"):
        """The weather of a city."""

        city: Literal["Köln", "Paris"]
        is_sunny: bool

    class Add(BaseModel, extra="forbid"):
        """The sum of two numbers."""

        first: Literal[1, 2]
        second: Literal[1, 2]

    chat = ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=300, max_retries=0)
    for method in ("function_calling", "json_schema"):
        found = chat.with_structured_output(Weather, method=method).invoke("The weather?")
        assert isinstance(found, Weather), found
        print(f"  langchain {method}: {found}")
    for choice, names in (("any", {"Weather", "Add"}), ("required", {"Weather", "Add"}), ("Add", {"Add"})):
        calls = chat.bind_tools([Weather, Add], tool_choice=choice).invoke("One and two?").tool_calls
        assert calls, choice
        assert {call["name"] for call in calls} <= names, calls
        print(f"  langchain bind_tools({choice!r}): {calls[0]['name']} {calls[0]['args']}")
    said = chat.invoke("Hello", max_tokens=8).content
    assert isinstance(said, str)
    assert "".join(part.content for part in chat.stream("Hello", max_tokens=8)) is not None


def check_litellm(url: str, model: str) -> None:
    """A chat, its stream, a forced tool, embeddings, and a response."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # It would fetch a list of prices.
    import litellm

    options = {"api_base": url, "api_key": "none", "max_retries": 0}
    messages, name = [{"role": "user", "content": "Hello"}], f"openai/{model}"
    # Of a response it asks for 16 tokens at least.
    whole = litellm.completion(name, messages, max_tokens=16, temperature=0, **options).choices[0].message.content
    pieces = litellm.completion(name, messages, max_tokens=16, temperature=0, stream=True, **options)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "count", "parameters": schema}}]
    for choice in ("required", {"type": "function", "function": {"name": "count"}}):
        made = litellm.completion(name, messages, tools=tools, tool_choice=choice, max_tokens=600, **options)
        call = made.choices[0].message.tool_calls[0].function
        assert json.loads(call.arguments)["n"] in (1, 2), call
        print(f"  litellm tool_choice {choice if isinstance(choice, str) else 'named'}: {call.name} {call.arguments}")
    assert len(litellm.embedding(name, ["a", "b"], **options).data) == 2
    response = litellm.responses(input="Hello", model=name, max_output_tokens=16, temperature=0, **options)
    text = response.output[0].content[0].text
    assert text == whole, (text, whole)


CHECKS = {
    "openai": check_openai,
    "instructor": check_instructor,
    "langchain": check_langchain,
    "litellm": check_litellm,
}


def main() -> int:
    """Run the checks of all clients; 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="of the server, with /v1")
    parser.add_argument("--make", type=Path, metavar="DIR", help="make a model for it instead")
    parser.add_argument("--only", choices=CHECKS, nargs="+", default=list(CHECKS))
    args = parser.parse_args()
    if args.make:
        make(args.make)
        return 0
    import openai

    model = openai.OpenAI(base_url=args.url, api_key="none").models.list().data[0].id
    failed = []
    for name in args.only:
        try:
            CHECKS[name](args.url, model)
            print(f"{name}: all calls came back as they were asked for")
        except Exception as error:  # Each library raises its own; the others are still run.
            failed.append(name)
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

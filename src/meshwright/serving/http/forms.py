"""The form of a text (a JSON schema, a regular expression, a grammar), in OpenAI's fields and in vLLM's."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.fields import Fields, Ignored, Texts
from meshwright.serving.request import Constraint


class JsonSchema(Fields):
    """A schema as response_format has it."""

    name: str = Field("schema", description="a name; without effect")
    description: str | None = Field(None, description="text; without effect")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="a JSON schema")
    strict: bool | None = Field(None, description="true or false; without effect: schemas are always kept")


class ResponseFormat(Fields):
    """The form of a text."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="text, json_object or json_schema")
    json_schema: JsonSchema | None = Field(None, description="the schema, with type json_schema")


class StructuredOutputs(Fields):
    """The form of a text, as vLLM's clients say it: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    regex: str | None = Field(None, description="a regular expression that the whole text matches")
    choice: Texts | None = Field(None, description="a list of texts, of which one is made")
    grammar: str | None = Field(None, description="a Lark grammar")


class Forms(Ignored):
    """What each text has to match: at most one of these."""

    response_format: ResponseFormat | None = Field(None, description="an object with a type")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="an object with one of json, regex, choice and grammar"
    )
    guided_json: dict[str, Any] | str | None = Field(None, description="a JSON schema, as an object or as text")
    guided_regex: str | None = Field(None, description="a regular expression")
    guided_choice: Texts | None = Field(None, description="a list of texts")
    guided_grammar: str | None = Field(None, description="a Lark grammar")


def constraint_of(asked: Forms) -> Constraint | None:
    """What each text has to match.

    Raises:
        ApiError: several forms, or one that says nothing.
    """
    of = asked.structured_outputs or StructuredOutputs.model_validate({})
    said = [
        ("response_format", _response_schema(asked.response_format), _json_schema),
        ("structured_outputs.json", of.json_, _json_schema),
        ("structured_outputs.regex", of.regex, _regex),
        ("structured_outputs.choice", of.choice, _choice),
        ("structured_outputs.grammar", of.grammar, _grammar),
        ("guided_json", asked.guided_json, _json_schema),
        ("guided_regex", asked.guided_regex, _regex),
        ("guided_choice", asked.guided_choice, _choice),
        ("guided_grammar", asked.guided_grammar, _grammar),
    ]
    found = [(name, make(value)) for name, value, make in said if value is not None]
    if not found:
        return None
    name, constraint = found[0]
    if len(found) > 1:
        raise ApiError(f"{name} and {found[1][0]} both say the form of the text; give one", param=name)
    return constraint


def _response_schema(form: ResponseFormat | None) -> dict[str, Any] | None:
    """The JSON schema that a response_format asks for."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise ApiError(
            "response_format is of type json_schema and has no schema; it has json_schema with schema in it",
            param="response_format",
        )
    return form.json_schema.schema_


def _regex(pattern: str) -> Constraint:
    return Constraint("regex", pattern)


def _grammar(source: str) -> Constraint:
    return Constraint("lark", source)


def _json_schema(schema: dict[str, Any] | str) -> Constraint:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
    except ValueError as error:
        raise ApiError(f"the JSON schema cannot be written: {error}") from None
    return Constraint("json_schema", text)


def _choice(texts: list[str]) -> Constraint:
    if not texts or "" in texts:
        raise ApiError("a choice is of one text at least, and none of them is empty")
    return Constraint("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))

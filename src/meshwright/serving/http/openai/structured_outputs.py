"""Structured outputs: the JSON schema, regular expression or grammar of a request, in OpenAI's and vLLM's fields."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

from pydantic import Field

from meshwright.serving.engine.request import Constraint
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.request_body import IgnoredFields, RequestModel, Texts


class JsonSchema(RequestModel):
    """The schema of a `response_format`."""

    name: str = Field("schema", description="a name; without effect")
    description: str | None = Field(None, description="text; without effect")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="a JSON schema")
    strict: bool | None = Field(None, description="true or false; without effect: schemas are always enforced")


class ResponseFormat(RequestModel):
    """OpenAI's field for structured outputs."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="text, json_object or json_schema")
    json_schema: JsonSchema | None = Field(None, description="the schema, with type json_schema")


class StructuredOutputs(RequestModel):
    """vLLM's field for structured outputs: exactly one of its fields is set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    regex: str | None = Field(None, description="a regular expression that the whole output matches")
    choice: Texts | None = Field(None, description="a list of texts, one of which is the output")
    grammar: str | None = Field(None, description="a Lark grammar")


class StructuredOutputFields(IgnoredFields):
    """The fields of a request that constrain its outputs; at most one may be set."""

    response_format: ResponseFormat | None = Field(None, description="an object with a type")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="an object with one of json, regex, choice and grammar"
    )
    guided_json: dict[str, Any] | str | None = Field(None, description="a JSON schema, as an object or as text")
    guided_regex: str | None = Field(None, description="a regular expression")
    guided_choice: Texts | None = Field(None, description="a list of texts")
    guided_grammar: str | None = Field(None, description="a Lark grammar")


def requested_constraint(body: StructuredOutputFields) -> Constraint | None:
    """Return the constraint on the outputs of a request; None if it has none.

    Raises:
        ApiError: there is more than one constraint, or a field is invalid.
    """
    structured = body.structured_outputs or StructuredOutputs.model_validate({})
    regex, grammar = partial(Constraint, "regex"), partial(Constraint, "lark")
    fields = [
        ("response_format", _response_format_schema(body.response_format), _json_schema),
        ("structured_outputs.json", structured.json_, _json_schema),
        ("structured_outputs.regex", structured.regex, regex),
        ("structured_outputs.choice", structured.choice, _choice),
        ("structured_outputs.grammar", structured.grammar, grammar),
        ("guided_json", body.guided_json, _json_schema),
        ("guided_regex", body.guided_regex, regex),
        ("guided_choice", body.guided_choice, _choice),
        ("guided_grammar", body.guided_grammar, grammar),
    ]
    constraints = [(name, make(value)) for name, value, make in fields if value is not None]
    if not constraints:
        return None
    name, constraint = constraints[0]
    if len(constraints) > 1:
        raise ApiError(f"{name} and {constraints[1][0]} both constrain the output; give one", param=name)
    return constraint


def _response_format_schema(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the JSON schema of a response_format; None if it sets no constraint."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return {"type": "object"}
    if response_format.json_schema is None or response_format.json_schema.schema_ is None:
        raise ApiError(
            "response_format is of type json_schema and has no schema; give json_schema: {schema: …}",
            param="response_format",
        )
    return response_format.json_schema.schema_


def _json_schema(schema: dict[str, Any] | str) -> Constraint:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
    except ValueError as error:
        raise ApiError(f"the JSON schema cannot be written as JSON: {error}") from None
    return Constraint("json_schema", text)


def _choice(texts: list[str]) -> Constraint:
    if not texts or "" in texts:
        raise ApiError("a choice must have at least one text, and none may be empty")
    return Constraint("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))

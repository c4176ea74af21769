"""The document of the API in OpenAPI 3.1, from the same models that read requests and write answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from meshwright.serving.http.endpoint import Endpoint
from meshwright.serving.http.errors import ErrorReply
from meshwright.serving.http.service import Service

REFUSALS = {
    "400": "A field or a body that is not what it has to be",
    "401": "No API key of this server",
    "404": "Another model, or no such endpoint",
    "408": "A body or an answer that took too long",
    "413": "A body that is too long",
    "415": "A body that is not said to be JSON",
    "429": "The queue is full; Retry-After says when to ask again",
    "431": "Headers that are too long",
    "500": "A fault of the server",
    "503": "Not ready yet, or shutting down",
}

PLAIN = {
    "/health": "Whether the process lives",
    "/ready": "Whether requests are taken: 503 until then, and while the server shuts down",
    "/metrics": "Numbers in Prometheus' text form",
    "/": "A page to chat on",
}
"""What is asked for by GET and answers text."""


def document(
    service: Service, endpoints: Sequence[Endpoint], lists: dict[str, tuple[str, type[BaseModel]]]
) -> dict[str, Any]:
    """The document.

    Args:
        endpoints: that read JSON. lists: by path, what is asked for by GET: what it is, and the model of its answer.
    """
    replies: list[type[BaseModel]] = [ErrorReply, *(reply for _, reply in lists.values())]
    replies += [reply for endpoint in endpoints for reply in (endpoint.reply, endpoint.event) if reply]
    kinds: list[tuple[type[BaseModel], JsonSchemaMode]] = [(endpoint.fields, "validation") for endpoint in endpoints]
    kinds.extend((reply, "serialization") for reply in replies)
    references, schemas = models_json_schema(kinds, ref_template="#/components/schemas/{model}")
    refusals = {
        status: {"description": what, "content": _json(references[ErrorReply, "serialization"])}
        for status, what in REFUSALS.items()
    }
    paths: dict[str, Any] = {path: {"get": _operation(what, {"text/plain": {}}, {})} for path, what in PLAIN.items()}
    for path, (what, reply) in lists.items():
        operation = _operation(what, _json(references[reply, "serialization"]), refusals)
        if "{name}" in path:
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [name]
        paths[path] = {"get": operation}
    for endpoint in endpoints:
        content = _json(references[endpoint.reply, "serialization"])
        if endpoint.event is not None:
            content["text/event-stream"] = {"schema": references[endpoint.event, "serialization"]}
        body = {"required": True, "content": _json(references[endpoint.fields, "validation"])}
        paths[endpoint.path] = {"post": _operation(endpoint.what, content, refusals) | {"requestBody": body}}
    security = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if service.api_keys else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"{service.model}, served by meshwright",
            "version": "1",
            "description": "A field that is null is as one that is left out; one that is unknown is an error.",
        },
        "paths": paths,
        "components": {"schemas": schemas["$defs"], **security},
        **({"security": [{"key": []}]} if service.api_keys else {}),
    }


def _operation(what: str, content: dict[str, Any], refusals: dict[str, Any]) -> dict[str, Any]:
    return {"summary": what, "responses": {"200": {"description": what, "content": content}, **refusals}}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}

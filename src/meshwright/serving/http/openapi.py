"""The OpenAPI 3.1 document of a server, generated from the pydantic models of its endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from meshwright.serving.http.endpoint import Endpoint
from meshwright.serving.http.errors import ErrorResponse
from meshwright.serving.http.service import Service

ERRORS = {
    "400": "An invalid field or body",
    "401": "No valid API key",
    "403": "Another host, or a page of another origin",
    "404": "Another model, or an unknown path",
    "408": "The body or the answer exceeded its time limit",
    "413": "The body is too large",
    "415": "The content type is not application/json",
    "429": "The queue is full; retry after the time in Retry-After",
    "431": "The headers are too large",
    "500": "Internal server error",
    "503": "Not ready yet, or shutting down",
}

TEXT_PATHS = {
    "/health": "Liveness probe",
    "/ready": "Readiness probe: 503 until the model is compiled, and while the server shuts down",
    "/metrics": "Metrics in Prometheus' text format",
    "/": "The chat page",
}
"""Paths of GET requests that are answered with text, and their summaries."""


def openapi_document(
    service: Service, endpoints: Sequence[Endpoint], json_paths: dict[str, tuple[str, type[BaseModel]]]
) -> dict[str, Any]:
    """Return the document as JSON data.

    Args:
        service: the server, for its name and whether it needs API keys.
        endpoints: the POST endpoints.
        json_paths: the GET endpoints that answer with JSON: {path: (summary, pydantic model of the response)}.
    """
    responses: list[type[BaseModel]] = [ErrorResponse, *(response for _, response in json_paths.values())]
    responses += [model for endpoint in endpoints for model in (endpoint.response, endpoint.chunk) if model]
    kinds: list[tuple[type[BaseModel], JsonSchemaMode]] = [(endpoint.request, "validation") for endpoint in endpoints]
    kinds.extend((response, "serialization") for response in responses)
    references, schemas = models_json_schema(kinds, ref_template="#/components/schemas/{model}")
    errors = {
        status: {"description": summary, "content": _json(references[ErrorResponse, "serialization"])}
        for status, summary in ERRORS.items()
    }
    paths: dict[str, Any] = {
        path: {"get": _operation(summary, {"text/plain": {}}, {})} for path, summary in TEXT_PATHS.items()
    }
    for path, (summary, response) in json_paths.items():
        operation = _operation(summary, _json(references[response, "serialization"]), errors)
        if "{name}" in path:
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [name]
        paths[path] = {"get": operation}
    for endpoint in endpoints:
        content = _json(references[endpoint.response, "serialization"])
        if endpoint.chunk is not None:
            content["text/event-stream"] = {"schema": references[endpoint.chunk, "serialization"]}
        body = {"required": True, "content": _json(references[endpoint.request, "validation"])}
        paths[endpoint.path] = {"post": _operation(endpoint.summary, content, errors) | {"requestBody": body}}
    security = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if service.api_keys else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"{service.model}, served by meshwright",
            "version": "1",
            "description": "A field that is null counts as left out; an unknown field is an error.",
        },
        "paths": paths,
        "components": {"schemas": schemas["$defs"], **security},
        **({"security": [{"key": []}]} if service.api_keys else {}),
    }


def _operation(summary: str, content: dict[str, Any], errors: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": {"description": summary, "content": content}, **errors}}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}

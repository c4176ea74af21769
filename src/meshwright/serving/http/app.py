"""The Starlette app of a server: its routes, the endpoints without a body, and the responses to errors."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from meshwright.execution.text.chat import chat_template
from meshwright.serving.engine.request import Adapter
from meshwright.serving.http.async_engine import AsyncEngine
from meshwright.serving.http.easylm.generate import CHAT_TURN, GENERATE, GREEDY_UNTIL
from meshwright.serving.http.easylm.loglikelihood import LOGLIKELIHOOD, LOGLIKELIHOOD_ROLLING
from meshwright.serving.http.endpoint import AppState, Endpoint, EndpointApp
from meshwright.serving.http.errors import ApiError, internal_error, respond_to_error
from meshwright.serving.http.metrics import CONTENT_TYPE, Metrics
from meshwright.serving.http.middleware import REQUEST_ID, add_middleware
from meshwright.serving.http.openai.adapters import LOAD_ADAPTER, UNLOAD_ADAPTER
from meshwright.serving.http.openai.chat import CHAT_COMPLETIONS
from meshwright.serving.http.openai.completions import COMPLETIONS
from meshwright.serving.http.openai.embeddings import EMBEDDINGS
from meshwright.serving.http.openai.logprobs import TokenDecoder
from meshwright.serving.http.openai.stateless_responses import RESPONSES
from meshwright.serving.http.openai.tokens import DETOKENIZE, TOKENIZE
from meshwright.serving.http.openapi import openapi_document
from meshwright.serving.http.service import Service

ENDPOINTS: tuple[Endpoint, ...] = (
    COMPLETIONS, CHAT_COMPLETIONS, RESPONSES, EMBEDDINGS, TOKENIZE, DETOKENIZE, LOAD_ADAPTER, UNLOAD_ADAPTER,
    GENERATE, GREEDY_UNTIL, LOGLIKELIHOOD, LOGLIKELIHOOD_ROLLING, CHAT_TURN,
)  # fmt: skip

PAGE_SETTINGS = '"SETTINGS OF THE SERVER"'
"""Placeholder in page.html that is replaced by the server's settings."""

PAGE_POLICY = (
    "default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy of the chat page: only its own script, no outside resources, not framed by other pages."""


class ModelCard(BaseModel):
    """A model in `/v1/models`: the served model, or one of its adapters, with the served model as `parent`.

    max_model_len: the maximum number of tokens of a prompt and its completion together; a field that vLLM added.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: str | None = None


class ModelList(BaseModel):
    """The response body of `/v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


def make_app(service: Service) -> tuple[ASGIApp, AsyncEngine]:
    """Create the ASGI app of a service. Return it with its `AsyncEngine`, which has the open output streams."""
    metrics = Metrics(service.stats, service.means)
    async_engine = AsyncEngine(service.engine, metrics, on_closed=service.fail)
    state = AppState(service=service, async_engine=async_engine, token_decoder=TokenDecoder(service.tokenizer))
    routes: list[BaseRoute] = [
        *(Route(endpoint.path, EndpointApp(endpoint, state), methods=["POST"]) for endpoint in ENDPOINTS),
        *_get_routes(service, metrics),
    ]
    app: ASGIApp = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: respond_to_error,
            HTTPException: _routing_error,
            Exception: lambda request, error: internal_error(error, request.scope[REQUEST_ID]).response(),
        },
    )
    paths = frozenset(route.path for route in routes if isinstance(route, Route))
    return add_middleware(app, service, metrics.requests, paths), async_engine


def _get_routes(service: Service, metrics: Metrics) -> list[BaseRoute]:
    """Return the routes of GET requests, which have no body."""
    card = ModelCard(
        id=service.model, object="model", created=service.created, owned_by="meshwright", max_model_len=service.context
    )

    def card_of(adapter: Adapter | None) -> ModelCard:
        return card.model_copy(update={"id": adapter.name, "parent": service.model}) if adapter else card

    async def models(_: Request) -> Response:
        return _json(ModelList(object="list", data=[card, *map(card_of, service.adapters_by_name.values())]))

    async def model(request: Request) -> Response:
        return _json(card_of(service.find_adapter(request.path_params["name"])))

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(_: Request) -> Response:
        if service.is_draining or not service.is_ready:
            return PlainTextResponse("shutting down\n" if service.is_draining else "not ready\n", 503)
        return PlainTextResponse("ready\n")

    async def prometheus(_: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    document = openapi_document(
        service,
        ENDPOINTS,
        {"/v1/models": ("The served models", ModelList), "/v1/models/{name}": ("One model", ModelCard)},
    )

    async def openapi(_: Request) -> Response:
        return JSONResponse(document)

    settings = {
        "model": service.model,
        "has_chat": service.tokenizer is not None and chat_template(service.tokenizer) is not None,
        "has_keys": bool(service.api_keys),
    }
    # Escape "<": a model name with "</script>" in it would end the script.
    settings_json = json.dumps(settings).replace("<", "\\u003c")
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    html = html.replace(PAGE_SETTINGS, settings_json)
    policy = PAGE_POLICY.format(style=_hash_of("style", html), script=_hash_of("script", html))
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
    page = HTMLResponse(html, headers=headers)

    async def chat_page(_: Request) -> Response:
        return page

    return [
        Route("/", chat_page),
        Route("/v1/models", models),
        # `:path`, because names of models may have slashes.
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", prometheus),
        Route("/openapi.json", openapi),
    ]


def _hash_of(tag: str, html: str) -> str:
    """Return the hash of the page's only `tag` element, in the form of a content security policy."""
    source = html.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(exclude_none=True), media_type="application/json")


def _routing_error(request: Request, error: Exception) -> Response:
    """Return the response to an unknown path or method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.url.path[:100]} does not support {request.method}; it supports {allowed}"
        return ApiError(message, status=405, headers=dict(error.headers or {})).response()
    paths = ", ".join(endpoint.path for endpoint in ENDPOINTS)
    get_paths = "/v1/models, /health, /ready, /metrics"
    message = f"there is no endpoint {request.url.path[:100]!r}; POST to {paths}, or GET {get_paths}"
    return ApiError(message, status=error.status_code).response()

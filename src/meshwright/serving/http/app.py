"""The app: which endpoint answers which request."""

from __future__ import annotations

from typing import Literal

from prometheus_client import Counter
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from meshwright.serving.http.call import Calls
from meshwright.serving.http.chat import CHAT
from meshwright.serving.http.completions import COMPLETIONS
from meshwright.serving.http.easylm import GENERATE, GREEDY_UNTIL, TURN
from meshwright.serving.http.embeddings import EMBEDDINGS
from meshwright.serving.http.endpoint import Endpoint, Handler, Host
from meshwright.serving.http.errors import CLOSE, ApiError, respond_to_error
from meshwright.serving.http.gate import Gate
from meshwright.serving.http.metrics import Metrics
from meshwright.serving.http.openapi import document
from meshwright.serving.http.page import chat_page
from meshwright.serving.http.scoring import LOGLIKELIHOOD, ROLLING
from meshwright.serving.http.service import ServerState, Service
from meshwright.serving.http.texts import TokenTexts

ENDPOINTS: tuple[Endpoint, ...] = (
    COMPLETIONS, CHAT, EMBEDDINGS, GENERATE, GREEDY_UNTIL, LOGLIKELIHOOD, ROLLING, TURN,
)  # fmt: skip


class ModelCard(BaseModel):
    """A model that this server has. max_model_len: the most tokens of a prompt and its text together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """The models that this server has: one."""

    object: Literal["list"]
    data: list[ModelCard]


def make_app(service: Service) -> tuple[ASGIApp, Calls]:
    """The app of a service, and the calls that it has open."""
    metrics = Metrics(service.stats, service.means)
    calls = Calls(service.engine, metrics, on_closed=service.fail)
    host = Host(service=service, calls=calls, token_texts=TokenTexts(service.tokenizer))
    routes: list[BaseRoute] = [
        *(Route(endpoint.path, Handler(endpoint, host), methods=["POST"]) for endpoint in ENDPOINTS),
        *_others(service, metrics),
    ]
    app: ASGIApp = Starlette(
        routes=routes, exception_handlers={ApiError: respond_to_error, HTTPException: _no_route, Exception: _fault}
    )
    paths = frozenset(route.path for route in routes if isinstance(route, Route))
    return gated(app, service, metrics.requests, paths), calls


def gated(app: ASGIApp, service: ServerState, requests: Counter, endpoints: frozenset[str]) -> ASGIApp:
    """An app behind its gate, and open to the pages of other origins that may call; see `Gate`."""
    app = Gate(app, service, requests, endpoints)
    if service.cors_origins:
        app = CORSMiddleware(
            app, allow_origins=service.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    return app


def _others(service: Service, metrics: Metrics) -> list[BaseRoute]:
    """What is asked for without a body."""
    card = ModelCard(
        id=service.model, object="model", created=service.created, owned_by="meshwright", max_model_len=service.context
    )

    async def models(_: Request) -> Response:
        return _json(ModelList(object="list", data=[card]))

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return _json(card)

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(_: Request) -> Response:
        if service.is_draining or not service.is_ready:
            return PlainTextResponse("shutting down\n" if service.is_draining else "not ready\n", 503)
        return PlainTextResponse("ready\n")

    async def show_metrics(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    described = document(
        service,
        ENDPOINTS,
        {"/v1/models": ("The models there are", ModelList), "/v1/models/{name}": ("One model", ModelCard)},
    )

    async def openapi(_: Request) -> Response:
        return JSONResponse(described)

    shown = chat_page(service)

    async def page(_: Request) -> Response:
        return shown

    return [
        Route("/", page),
        Route("/v1/models", models),
        # Names of models have slashes.
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", show_metrics),
        Route("/openapi.json", openapi),
    ]


def _json(reply: BaseModel) -> Response:
    return Response(reply.model_dump_json(), media_type="application/json")


def _no_route(request: Request, error: Exception) -> Response:
    """The answer where there is no such endpoint, or none of that method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method} is no method of {request.url.path[:100]}; it has {allowed}"
        return ApiError(message, status=405, headers=dict(error.headers or {})).response()
    paths = ", ".join(endpoint.path for endpoint in ENDPOINTS)
    message = (
        f"there is no {request.url.path[:100]!r} here; POST to {paths}, or GET /v1/models, /health, /ready, /metrics"
    )
    return ApiError(message, status=error.status_code).response()


def _fault(_: Request, error: Exception) -> Response:
    """The answer to a fault of this server's own, which its log has in full."""
    return ApiError(
        f"a fault of the server: {type(error).__name__}", status=500, code="fault", headers=CLOSE
    ).response()

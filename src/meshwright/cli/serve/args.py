"""The options of `meshwright serve`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.cli.loading import ModelArgs
from meshwright.cli.processes import ProcessArgs
from meshwright.cli.waiting import waiting
from meshwright.description.step.serving import CacheSplit
from meshwright.errors import MeshwrightError
from meshwright.options.declare import option

if TYPE_CHECKING:
    from meshwright.serving.http.service import ApiKey, Limits

KEYS_VARIABLE = "MESHWRIGHT_API_KEYS"
"""The environment variable with API keys, separated by commas."""


@dataclass(frozen=True)
class Args(ModelArgs):
    """Serve a model over HTTP with OpenAI's API, and EasyLM's and LWM's endpoints; continuous batching."""

    host: Annotated[str, option("ADDRESS")] = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for all interfaces. Default: 127.0.0.1."""
    port: Annotated[int, option("N")] = 8000
    """The port; 0 picks a free one. Default: 8000."""
    name: Annotated[str | None, option("NAME")] = None
    """The model's name in the API. Default: the name of its directory."""
    plan: Annotated[Path | None, option("FILE")] = None
    """A serving plan (plan --serve decode -o FILE), for --on, --mesh, --rows, --context, --cache and dtypes."""
    rows: Annotated[int | None, option("N")] = None
    """The maximum number of sequences in the batch, over all devices. Default: 64."""
    context: Annotated[int | None, option("N")] = None
    """The maximum tokens of a prompt and its completion. Default: the model's context, at most 4096."""
    cache_tokens: Annotated[int | None, option("N")] = None
    """The tokens that fit the KV cache. Default: as many as memory allows, at most rows times context."""
    page_size: Annotated[int | None, option("N")] = None
    """The tokens of a page of the KV cache. Default: 16."""
    cache: Annotated[CacheSplit | None, option("heads|batch|sequence")] = None
    """How fsdp and sp split the KV cache, beside tp over its heads. Default: batch, by sequences."""
    kv_dtype: Annotated[str | None, option("int8")] = None
    """Store keys and values in int8, with a scale per token and head. Default: the compute dtype."""
    weight_dtype: Annotated[str | None, option("int8")] = None
    """Store the weights of layers in int8, with a scale per column. Default: the compute dtype."""
    chunk: Annotated[int, option("N")] = 1024
    """The maximum prompt tokens between two decode steps (chunked prefill). Default: 1024."""
    no_prefix_cache: Annotated[bool, option()] = False
    """Do not keep pages of prompts for later prompts with the same prefix."""
    drafts: Annotated[int | None, option("N")] = None
    """Speculative decoding with N draft tokens a step, by n-gram lookup. Default: 0; 4 with a draft model."""
    draft_model: Annotated[Path | None, option("DIR|RUN")] = None
    """A smaller model with the same vocabulary that proposes the draft tokens. Default: none."""
    max_queue: Annotated[int, option("N")] = 1024
    """The maximum number of queued requests; others get 429. Default: 1024."""
    timeout: Annotated[float | None, option("SECONDS")] = None
    """The time limit of a request. Default: 600."""
    grace: Annotated[float, option("SECONDS")] = 30.0
    """The time that open requests have to finish after SIGTERM. Default: 30."""
    api_keys: Annotated[Path | None, option("FILE")] = None
    """A file with one API key a line, each with limits of its own if you like (KEY requests=4 max_tokens=256).
    MESHWRIGHT_API_KEYS adds keys, separated by commas. Default: no key is needed."""
    limit: Annotated[tuple[str, ...], option("NAME=VALUE…")] = ()
    """Limits of a request, as max_tokens=512 prompt_tokens=2048; docs/serving.md lists them and their defaults."""
    cors: Annotated[tuple[str, ...], option("ORIGIN…")] = ()
    """Origins whose pages may call the server (CORS); * for all. Default: none."""
    allowed_host: Annotated[tuple[str, ...], option("NAME…")] = ()
    """Names by which clients may call the server, beside localhost and --host; * for all. Default: none."""
    replicas: Annotated[int, option("N")] = 1
    """Servers of the model behind one port, which share the devices; --mesh is of each. Default: 1."""
    process: ProcessArgs = field(default_factory=ProcessArgs)


def hosts_and_origins(args: Args) -> dict[str, Any]:
    """Return the allowed hosts of requests and the CORS origins, as fields of the server's state."""
    from meshwright.serving.http.hosts import check_cors, check_hosts

    return {"allowed_hosts": check_hosts(args.allowed_host), "cors_origins": check_cors(args.cors)}


def limits_and_keys(args: Args) -> tuple[Limits, tuple[ApiKey, ...]]:
    """Return the limits of requests, and the API keys of the file and of the environment."""
    with waiting("loading JAX"):
        from meshwright.serving.http.api_keys import parse_api_keys, parse_limits
        from meshwright.serving.http.service import Limits

    limits = parse_limits(args.limit, Limits(), "--limit")
    if args.timeout is not None:
        if any(word.startswith("seconds=") for word in args.limit):
            raise MeshwrightError("--timeout and --limit seconds= both set the time limit of a request; give one")
        limits = replace(limits, seconds=args.timeout)
    of_environment = [key for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip()]
    keys = parse_api_keys(of_environment, limits, KEYS_VARIABLE) if of_environment else ()
    if args.api_keys is not None:
        try:
            text = args.api_keys.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MeshwrightError(f"cannot read --api-keys {args.api_keys}: {error}") from None
        keys += parse_api_keys(text.splitlines(), limits, f"--api-keys {args.api_keys}")
    return limits, keys

"""Send streaming requests to a server, at a rate or a concurrency, and record when each part of an answer arrives."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from meshwright.errors import MeshwrightError
from meshwright.serving.load.requests import LoadRequest

MAX_REASON = 300
"""Maximum number of characters kept of a server's error message."""


@dataclass(frozen=True)
class Target:
    """The server to measure.

    Args:
        url: the server's URL, without /v1.
        model: name of the model to request.
        api_key: API key, if the server requires one.
        timeout_seconds: maximum time between two parts of an answer.
    """

    url: str
    model: str
    api_key: str | None = None
    timeout_seconds: float = 600.0


@dataclass(frozen=True)
class Arrivals:
    """When requests are sent: a Poisson process of `rate` per second, or `concurrency` open requests at all times."""

    rate: float | None = None
    concurrency: int | None = None

    def __str__(self) -> str:
        return f"{self.rate:g} a second" if self.rate is not None else f"{self.concurrency} at once"


@dataclass(frozen=True)
class Answer:
    """The timing and result of one request. Times are in seconds from the start of the load.

    Args:
        begin: when the request was sent.
        end: when the answer ended, or failed.
        arrivals: when each part of the answer that has tokens arrived.
        prompt_tokens: tokens of the prompt, as the server counts them; 0 if it does not.
        output_tokens: tokens of the answer, as the server counts them; if it does not, the number of `arrivals`.
        error: the kind of failure; empty for a complete answer.
        reason: the server's error message.
        late_seconds: how much later than scheduled the request was sent.
    """

    begin: float
    end: float
    arrivals: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    reason: str = ""
    late_seconds: float = 0.0


def find_model(url: str, api_key: str | None, timeout_seconds: float) -> str:
    """Return the first model in a server's `/v1/models`.

    Raises:
        MeshwrightError: no server answers, or it has no list of models.
    """
    try:
        response = httpx.get(f"{url}/v1/models", headers=_headers(api_key), timeout=timeout_seconds)
        response.raise_for_status()
        return response.json()["data"][0]["id"]
    except httpx.HTTPStatusError as error:
        hint = "; set OPENAI_API_KEY to one of its API keys" if error.response.status_code == 401 else ""
        raise MeshwrightError(f"{url}/v1/models answers with status {error.response.status_code}{hint}") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise MeshwrightError(f"no server answers at {url}: {error or type(error).__name__}") from None
    except (ValueError, LookupError, TypeError):
        raise MeshwrightError(f"{url}/v1/models returns no list of models; name the model with --model") from None


def drive(
    target: Target,
    requests: Sequence[LoadRequest],
    load: Arrivals,
    *,
    seed: int,
) -> list[Answer]:
    """Send all requests, and wait for their answers. Return the answers in the order in which they ended.

    Args:
        target: the server.
        requests: the requests, in the order in which they are sent.
        load: when they are sent.
        seed: seed of the random arrival times.
    """
    return asyncio.run(_drive(target, requests, load, seed))


async def _drive(target: Target, requests: Sequence[LoadRequest], load: Arrivals, seed: int) -> list[Answer]:
    answers: list[Answer] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        timeout=httpx.Timeout(target.timeout_seconds), limits=limits, headers=_headers(target.api_key)
    ) as client:
        start = time.perf_counter()

        async def answer(request: LoadRequest, due: float | None = None) -> None:
            answers.append(await _answer(client, target, request, start, due))

        if load.rate is not None:
            async with asyncio.TaskGroup() as group:
                for request, due in zip(requests, _arrivals(load.rate, seed), strict=False):
                    await asyncio.sleep(due - (time.perf_counter() - start))
                    group.create_task(answer(request, due))
        else:
            remaining = iter(requests)

            async def worker() -> None:
                for request in remaining:
                    await answer(request)

            async with asyncio.TaskGroup() as group:
                for _ in range(load.concurrency or 1):
                    group.create_task(worker())
    return answers


def _arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield the times of a Poisson process, in seconds from its start, without end."""
    rng, at = Random(seed), 0.0
    while True:
        yield at
        at += rng.expovariate(rate)


async def _answer(
    client: httpx.AsyncClient, target: Target, request: LoadRequest, start: float, due: float | None
) -> Answer:
    """Send a request and read its streamed answer. A failure is returned as an `Answer` with an error.

    Args:
        target: the server.
        start: start of the load, on the clock `time.perf_counter`.
        due: when the request was to be sent, in seconds from `start`; None without a schedule.
    """
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.is_random:
        body["ignore_eos"] = True  # Not a field of OpenAI's API; vLLM, SGLang and meshwright have it.
    begin = time.perf_counter() - start
    arrivals: list[float] = []
    usage = Counter[str]()
    error, reason = "cut off", ""
    try:
        async with client.stream("POST", f"{target.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                error, reason = f"status {response.status_code}", (await response.aread()).decode(errors="replace")
                raise httpx.HTTPStatusError("", request=response.request, response=response)
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                if (text := line[5:].strip()) == "[DONE]":
                    error = ""
                    break
                data = json.loads(text)
                if "error" in data:
                    error, reason = "error in the stream", text
                    break
                usage.update({name: count for name, count in (data.get("usage") or {}).items() if type(count) is int})
                # A part without text counts too, because it may be a special token; not the last, which may have none.
                if any(choice.get("text") or not choice.get("finish_reason") for choice in data.get("choices", ())):
                    arrivals.append(time.perf_counter() - start)
    except httpx.HTTPStatusError:
        pass
    except httpx.TimeoutException:
        error = "timeout"
    except httpx.ConnectError:
        error = "no connection"
    except httpx.TransportError:
        error = "connection lost"
    except (ValueError, AttributeError, TypeError):
        error = "no stream of completions"
    text = reason
    with suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return Answer(
        begin=begin,
        end=time.perf_counter() - start,
        arrivals=tuple(arrivals),
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"] or len(arrivals),
        error=error,
        reason=" ".join(text.split())[:MAX_REASON],
        late_seconds=0.0 if due is None else begin - due,
    )


def _headers(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}

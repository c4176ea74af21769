"""OpenAI's `/v1/embeddings`: the mean of the last hidden states of each input."""

from __future__ import annotations

import base64
from array import array
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from meshwright.serving.engine.request import Request
from meshwright.serving.http.async_engine import OutputStream
from meshwright.serving.http.endpoint import AppState, Endpoint
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.openai.completions import Prompts, prompt_tokens
from meshwright.serving.http.openai.generation import resolve_max_tokens, truncated
from meshwright.serving.http.openai.responses import UsageCounter
from meshwright.serving.http.request_body import IgnoredFields


class EmbeddingRequest(IgnoredFields):
    """The request body of embeddings."""

    model: str | None = Field(None, description="the model's name, as in /v1/models")
    input: Annotated[Prompts, Field(union_mode="left_to_right")] = Field(
        description="a text, a list of token ids, or a list of texts or of such lists"
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="float, or base64 of little-endian float32"
    )
    dimensions: int | None = Field(
        None, ge=1, lt=2**31, description="a whole number from 1: how many of an embedding's numbers to return"
    )
    add_special_tokens: bool = Field(
        True, description="true or false: whether inputs of text get the special tokens that begin a text"
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        lt=2**31,
        description="a whole number from 1: keep only so many tokens at the end of each input; -1: as many as fit",
    )


class Embedding(BaseModel):
    """The embedding of one input: a list of numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Token counts of a response."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """The response body of embeddings, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def create_embeddings(state: AppState, body: EmbeddingRequest) -> Embeddings:
    """Compute the embedding of each input.

    Raises:
        ApiError: `dimensions` exceeds the width of the model.
    """
    service = state.service
    prompts = [
        truncated(service, prompt, body.truncate_prompt_tokens, 0)
        for prompt in await prompt_tokens(
            service,
            body.input,
            "input",
            add_special_tokens=body.add_special_tokens,
            is_cut=body.truncate_prompt_tokens is not None,
        )
    ]
    requests = [
        Request(prompt=prompt, max_tokens=resolve_max_tokens(service, len(prompt), 0, "input"), pooled=True)
        for prompt in prompts
    ]
    async with OutputStream(state.async_engine, requests, service, is_streamed=False) as stream:
        outputs = await stream.collect()
    width = len(outputs[0].output.pooled)
    if body.dimensions is not None and body.dimensions > width:
        raise ApiError(
            f"dimensions is {body.dimensions}; the embeddings of {service.model} have {width} numbers",
            param="dimensions",
        )
    usage = UsageCounter(state.async_engine.metrics, requests).finish()
    data = [
        Embedding(
            object="embedding", index=number, embedding=_encode(output.pooled[: body.dimensions], body.encoding_format)
        )
        for number, output in outputs
    ]
    return Embeddings(
        object="list", data=data, model=service.model,
        usage=EmbeddingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens),
    )  # fmt: skip


def _encode(values: tuple[float, ...], encoding_format: str) -> list[float] | str:
    return list(values) if encoding_format == "float" else base64.b64encode(array("f", values).tobytes()).decode()


EMBEDDINGS = Endpoint(
    path="/v1/embeddings",
    summary="Embeddings: mean hidden states",
    request=EmbeddingRequest,
    response=Embeddings,
    handler=create_embeddings,
)

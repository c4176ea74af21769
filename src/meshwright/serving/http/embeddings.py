"""OpenAI's `/v1/embeddings`: the mean of the hidden states of each text."""

from __future__ import annotations

import base64
from array import array
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from meshwright.serving.http.call import Call
from meshwright.serving.http.completions import Prompts, prompt_tokens
from meshwright.serving.http.endpoint import Endpoint, Host
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.fields import Ignored
from meshwright.serving.http.generation import checked_max_tokens
from meshwright.serving.http.usage import UsageCount
from meshwright.serving.request import Request


class EmbeddingFields(Ignored):
    """A request for embeddings."""

    model: str | None = Field(None, description="the model's name, as /v1/models says it")
    input: Annotated[Prompts, Field(union_mode="left_to_right")] = Field(
        description="a text, a list of tokens, or a list of texts or of lists of tokens"
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="float or base64, which is of float32, the lowest byte of each first"
    )
    dimensions: int | None = Field(
        None, description="left out: this server's embeddings are as wide as the model's hidden states"
    )


class Embedding(BaseModel):
    """The embedding of one text: numbers, or their float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """The numbers of tokens of an answer."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """The embeddings of texts, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def embed(host: Host, asked: EmbeddingFields) -> Embeddings:
    """Make the embedding of each text."""
    service = host.service
    service.check_model(asked.model)
    if asked.dimensions is not None:
        raise ApiError(
            f"dimensions is {asked.dimensions}; this server's embeddings are as wide as the model's hidden states:"
            " leave it out",
            param="dimensions",
        )
    prompts = await prompt_tokens(service, asked.input, "input")
    requests = [
        Request(prompt=prompt, max_tokens=checked_max_tokens(service, len(prompt), 0, "input"), pooled=True)
        for prompt in prompts
    ]
    async with Call(host.calls, requests, service.limits, is_streamed=False) as call:
        pieces = await call.whole()
    usage = UsageCount(host.calls.metrics, requests).finish()
    data = [
        Embedding(object="embedding", index=number, embedding=_encoded(output.pooled, asked.encoding_format))
        for number, output in pieces
    ]
    return Embeddings(
        object="list", data=data, model=service.model,
        usage=EmbeddingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens),
    )  # fmt: skip


def _encoded(values: tuple[float, ...], form: str) -> list[float] | str:
    return list(values) if form == "float" else base64.b64encode(array("f", values).tobytes()).decode()


EMBEDDINGS = Endpoint(
    path="/v1/embeddings",
    what="The mean hidden states of texts",
    fields=EmbeddingFields,
    reply=Embeddings,
    answer=embed,
)

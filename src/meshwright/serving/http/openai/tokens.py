"""vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from meshwright.serving.http.endpoint import AppState, Endpoint
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.openai.chat import prompt_end
from meshwright.serving.http.openai.messages import Message, Tool, chat_prompt
from meshwright.serving.http.request_body import RequestModel, Tokens


class TokenizeRequest(RequestModel):
    """The request body of `/tokenize`: a text, or the messages of a chat."""

    model: str | None = Field(None, description="the model's name, as in /v1/models")
    prompt: str | None = Field(None, description="a text")
    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(
        [], description="a list of messages, in place of prompt"
    )
    add_special_tokens: bool = Field(
        True, description="true or false: whether a text gets the special tokens that begin a text"
    )
    return_token_strs: bool = Field(False, description="true or false: whether to return the text of each token too")
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field([], description="a list of functions")
    add_generation_prompt: bool | None = Field(
        None, description="true or false: whether the prompt ends with what begins an answer; true without it"
    )
    continue_final_message: bool = Field(
        False, description="true or false: whether to continue the last message instead of answering it"
    )
    chat_template_kwargs: dict[str, Any] = Field({}, description="an object: more variables of the chat template")


class TokenizeResponse(BaseModel):
    """The tokens of a text or chat. max_model_len: the maximum tokens of a prompt and its completion together."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """The request body of `/detokenize`."""

    model: str | None = Field(None, description="the model's name, as in /v1/models")
    tokens: Tokens = Field(description="a list of token ids")


class DetokenizeResponse(BaseModel):
    """The text of tokens, special ones included."""

    prompt: str


async def tokenize(state: AppState, body: TokenizeRequest) -> TokenizeResponse:
    """Tokenize a text or a chat.

    Raises:
        ApiError: the request has both or neither of prompt and messages.
    """
    service = state.service
    if (body.prompt is None) == (not body.messages):
        raise ApiError("the request needs one of prompt and messages", param="prompt")
    if body.prompt is not None:
        tokens = await service.tokens(body.prompt, "prompt", add_special_tokens=body.add_special_tokens)
    else:
        tokens = await chat_prompt(
            service,
            [message.for_template() for message in body.messages],
            "messages",
            tools=[tool.model_dump(exclude_unset=True) for tool in body.tools],
            variables=body.chat_template_kwargs,
            most=None,
            **prompt_end(body.add_generation_prompt, body.continue_final_message),
        )
    service.check_num_tokens("prompt" if body.prompt is not None else "messages", len(tokens))
    texts = {"token_strs": [state.token_decoder.decode(token) for token in tokens]} if body.return_token_strs else {}
    return TokenizeResponse(count=len(tokens), max_model_len=service.context, tokens=tokens, **texts)


async def detokenize(state: AppState, body: DetokenizeRequest) -> DetokenizeResponse:
    """Convert tokens to text.

    Raises:
        ApiError: a token id is not in the vocabulary.
    """
    service = state.service
    tokenizer = service.require_tokenizer("detokenizing")
    if (most := max(body.tokens, default=0)) >= tokenizer.num_tokens:
        raise ApiError(
            f"tokens has {most}; {service.model} has the tokens 0 to {tokenizer.num_tokens - 1}", param="tokens"
        )
    return DetokenizeResponse(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))


TOKENIZE = Endpoint(
    path="/tokenize",
    summary="The tokens of a text or a chat (vLLM)",
    request=TokenizeRequest,
    response=TokenizeResponse,
    handler=tokenize,
)
DETOKENIZE = Endpoint(
    path="/detokenize",
    summary="The text of tokens (vLLM)",
    request=DetokenizeRequest,
    response=DetokenizeResponse,
    handler=detokenize,
)

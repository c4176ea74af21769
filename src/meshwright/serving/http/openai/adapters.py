"""vLLM's `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import BaseModel, Field

from meshwright.serving.http.adapters import adapters_fixed
from meshwright.serving.http.endpoint import AppState, Endpoint
from meshwright.serving.http.errors import ApiError
from meshwright.serving.http.request_body import RequestModel

PATH_CHARACTERS = 4096
"""Maximum length of a path."""


class LoadAdapterRequest(RequestModel):
    """The request body of `/v1/load_lora_adapter`."""

    lora_name: str = Field(description="the name by which requests choose the adapter")
    lora_path: str = Field(
        max_length=PATH_CHARACTERS,
        description="a directory with the adapter, as PEFT writes it, inside --adapter-folder",
    )


class UnloadAdapterRequest(RequestModel):
    """The request body of `/v1/unload_lora_adapter`."""

    lora_name: str = Field(description="the name of a loaded adapter")


class AdapterChange(BaseModel):
    """The response body of both: the adapter's name as `id`, and whether it is loaded now."""

    id: str
    object: Literal["model"]
    loaded: bool


async def load_adapter(state: AppState, body: LoadAdapterRequest) -> AdapterChange:
    """Load an adapter under a name, by which requests can choose it as their model."""
    adapters = state.service.adapters
    if body.lora_name == state.service.model:
        raise ApiError(f"lora_name is {body.lora_name!r}, the name of the model; use another", param="lora_name")
    if adapters is None:
        raise adapters_fixed()
    await adapters.change(partial(adapters.load, body.lora_name, body.lora_path))
    return AdapterChange(id=body.lora_name, object="model", loaded=True)


async def unload_adapter(state: AppState, body: UnloadAdapterRequest) -> AdapterChange:
    """Unload an adapter; open requests that use it are still answered."""
    adapters = state.service.adapters
    if adapters is None:
        raise adapters_fixed()
    await adapters.change(partial(adapters.unload, body.lora_name))
    return AdapterChange(id=body.lora_name, object="model", loaded=False)


LOAD_ADAPTER = Endpoint(
    path="/v1/load_lora_adapter", summary="Load a LoRA adapter", request=LoadAdapterRequest, response=AdapterChange,
    handler=load_adapter,
)  # fmt: skip
UNLOAD_ADAPTER = Endpoint(
    path="/v1/unload_lora_adapter", summary="Unload a LoRA adapter", request=UnloadAdapterRequest,
    response=AdapterChange, handler=unload_adapter,
)  # fmt: skip

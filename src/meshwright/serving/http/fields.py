"""How the fields of requests are read, and those without effect.

A field that this server does not know is an error, which names the nearest one. A field of OpenAI's that would change
the answer and is not built is an error too. Accepted without effect are only those in `Ignored`: they are the client's
bookkeeping with OpenAI, and change no answer. null is as leaving a field out.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from meshwright.serving.http.errors import UNKNOWN_FIELD, from_validation

B = TypeVar("B", bound=BaseModel)

Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
"""Lists end at their first mistake: one of a million would otherwise be a million errors."""


class Fields(BaseModel):
    """Fields of a request: no others, each of its own type (no text that says a number), no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """Refuse the first unknown field: pydantic would list every one of a hundred thousand. Leave null ones out."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        said = {name: value for name, value in data.items() if value is not None}
        for name in said:
            if name not in known:
                near = difflib.get_close_matches(name[:100], known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"its fields are {', '.join(sorted(known))}"
                raise PydanticCustomError(UNKNOWN_FIELD, "no field", {"name": name, "hint": hint})
        return said


def read_fields(kind: type[B], data: dict[str, Any]) -> B:
    """The fields of a request.

    Raises:
        ApiError: a field that is unknown, missing, or not what it has to be.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise from_validation(error, kind, data) from None


class Ignored(Fields):
    """What OpenAI's clients send for OpenAI's own books."""

    user: str | None = Field(None, description="text; without effect")
    metadata: dict[str, Any] | None = Field(None, description="an object; without effect")
    store: bool | None = Field(None, description="true or false; without effect")
    service_tier: str | None = Field(None, description="text; without effect")
    safety_identifier: str | None = Field(None, description="text; without effect")
    prompt_cache_key: str | None = Field(None, description="text; without effect: prefixes are always cached")
    prompt_cache_retention: str | None = Field(None, description="text; without effect")

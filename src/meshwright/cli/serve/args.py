"""The arguments of `meshwright serve`."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.options.processes import ProcessArgs
from meshwright.options.serving import ServeArgs


@dataclass(frozen=True)
class Args(ServeArgs):
    """Serve a model over HTTP with OpenAI's API, and EasyLM's and LWM's endpoints; continuous batching."""

    process: ProcessArgs = field(default_factory=ProcessArgs)

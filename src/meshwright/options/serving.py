"""Options of a server's plan: the work and its hardware, and formats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from meshwright.options.declare import CountText, Keyword, ShareText, option


@dataclass(frozen=True)
class ServedArgs:
    """The work and the hardware."""

    serve: Annotated[Literal["decode", "prefill"], option("decode|prefill")] = "decode"
    """Tokens that a server writes (decode), or prompts that it reads (prefill)."""
    on: Annotated[str | None, option("CHIPS"), Keyword("SystemLike")] = None
    """The hardware: a chip and a slice shape or a device count, as v5e:4x4 or h100:8. Needed."""
    batch: CountText = None
    """Sequences served at once. Default: the most within --latency, else one for each group of devices."""
    latency: Annotated[
        str | None,
        option(
            "TIME",
            help="Longest step, as 30ms: a token of decode, or a batch of prompts of prefill. Default: no limit; "
            "the shortest step is best.",
        ),
        Keyword("str | float | None"),
    ] = None
    prompt_len: CountText = None
    """Tokens of a prompt. Default: 1024."""
    output_len: CountText = None
    """Tokens of an answer. Default: 256; prefill has none."""
    chunk: CountText = None
    """With --serve prefill: tokens of each prompt in a step, as `serve` does. Default: whole prompts."""
    num_layers: CountText = None
    """Use only N layers of the model. Default: all."""
    hardware: Annotated[Path | None, option("FILE")] = None
    """A TOML file that describes a chip of your own, for --on to name."""
    memory_headroom: ShareText = None
    """Fraction added to predicted memory before it must fit, as 10%. Default: the error measured on such chips."""


@dataclass(frozen=True)
class FormatArgs:
    """Formats. Default: bf16, on simulated CPU devices f32."""

    dtype: Annotated[str | None, option("DTYPE")] = None
    """Format of matmuls: also int8 or fp8 on chips that have it."""
    weight_dtype: Annotated[str | None, option("DTYPE")] = None
    """Format of weights: int8, fp8, int4, …"""
    kv_dtype: Annotated[str | None, option("DTYPE")] = None
    """Format of cached keys and values."""

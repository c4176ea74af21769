"""Options of a server, and of its plan: the work, the hardware and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from meshwright.description.step.serving import CacheSplit
from meshwright.description.step.workload import Dtype
from meshwright.errors import MeshwrightError
from meshwright.options.declare import CompileCache, CountText, Keyword, Mesh, ShareText, option, positional


@dataclass(frozen=True)
class ServedArgs:
    """The work and the hardware."""

    serve: Annotated[Literal["decode", "prefill"], option("decode|prefill")] = "decode"
    """The phase to plan: generating tokens (decode), or processing prompts (prefill)."""
    on: Annotated[str | None, option("CHIPS"), Keyword("SystemLike")] = None
    """The hardware: a chip and a slice shape or a device count, as v5e:4x4 or h100:8. Needed."""
    batch: CountText = None
    """Sequences served at once. Default: the most within --latency; without --latency, dp*ep."""
    latency: Annotated[str | None, option("TIME"), Keyword("str | float | None")] = None
    """Maximum step time, as 30ms: of one decode step, or of a batch of prompts. Default: no limit; the shortest step is
    best.
    """
    prompt_len: CountText = None
    """Tokens of a prompt. Default: 1024."""
    output_len: CountText = None
    """Tokens of an answer. Default: 256; prefill has none."""
    chunk: CountText = None
    """With --serve prefill: tokens of each prompt in a step (chunked prefill). Default: whole prompts.
    """
    adapter_slots: CountText = None
    """LoRA adapters that the server holds at once, of which each sequence uses one. Default: 0."""
    adapter_rank: CountText = None
    """The maximum rank of these adapters. Default: 16."""
    num_layers: CountText = None
    """Use only N layers of the model. Default: all."""
    hardware: Annotated[Path | None, option("FILE")] = None
    """A TOML file with your own chip, whose name --on then accepts."""
    memory_headroom: ShareText = None
    """Fraction added to predicted memory before it must fit, as 10%. Default: the error measured on such chips."""


@dataclass(frozen=True)
class FormatArgs:
    """Dtypes. Default: bf16, on simulated CPU devices f32."""

    dtype: Annotated[str | None, option("DTYPE")] = None
    """Dtype of matmuls: also int8 or fp8 on chips that support it."""
    weight_dtype: Annotated[str | None, option("DTYPE")] = None
    """Dtype of weights: bf16, f32; int8, int4 or fp8 for those of layers, with scales."""
    kv_dtype: Annotated[str | None, option("DTYPE")] = None
    """Dtype of cached keys and values."""


@dataclass(frozen=True)
class ModelArgs:
    """A model with its weights, and its devices."""

    model: Annotated[Path, positional("DIR|RUN")]
    """A Hugging Face directory (config.json, safetensors), or a run directory of `meshwright train`."""
    on: Annotated[str | None, option("CHIPS"), Keyword("SystemLike | None")] = None
    """The hardware, as cpu:8 or h100:8. Default: a run's own; needed for a Hugging Face directory."""
    mesh: Mesh = None
    """The mesh, as 1,2,1,1 or fsdp=2. Default: a run's own; for a directory, fsdp over all devices."""
    dtype: Annotated[Dtype | None, option("bf16|f32")] = None
    """Dtype of parameters and matmuls. Default: the weights' dtype."""
    compile_cache: CompileCache = None
    """Directory in which compiled programs are cached, at most 4 GiB, or off. Default: the user's cache."""


@dataclass(frozen=True)
class LoadArgs(ModelArgs):
    """A model with the weights that a command loads: its own, and adapters added to them."""

    adapter: Annotated[Path | None, option("DIRECTORY")] = None
    """Add these adapters, as PEFT writes them, to the weights of a directory. Default: none."""


@dataclass(frozen=True)
class ServeArgs(ModelArgs):
    """A server of a model."""

    adapter: Annotated[
        tuple[str, ...],
        option("[NAME=]DIRECTORY…"),
        Keyword("str | Path | Sequence[str] | Mapping[str, str | Path] | None"),
    ] = ()
    """Adapters, as PEFT writes them. NAME=DIRECTORY: requests choose it by this name. DIRECTORY alone: add it to the
    weights. Default: none.
    """
    adapter_slots: Annotated[int | None, option("N")] = None
    """The maximum number of named adapters at once. Default: those of --adapter."""
    adapter_rank: Annotated[int | None, option("N")] = None
    """The maximum rank of named adapters. Default: the largest of --adapter, or 16 without any."""
    adapter_folder: Annotated[Path | None, option("DIRECTORY")] = None
    """Let requests load and unload named adapters (/v1/load_lora_adapter), from inside this directory only. Default:
    they cannot.
    """
    host: Annotated[str, option("ADDRESS")] = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for all interfaces. Default: 127.0.0.1."""
    port: Annotated[int, option("N")] = 8000
    """The port; 0 picks a free one. Default: 8000."""
    name: Annotated[str | None, option("NAME")] = None
    """The model's name in the API. Default: the name of its directory."""
    plan: Annotated[Path | None, option("FILE")] = None
    """A serving plan (plan --serve decode -o FILE); it sets --on, --mesh, --batch, --context, --cache and dtypes."""
    batch: Annotated[int | None, option("N")] = None
    """The maximum number of sequences in the batch, over all devices. Default: 64."""
    context: Annotated[int | None, option("N")] = None
    """The maximum tokens of a prompt and its completion. Default: the model's context, at most 4096."""
    cache_tokens: Annotated[int | None, option("N")] = None
    """The capacity of the KV cache in tokens. Default: the most that memory allows, up to batch times context."""
    page_size: Annotated[int | None, option("N")] = None
    """The tokens of a page of the KV cache. Default: 16."""
    cache: Annotated[CacheSplit | None, option("heads|batch|sequence")] = None
    """How fsdp and sp split the KV cache, in addition to tp over its heads: batch, by sequences; sequence, by tokens;
    heads, not at all. Default: batch."""
    kv_dtype: Annotated[str | None, option("int8|fp8")] = None
    """Store keys and values in int8, with a scale per token and head, or in fp8 (e4m3), without scales. Default: the
    compute dtype."""
    weight_dtype: Annotated[str | None, option("int8|int4|fp8")] = None
    """Store the weights of layers in int8 or fp8, with a scale per column, or in int4, with a scale per 128 inputs.
    Those that a checkpoint has in int4 (GPTQ, AWQ) or fp8 stay as they are. Default: the compute dtype.
    """
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
    """A file with one API key a line, each optionally with its own limits (KEY requests=4 max_tokens=256).
    MESHWRIGHT_API_KEYS adds keys, separated by commas. Default: no key is needed.
    """
    limit: Annotated[
        tuple[str, ...], option("NAME=VALUE…"), Keyword("str | Sequence[str] | Mapping[str, float] | None")
    ] = ()
    """Limits of a request, as max_tokens=512 prompt_tokens=2048; docs/serving.md lists them and their defaults."""
    cors: Annotated[tuple[str, ...], option("ORIGIN…")] = ()
    """Origins whose pages may call the server (CORS); * for all. Default: none."""
    allowed_host: Annotated[tuple[str, ...], option("NAME…")] = ()
    """Names by which clients may call the server, in addition to localhost and --host; * for all. Default: none."""
    replicas: Annotated[int, option("N")] = 1
    """Servers of the model behind one port, which share the devices; --mesh is each one's mesh. Default: 1."""


def split_adapters(words: Sequence[str]) -> tuple[Path | None, dict[str, Path]]:
    """Return (directory of the adapter to add to the weights, or None; directories of the named adapters, by name).

    words: the values of --adapter, `DIRECTORY` or `NAME=DIRECTORY`.

    Raises:
        MeshwrightError: a name is given twice, or several adapters have no name.
    """
    named, merged = dict[str, Path](), list[Path]()
    for word in words:
        name, equals, directory = word.partition("=")
        if not equals or "/" in name:
            merged.append(Path(word))
        elif name in named or not directory:
            raise MeshwrightError(f"--adapter has {word!r}; write NAME=DIRECTORY, each name once")
        else:
            named[name] = Path(directory)
    if len(merged) > 1:
        raise MeshwrightError(f"--adapter adds {merged[0]} and {merged[1]} to the weights; name them, as a={merged[0]}")
    return next(iter(merged), None), named

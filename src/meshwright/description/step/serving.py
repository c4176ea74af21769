"""A serving workload: model, prompts and answers, dtypes, and its layout on a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from meshwright.description.hardware.chip import Chip
from meshwright.description.hardware.dtypes import canonical_dtype, dtype_bytes
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.rules import RULES, Rules, local_parameter_shape
from meshwright.description.step.weight_formats import (
    WEIGHT_FORMATS,
    WHOLE_COLUMN,
    WeightDtype,
    WeightFormat,
    has_format,
    matrix_shape,
)
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape

ServingPhase = Literal["prefill", "decode"]
CacheSplit = Literal["heads", "batch", "sequence"]
CacheDtype = Literal["int8", "fp8"]

CACHE_SPLITS: tuple[CacheSplit, ...] = get_args(CacheSplit)
"""How the KV cache is split beyond kv heads over tp: not at all, by sequences of the batch, or by tokens of a sequence.
"""

NARROW: dict[str, tuple[str, ...]] = {"weight_dtype": get_args(WeightDtype), "kv_dtype": get_args(CacheDtype)}
"""Dtypes besides the compute dtype in which a server stores weights, and keys and values in pages.

Weights and int8 keys and values have scales; fp8 keys and values have none. All are multiplied in the compute dtype.
"""

SERVING_RULES: Rules = {
    **RULES,
    # Weights are stationary, split along both dims of a matmul (arXiv:2211.05102, section 3.2): fsdp splits the
    # stream's dim; sp and tp together split heads, mlp and vocab (tp the kv heads, sp the query heads that share one).
    "embed": ("fsdp",),
    "layer_columns": ("fsdp",),
    "kv_heads": ("tp",),
    "group": ("sp",),
    "mlp": ("sp", "tp"),
    "vocab": ("sp", "tp"),
    "expert": ("ep",),
    # Latents are narrow, so each device has them whole; weights that read them are split only along heads.
    "latent_input": (),
    "batch": ("dp", "ep"),
    "sequence": (),
    "residual_sequence": (),
    "activation": ("fsdp",),
}
"""Sharding rules of a server: weights are never gathered. dp makes replicas, ep splits tokens and experts."""

GATHERED_RULES: Rules = {**SERVING_RULES, "embed": (), "activation": (), "batch": ("dp", "fsdp", "ep")}
"""Sharding rules of matmuls over whole prompts that fsdp splits by batch.

Weights are stored by `SERVING_RULES`, and gathered over fsdp layer by layer, as in training. For many tokens that moves
less than activations do (weight-gathered layouts, arXiv:2211.05102, section 3.2.3).
"""

TENSOR_AXES = ("sp", "tp")
"""The axes that split heads, mlp and vocab."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """One phase of serving `batch` sequences: prompts of `prompt_len` tokens, answers of `output_len` tokens."""

    model: ModelConfig
    phase: ServingPhase = "decode"
    prompt_len: int
    output_len: int
    batch: int | None = None  # Over all devices; None: the planner chooses.
    weight_dtype: str = "bf16"  # Dtype of stored weights.
    # Of a checkpoint whose weights are in `weight_dtype` (GPTQ, AWQ, block fp8): inputs of a group or `WHOLE_COLUMN`,
    # where they are not those of the format; and whether groups have zero points.
    weight_group: int | None = None
    has_weight_zeros: bool = False
    kv_dtype: str = "bf16"  # Dtype of cached keys and values.
    compute_dtype: str = "bf16"  # Dtype of matmuls' operands.
    page_size: int = 16  # Tokens per page of the cache (16 in vLLM, arXiv:2309.06180).
    cache_lanes: int = 1  # In pages, a device's keys and values of a token are padded to a multiple (`cache_lanes`).
    # Prefill only: tokens of each prompt in a step, read into pages between steps of decoding, as a server does
    # (chunked prefill, arXiv:2403.02310). None: whole prompts, as generation reads them.
    chunk: int | None = None
    # Longest step allowed: decoding a token of every sequence, or prefill of one batch. None: no limit.
    latency_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.phase not in get_args(ServingPhase):
            raise MeshwrightError(f"phase is {self.phase!r}; it is one of {', '.join(get_args(ServingPhase))}")
        for field in ("prompt_len", "output_len", "page_size", "cache_lanes", "batch", "chunk"):
            value = getattr(self, field)
            if (value is not None or field not in ("batch", "chunk")) and (not isinstance(value, int) or value < 1):
                raise MeshwrightError(f"{field} is {value!r}; it takes a whole number from 1")
        if self.chunk is not None and self.phase == "decode":
            raise MeshwrightError(f"chunk is {self.chunk}, of prompts; decode reads none, leave it out")
        if self.chunk is not None and self.chunk > self.prompt_len:
            raise MeshwrightError(
                f"chunk is {self.chunk}, and a prompt has {self.prompt_len} tokens; use at most these"
            )
        for field in ("weight_dtype", "kv_dtype", "compute_dtype"):
            dtype_bytes(getattr(self, field))  # Raises for an unknown dtype.
        if self.latency_seconds is not None and not self.latency_seconds > 0:
            raise MeshwrightError(f"latency_seconds is {self.latency_seconds!r}; it takes a time above 0, as 0.03")

    @property
    def context(self) -> int:
        """Most tokens in a sequence: prompt and answer in decode, the prompt alone in prefill."""
        return self.prompt_len + (self.output_len if self.phase == "decode" else 0)

    @property
    def is_paged(self) -> bool:
        """Whether a step attends to a paged cache, as a server's steps do, instead of whole prompts."""
        return self.phase == "decode" or self.chunk is not None

    @property
    def step_length(self) -> int:
        """Number of tokens of a sequence in a step."""
        return 1 if self.phase == "decode" else self.chunk or self.prompt_len

    @property
    def weight_format(self) -> WeightFormat | None:
        """The format of the weights of layers; None if all weights are plain arrays of `weight_dtype`."""
        form = WEIGHT_FORMATS.get(self.weight_dtype)
        if form is None:
            return None
        group = None if self.weight_group == WHOLE_COLUMN else self.weight_group or form.group
        return form._replace(group=group, zero_bytes=int(self.has_weight_zeros))

    @property
    def activation_dtype(self) -> str:
        """Dtype of activations: the compute dtype, or bf16 if that has fewer than two bytes."""
        return self.compute_dtype if dtype_bytes(self.compute_dtype) >= 2 else "bf16"


@dataclass(frozen=True)
class ServingLayout:
    """A mesh, and how the axes of `cache_axes` split the KV cache on it."""

    mesh: MeshShape
    cache: CacheSplit = "heads"

    @property
    def num_groups(self) -> int:
        """Number of device groups that each serve their own sequences."""
        return self.mesh.degree(SERVING_RULES["batch"])

    def gathers_weights(self, serving: Serving) -> bool:
        """Whether a step gathers weights over fsdp (`GATHERED_RULES`): over whole prompts that are split by batch."""
        return self.cache == "batch" and not serving.is_paged

    def __str__(self) -> str:
        """Return the mesh and the split of the cache, if any: `sp=4,tp=8 cache by batch`."""
        return f"{self.mesh}" + (f" cache by {self.cache}" if self.cache != "heads" else "")


def check_stored_dtypes(chip: Chip, *, weight_dtype: str | None, kv_dtype: str | None) -> None:
    """Raise a `MeshwrightError` if a chip's programs cannot read fp8 in place; None: the compute dtype.

    GPUs before compute capability 8.9 have no conversion from fp8, so XLA would copy weights in bf16 in every step, and
    kernels could not read pages. TPUs convert it everywhere.
    """
    for name, dtype in (("weight_dtype", weight_dtype), ("kv_dtype", kv_dtype)):
        if dtype and chip.kind == "gpu" and canonical_dtype(dtype) == "fp8" and "fp8" not in chip.peak_flops:
            raise MeshwrightError(f"{name} is {dtype}, and {chip.name} has no fp8; use int8")


def cache_lanes(kind: str) -> int:
    """Return the number of elements to a multiple of which a kind of chip pads each token's keys and values in pages.

    TPUs store arrays in tiles of 128 columns.
    """
    return 128 if kind == "tpu" else 1


def cache_axes(model: ModelConfig) -> tuple[str, ...]:
    """Return the mesh axes over which a KV cache can be split by batch or sequence: those that do not split its heads.

    With latent attention they include tp, because all heads share one latent.
    """
    return ("fsdp", "sp", "tp") if model.attention.latent else ("fsdp", "sp")


def can_gather_weights(model: ModelConfig, mesh: MeshShape) -> bool:
    """Whether a prefill of whole prompts can gather weights over fsdp, instead of moving activations."""
    attention = model.attention
    return mesh.fsdp > 1 and mesh.sp == 1 and not (model.experts or attention.latent or attention.linear or model.lora)


def generation_rules(model: ModelConfig, mesh: MeshShape) -> Rules:
    """Return the sharding rules of generation: `SERVING_RULES` if sp divides every size that these split over sp.

    Otherwise the rules are changed so that sp splits the residual stream together with fsdp.
    """
    try:
        for path, parameter in leaves(parameters(padded(model, mesh, SERVING_RULES))):
            local_parameter_shape(parameter, mesh=mesh, rules=SERVING_RULES, what=path)
    except MeshwrightError:
        along, across = ("fsdp", "sp"), ("tp",)
        split = {"embed": along, "layer_columns": along, "activation": along, "mlp": across, "vocab": across}
        return {**SERVING_RULES, **split, "group": ()}
    return SERVING_RULES


def check_linear_serving(model: ModelConfig, mesh: MeshShape) -> None:
    """Raise an error if sp would split the heads of a model with linear attention."""
    if mesh.sp > 1 and model.attention.linear is not None:
        raise MeshwrightError(
            f"mesh {mesh} has sp={mesh.sp}, over which the linear attention of {model.name} is not split; use sp=1 and"
            f" more tp or fsdp"
        )


def check_serving(serving: Serving, layout: ServingLayout) -> None:
    """Raise an error if a mesh cannot split the workload, or if an axis or the cache's split has no effect."""
    mesh, model = layout.mesh, serving.model
    if mesh.pp > 1:
        raise MeshwrightError(f"mesh {mesh} has pp={mesh.pp}; a server has no pipeline, use pp=1 and more tp or dp")
    check_linear_serving(model, mesh)
    if mesh.ep > 1 and model.experts is None:
        raise MeshwrightError(f"mesh {mesh} has ep={mesh.ep}, but {model.name} has no experts; use ep=1")
    form = serving.weight_format
    for path, parameter in leaves(parameters(padded(model, mesh, SERVING_RULES))):
        local_parameter_shape(parameter, mesh=mesh, rules=SERVING_RULES, what=path)
        if form is not None and has_format(parameter):
            matrix_shape(parameter, form, mesh=mesh, rules=SERVING_RULES, what=path)
    if serving.batch is not None and serving.batch % layout.num_groups:
        raise MeshwrightError(
            f"batch {serving.batch} is not a multiple of dp*ep = {mesh.dp}*{mesh.ep} = {layout.num_groups}"
        )
    if layout.gathers_weights(serving) and not can_gather_weights(model, mesh):
        raise MeshwrightError(
            f"prompts of {model.name} cannot be split by batch on {mesh}: weights are gathered over fsdp alone, with"
            f" sp=1, and by models without experts, latent or linear attention"
        )
    if layout.cache != "heads" and mesh.degree(cache_axes(model)) == 1:
        axes = "*".join(cache_axes(model))
        raise MeshwrightError(f"mesh {mesh} has {axes}=1, so that nothing splits the cache by {layout.cache}")

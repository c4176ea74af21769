"""Read and write settings of Megatron-LM: data parallel over the remaining devices, a distributed optimizer or FSDP."""

from __future__ import annotations

from typing import Any

from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError
from meshwright.planning.exchange.settings import Settings

_DEGREES = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "sp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
}

_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stage of each --data-parallel-sharding-strategy."""


def read_sizes(settings: Settings) -> None:
    """Set the fields of model sizes that Megatron computes from others, such as head_dim and the padded vocabulary."""
    fields, left = settings.fields, settings.left
    if settings.flag("use-rotary-position-embeddings"):
        left.setdefault("position-embedding-type", "rope")
    if "model.embed" not in fields:
        return
    embed, heads = fields["model.embed"], max(1, fields.get("model.num_heads", 1))
    fields.setdefault("model.head_dim", embed // heads)
    gated = 4 * embed * 2 // 3 // 64 * 64
    fields.setdefault("model.mlp", gated)
    if not settings.flag("group-query-attention"):
        fields["model.num_kv_heads"] = heads
    if fields.get("experts.count"):
        fields.setdefault("experts.mlp", fields["model.mlp"])
    tp = left[_DEGREES["tp"]] = settings.whole(_DEGREES["tp"], 1)  # Read again with the other degrees.
    unit = max(1, settings.whole("make-vocab-size-divisible-by", 128) * tp)
    option = "padded-vocab-size" if "padded-vocab-size" in left else "vocab-size"
    if option not in left:
        return
    vocab = settings.whole(option)
    fields["model.vocab"] = vocab if option == "padded-vocab-size" else -(-vocab // unit) * unit
    settings.means(option, vocab, f"vocab={fields['model.vocab']}")


def read(settings: Settings) -> None:
    """Set the fields of the mesh, the batch, the pipeline, the dtypes and the recomputation from the options."""
    fields = settings.fields
    for ours, option in _DEGREES.items():
        fields[ours] = settings.whole(option, 1)
        settings.means(option, fields[ours], f"{ours}={fields[ours]}")
    if (expert_tp := settings.whole("expert-tensor-parallel-size", fields["tp"])) != fields["tp"]:
        raise settings.refusal(
            "expert-tensor-parallel-size", f"is {expert_tp}; experts are split over tp like layers here"
        )
    replicas = _read_sharding(settings)
    _read_batch(settings, replicas)
    _read_formats(settings)
    _read_recompute(settings)


def _read_sharding(settings: Settings) -> int:
    """Set dp, fsdp and the ZeRO stage from the options; return the number of data parallel devices."""
    fields = settings.fields
    known = fields["tp"] * fields["pp"] * fields["sp"]
    replicas = settings.quotient("devices over the other degrees", settings.system.num_devices, known)
    data = settings.quotient("data parallel devices over experts", replicas, fields["ep"])
    stage, option = 0, ""
    if settings.flag("use-distributed-optimizer"):
        stage, option = 1, "use-distributed-optimizer"
    if settings.flag("use-megatron-fsdp"):
        option = "data-parallel-sharding-strategy"
        strategy = settings.text(option, "no_shard")
        if strategy not in _SHARDING:
            raise settings.refusal(option, f"is {strategy!r}; it takes {', '.join(_SHARDING)}")
        stage = _SHARDING[strategy]
    if settings.flag("use-torch-fsdp2"):
        option = "use-torch-fsdp2"
        stage = 2 if settings.flag("torch-fsdp2-no-reshard-after-forward") else 3
    copies = settings.whole("num-distributed-optimizer-instances", 1) if stage else data
    fields |= {"dp": copies, "fsdp": settings.quotient("data parallel devices over copies", data, copies)}
    if stage:
        fields["zero_stage"] = stage
        settings.means(option, True, f"fsdp={fields['fsdp']}, zero_stage={stage}" + (f", dp={copies}" * (copies > 1)))
    return replicas


def _read_batch(settings: Settings, replicas: int) -> None:
    """Set the fields of the batch, the microbatches and the virtual stages. replicas: data parallel devices."""
    fields = settings.fields
    size = settings.whole("micro-batch-size")
    batch = settings.whole("global-batch-size", size * replicas)
    microbatches = settings.quotient("the global batch over micro batches", batch, size * replicas)
    fields |= {"batch": batch, "num_microbatches": microbatches}
    settings.means("micro-batch-size", size, f"num_microbatches={microbatches}")
    settings.means("global-batch-size", batch, f"batch={batch}")
    virtual, option = settings.whole("num-virtual-stages-per-pipeline-rank", 1), "num-layers-per-virtual-pipeline-stage"
    if option in settings.left:
        layers, num_layers = settings.whole(option), settings.model.num_layers if settings.model else 0
        virtual = settings.quotient("layers over parts of stages", num_layers, fields["pp"] * layers)
        settings.means(option, layers, f"virtual_stages={virtual}")
    elif virtual > 1:
        settings.means("num-virtual-stages-per-pipeline-rank", virtual, f"virtual_stages={virtual}")
    fields |= {"virtual_stages": virtual, "schedule": "1f1b"}


def _read_formats(settings: Settings) -> None:
    """Set the dtypes, the attention kernel and the dropout from the options.

    With --bf16 the optimizer keeps float32 copies of bfloat16 parameters, and gradients are float32.
    """
    fields = settings.fields
    is_narrow = fields["compute_dtype"] == "bf16"
    reduces_narrow = settings.flag("grad-reduce-in-bf16")
    settings.flag("accumulate-allreduce-grads-in-fp32")  # --bf16 sets it anyway, without --grad-reduce-in-bf16.
    fields["param_dtype"] = fields["compute_dtype"]
    fields["gradient_dtype"] = "bf16" if is_narrow and reduces_narrow else "f32"
    if is_narrow:
        fields |= {"master_weights": True, "moment_dtype": "f32"}
        settings.means("bf16", True, "param_dtype=bf16, master_weights, moment_dtype=f32")
    if reduces_narrow:
        settings.means("grad-reduce-in-bf16", True, f"gradient_dtype={fields['gradient_dtype']}")
    if settings.flag("use-flash-attn"):
        fields["attention"] = "flash"
        settings.means("use-flash-attn", True, "attention=flash")
    dropout = settings.number("attention-dropout", 0.1)
    if dropout not in (0, fields["dropout"]):
        raise settings.refusal("attention-dropout", f"is {dropout}; here it is --hidden-dropout's, {fields['dropout']}")


def _read_recompute(settings: Settings) -> None:
    """Set the remat policy from the recompute options."""
    granularity = settings.take("recompute-granularity")
    if settings.flag("recompute-activations"):
        granularity = "selective"
    method, count = settings.take("recompute-method"), settings.whole("recompute-num-layers", 1)
    modules = settings.text("recompute-modules", "core_attn")
    if granularity == "full" and (method != "uniform" or count != 1):
        raise settings.refusal("recompute-method", f"is {method} of {count} layers; uniform of 1 layer is read")
    if granularity == "selective" and modules != "core_attn":
        raise settings.refusal("recompute-modules", f"is {modules}; core_attn is read, --remat attention here")
    remats = {None: "none", "full": "block", "selective": "attention"}
    if granularity not in remats:
        raise settings.refusal("recompute-granularity", f"is {granularity!r}; it takes full or selective")
    settings.fields["remat"] = remats[granularity]
    if granularity is not None:
        settings.means("recompute-granularity", granularity, f"remat={settings.fields['remat']}")


def write(fields: dict[str, Any], system: System) -> dict[str, Any]:
    """Return the options of the mesh, the batch, the pipeline, the dtypes and the recomputation, from a plan's fields.

    Raises:
        MeshwrightError: Megatron-LM has no counterpart of the plan's remat policy.
    """
    options: dict[str, Any] = {option: fields[ours] for ours, option in _DEGREES.items()}
    replicas = fields["dp"] * fields["fsdp"] * fields["ep"]
    options["micro-batch-size"] = fields["batch"] // replicas // fields["num_microbatches"]
    options["global-batch-size"] = fields["batch"]
    if fields["fsdp"] > 1:
        if fields["zero_stage"] == 1:
            options["use-distributed-optimizer"] = True
        else:
            options["use-megatron-fsdp"] = True
            names = {stage: name for name, stage in _SHARDING.items()}
            options["data-parallel-sharding-strategy"] = names[fields["zero_stage"]]
        if fields["dp"] > 1:
            options["num-distributed-optimizer-instances"] = fields["dp"]
    if fields["pp"] > 1 and (virtual := fields["virtual_stages"]) > 1:
        options["num-layers-per-virtual-pipeline-stage"] = fields["model.num_layers"] // (fields["pp"] * virtual)
    if fields["compute_dtype"] == "bf16" and fields["gradient_dtype"] == "bf16":
        options["grad-reduce-in-bf16"] = True
    options["attention-dropout"] = fields["dropout"]
    if fields["model.num_kv_heads"] != fields["model.num_heads"]:
        options["group-query-attention"] = True
    options |= {"vocab-size": fields["model.vocab"], "make-vocab-size-divisible-by": 1}
    if fields["remat"] == "block":
        options |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    elif fields["remat"] == "attention":
        options["recompute-granularity"] = "selective"
    elif fields["remat"] != "none":
        raise MeshwrightError(f"Megatron-LM has no remat={fields['remat']}; it has none, attention and block")
    return options

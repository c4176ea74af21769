"""How meshwright answers the worked examples of the scaling book and MinText: one function for each form of question.

A form is known by a record's kind and the names of its inputs and of what is expected; the values come from the inputs
and from meshwright. `FORMS`, at the end, has them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from scaling_book_basics import (
    BASIC_FORMS,
    Answers,
    Form,
    Record,
    axis_alpha,
    inferred,
    nodes_alpha,
    one,
    place,
    slice_of,
)
from scaling_book_formulas import (
    best_fsdp_degree,
    critical_tokens_data,
    critical_tokens_fsdp_tp,
    decode_seconds,
    decode_tokens_per_second,
    evicted_tokens,
    feedforward_texts,
    free_bytes,
    kv_cache_bytes,
    largest_batch,
    power_of_two,
    smallest_system,
    training_seconds,
    utilisation,
)

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.load import load_chip
from meshwright.description.hardware.system import parse_system
from meshwright.description.notation.array_parser import parse_array
from meshwright.description.notation.inference import infer
from meshwright.description.notation.legality import Sizes, check
from meshwright.description.notation.parser import parse
from meshwright.description.step.model import Biases, LearnedPositions, ModelConfig, Norms
from meshwright.description.step.parameter_tree import leaves, num_parameters, parameters
from meshwright.mesh import MeshShape
from meshwright.planning.cost.rates.collective import collective_seconds
from meshwright.planning.cost.rates.product import price
from meshwright.planning.cost.roofline import op_seconds
from meshwright.planning.cost.serving_seconds import prefill_servers

ADAM_BYTES = dtype_bytes("bf16") + 2 * dtype_bytes("f32")
"""The book's bytes a parameter: bf16 weights and two float32 moments; gradients and master weights it leaves out."""

BOOK_CONTEXT = 8192
"""The tokens of a sequence in the tables of the book's inference chapter, where a record does not say."""

DAY_SECONDS = 86_400

# --- params, flops, mfu, kv_cache


def model_of(inputs: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a record's letters."""
    heads = inputs["N"]
    more: dict[str, Any] = {"gated": inputs["gated_mlp"]}
    if inputs.get("biases"):
        more |= {"norms": Norms(kind="layer", has_bias=True), "biases": Biases(qkv=True, output=True, mlp=True)}
    if "S" in inputs:
        more["positions"] = LearnedPositions(rows=inputs["S"])
    return ModelConfig(
        name="example",
        num_layers=inputs["L"],
        embed=inputs["D"],
        mlp=inputs["F"],
        num_heads=heads,
        num_kv_heads=inputs.get("K", heads),
        head_dim=inputs.get("H", inputs["D"] // heads),
        vocab=inputs["V"],
        tied_embeddings=inputs.get("tied_embeddings", False),
        **more,
    )


def parameters_of_a_decoder(record: Record) -> Answers:
    """The parameters of a model, and its cache a token."""
    model = model_of(record["inputs"])
    width = model.num_kv_heads * model.head_dim
    cache = kv_cache_bytes(tokens=1, num_layers=model.num_layers, kv_width=width, dtype="int8")
    return {"total": num_parameters(model), "kv_bytes_per_token_int8": cache}


def parameters_of_mini_gpt(record: Record) -> Answers:
    """The parameters of MinText's decoder: norms behind its blocks, so none at the end, and a bias in its head."""
    model = model_of(record["inputs"])
    declared = sum(leaf.size for path, leaf in leaves(parameters(model)) if not path.startswith("final_norm"))
    return {"total": declared + model.vocab}


def cache_of_a_token(record: Record) -> Answers:
    """The cache of a token, and of one of each sequence of a batch."""
    inputs = record["inputs"]
    token = kv_cache_bytes(tokens=1, num_layers=inputs["L"], kv_width=inputs["K"] * inputs["H"], dtype=inputs["dtype"])
    return {"per_token": token, f"batch{inputs['batch']}_per_context_token": inputs["batch"] * token}


def cache_of_a_sequence(record: Record) -> Answers:
    """The cache of a sequence."""
    inputs = record["inputs"]
    size = kv_cache_bytes(tokens=inputs["S"], num_layers=inputs["L"], kv_width=inputs["KH"], dtype=inputs["dtype"])
    return {"bytes": size}


def flops_of_a_product(record: Record) -> Answers:
    """The flops of a sharded product; axes that split nothing do it again."""
    inputs = record["inputs"]
    way = inferred(inputs["matmul"], inputs["mesh"], {dim: inputs[dim] for dim in "BDF"}).implementation
    return {"per_device": way.flops, "total_executed": way.flops * math.prod(inputs["mesh"].values())}


def flops_with_remat(record: Record) -> Answers:
    """The flops a parameter and token, with and without the forward pass made again."""
    dims = {"B": 64, "D": 32, "F": 128}
    texts = ["X[B, D] @ W[D, F] -> Y[B, F]", "dY[B, F] @ W[D, F] -> dX[B, D]", "X[B, D] @ dY[B, F] -> dW[D, F]"]
    forward, *backward = (inferred(text, {}, dims).implementation.flops / math.prod(dims.values()) for text in texts)
    none, block = forward + sum(backward), forward + forward + sum(backward)
    return {"no_remat": none, "block_remat": block, "ratio": block / none}


def utilisation_of_a_product(record: Record) -> Answers:
    """The share of the peak that was measured."""
    inputs = record["inputs"]
    return {"mfu": utilisation(inputs["flops"], inputs["t"], peak=inputs["peak"], num_devices=inputs["cores"])}


# --- memory


def memory_of_a_matrix(record: Record) -> Answers:
    """The bytes of a sharded array, and the time to read a device's."""
    inputs = record["inputs"]
    array = parse_array(inputs["sharding"], axes=inputs["mesh"])
    dims = dict(zip(array.dims, inputs["dims"], strict=True))
    sizes = Sizes(degrees=inputs["mesh"], dims=dims, element_bytes=dtype_bytes(inputs["dtype"]))
    check(array, sizes)
    return {
        "bytes_per_device": sizes.local_bytes(array),
        "local_shape": list(sizes.local_shape(array)),
        "total_bytes": sizes.local_bytes(array) * math.prod(inputs["mesh"].values()),
        "load_time": op_seconds(0, sizes.local_bytes(array), one("h100")).seconds,
    }


def shapes_of_mintext(record: Record) -> Answers:
    """The local shapes of MinText's two-layer network."""
    sizes = Sizes(degrees=record["inputs"]["mesh"], dims={"B": 8192, "D": 128, "F": 2048})
    arrays = {"x": "x[B_data, D]", "w1": "w1[D, F_model]", "w2": "w2[F_model, D]"}
    return {name: list(sizes.local_shape(parse_array(text, axes=sizes.degrees))) for name, text in arrays.items()}


def memory_to_serve(record: Record) -> Answers:
    """The smallest slices of v5e that hold LLaMA 3 70B in some dtypes, and the caches that fit beside it."""
    inputs, model, chip = record["inputs"], PRESETS["llama3-70b"], load_chip("v5e")
    rows = []
    for dtype in inputs["dtypes"]:
        weights = inputs["params"] * dtype_bytes(dtype)
        system = smallest_system(chip, weights)
        token = _cache_bytes(model, 1, dtype)
        left = free_bytes(system, weight_bytes=weights)
        fits = largest_batch(system, weight_bytes=weights, cache_bytes=token * inputs["S"])
        rows.append((weights, weights / chip.hbm_bytes, system.num_chips, left, token, fits))
    names = ("weights", "min_chips_fractional", "slice_chips", "hbm_left", "kv_per_token", "kv_caches_8k")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def _cache_bytes(model: ModelConfig, tokens: float, dtype: str) -> float:
    """The cache of so many tokens of a model."""
    width = model.num_kv_heads * model.head_dim
    return kv_cache_bytes(tokens=tokens, num_layers=model.num_layers, kv_width=width, dtype=dtype)


def memory_to_train(record: Record) -> Answers:
    """Checkpoints, weights and moments as the book counts them."""
    inputs = record["inputs"]
    dims = {"L": inputs["L"], "C": inputs["checkpoints_per_layer"], "T": int(inputs["tokens"]), "D": inputs["D"]}
    checkpoints = Sizes(degrees={}, dims=dims).local_bytes(parse_array("A[L, C, T, D]"))
    total = checkpoints + inputs["params"] * ADAM_BYTES
    return {"checkpoints": checkpoints, "total": total, "min_chips": total / load_chip(inputs["hardware"]).hbm_bytes}


# --- strategy, step_time


def gather_or_reduce(record: Record) -> Answers:
    """A product with a contraction that one operand splits: gather it, or slice the other and sum partial products."""
    inputs = record["inputs"]
    dims = {dim: inputs[dim] for dim in "BDF"}
    chip = load_chip(inputs["hardware"])
    size: int = inputs["X"]
    cube = dict.fromkeys("XYZ"[: chip.torus.rank if chip.torus else 1], size)
    inference = inferred("A[B, D] @ W[D_X, F] -> C[B, F]", cube, dims, dtype_bytes(inputs["dtype"]))
    priced = price(inference, slice_of(inputs["hardware"], cube), dtype=inputs["dtype"])
    names = {"all-gather": "AllGather + matmul", "all-reduce": "local matmul + AllReduce"}
    single = [way for way in priced.implementations if len(way.implementation.communications) == 1]
    ways = {way.implementation.communications[0].kind: way for way in single}
    best = min((kind for kind in names if kind in ways), key=lambda kind: ways[kind].seconds)
    times = {kind: ways[kind].communication_seconds for kind in names}
    return {"t_allgather": times["all-gather"], "t_allreduce": times["all-reduce"], "best": names[best]}


def layout_of_a_model(record: Record) -> Answers:
    """How to train a model on a slice: what fits, the thresholds of FSDP and of its mix with tensor parallelism."""
    inputs = record["inputs"]
    system, model = slice_of(inputs["hardware"], inputs["mesh"]), model_of(inputs)
    tokens, chips, size = inputs["B"], system.num_chips, num_parameters(model)
    states = size * ADAM_BYTES
    # Checkpoints behind the three products of the mlp.
    saved = dtype_bytes("bf16") * tokens * model.num_layers * (model.embed + 2 * model.mlp)
    alpha = axis_alpha(inputs["hardware"])
    least = critical_tokens_data(alpha, links=len(system.shape)) * chips
    mixed = critical_tokens_fsdp_tp(alpha, num_devices=1, ffw_dim=model.mlp)
    best = best_fsdp_degree(tokens, num_devices=chips, ffw_dim=model.mlp)
    fsdp = power_of_two(best, at_most=chips)
    return {
        "sequences": tokens / inputs["T"],
        "hbm_total": chips * system.hbm_bytes,
        "pure_dp_fits": states <= system.hbm_bytes,
        "fsdp_total_memory": states + saved,
        "fsdp_min_batch": least,
        "fsdp_compute_bound": tokens >= least,
        "mixed_min_per_chip": mixed,
        "mixed_compute_bound": tokens / chips >= mixed,
        "X_opt": best,
        "X": fsdp,
        "Y": chips // fsdp,
        "step_time": training_seconds(system, num_parameters=size, tokens=tokens, mfu=inputs["mfu"]),
    }


def servers(record: Record) -> Answers:
    """Prefill servers for one that decodes."""
    inputs = record["inputs"]
    ratio = prefill_servers(
        prefill_seconds=inputs["t_prefill"],
        step_seconds=inputs["t_step"],
        batch=inputs["batch"],
        decode_tokens=inputs["decode_len"],
    )
    return {"P_over_G": ratio}


def megatron_layouts(record: Record) -> Answers:
    """Tokens a GPU of runs on H100, and what they need: the first with FSDP alone, each next with more sharding."""
    inputs, node, alpha = record["inputs"], load_chip("h100").levels[0].degree, nodes_alpha("h100")
    tokens = [batch * inputs["T"] / gpus for batch, gpus in inputs["configs"]]
    bounds = [critical_tokens_data(alpha)] + [critical_tokens_data(alpha, links=ways / node) for ways in (16, 64)]
    return {
        "tokens_per_gpu": tokens,
        "fsdp_bound": bounds[0],
        "bound_16way": bounds[1],
        "bound_64way": bounds[2],
        "compute_bound": [have > need for have, need in zip(tokens, bounds, strict=True)],
    }


def layout_by_degrees(record: Record) -> Answers:
    """The devices and tokens of a mesh; each stage of a pipeline reduces the gradients of its own layers."""
    inputs = record["inputs"]
    degrees = {axis: inputs[axis] for axis in ("tp", "pp", "dp")}
    mesh, flat = MeshShape(**degrees), MeshShape(**degrees | {"pp": 1})
    gradients = [1 / shape.degree(("tp", "pp", "fsdp")) for shape in (flat, mesh)]
    return {
        "gpus": mesh.num_devices,
        "tokens_per_gpu": inputs["B"] / mesh.num_devices,
        "dp_cost_reduction": gradients[0] / gradients[1],
    }


def feedforward_that_fits(record: Record) -> Answers:
    """The layout of a feedforward block on a small slice that fits beside its shards and communicates least."""
    inputs = record["inputs"]
    mesh, axes = inputs["mesh"], tuple(inputs["mesh"])
    sizes = Sizes(degrees=mesh, dims={dim: inputs[dim] for dim in "BDF"}, element_bytes=dtype_bytes(inputs["dtype"]))
    name = "".join(axes)
    layouts = {
        f"fsdp_D_{name}": feedforward_texts(batch=axes, fsdp=axes, tp=()),
        f"tensor_parallel_F_{name}": feedforward_texts(batch=(), fsdp=(), tp=axes),
    }
    system = slice_of(inputs["hardware"], mesh)
    priced = {
        layout: [price(infer(parse(text, axes=mesh), sizes), system, dtype=inputs["dtype"]).chosen for text in texts]
        for layout, texts in layouts.items()
    }
    weight, stream = (sizes.local_bytes(parse_array(text)) for text in ("Win[D, F]", "In[B, D]"))
    shards = 2 * weight / math.prod(mesh.values())
    # What is gathered stands beside the shards.
    gathered = {
        layout: max((c.bytes for way in ways for c in way.collectives if c.kind == "all-gather"), default=0)
        for layout, ways in priced.items()
    }
    fitting = [layout for layout in layouts if shards + gathered[layout] <= inputs["free_bytes"]]
    best = min(fitting, key=lambda layout: sum(way.communication_seconds for way in priced[layout]))
    return {
        "bytes_per_weight": weight,
        "bytes_activations": stream,
        "weights_per_chip": shards,
        "strategy": best,
        "t_math": sum(way.flops_seconds for way in priced[best]),
    }


def days_to_train(record: Record) -> Answers:
    """The chips that FSDP can use for a batch, over all axes of the torus, and the days to train on them."""
    inputs = record["inputs"]
    chip = load_chip(inputs["hardware"])
    assert chip.torus
    chips = inputs["B"] / critical_tokens_data(axis_alpha(inputs["hardware"]), links=chip.torus.rank)
    seconds = training_seconds(
        one(inputs["hardware"]),
        num_parameters=inputs["params"],
        tokens=inputs["tokens"],
        mfu=inputs["mfu"],
        num_devices=chips,
    )
    return {"chips": chips, "days": seconds / DAY_SECONDS}


def product_from_host_memory(record: Record) -> Answers:
    """A weight from the hosts of a slice to one chip and into a product: the stages of that pipeline."""
    inputs = record["inputs"]
    system, nbytes = slice_of(inputs["hardware"], inputs["mesh"]), inputs["bytes"]
    mesh = dict(zip("XYZ", system.shape, strict=False))
    op = op_seconds(2 * inputs["batch"] * nbytes, nbytes, system)
    stages = {
        "pcie": nbytes / system.num_chips / inputs["pcie_bw"],
        "ici_gather": collective_seconds("all-gather", nbytes, place(system, tuple(mesh), mesh)).seconds,
        "hbm": op.memory_seconds,
        "flops": op.flops_seconds,
    }
    return stages | {"bound_stage": max(stages, key=lambda stage: stages[stage])}


# --- inference_latency, inference_throughput


def decode_steps(record: Record) -> Answers:
    """The decode steps of some batches."""
    inputs = record["inputs"]
    system = parse_system(f"{inputs['hardware']}:{inputs['chips']}")
    cache = inputs["context"] * inputs["kv_bytes_per_token"]
    dtypes = {"weight_dtype": inputs["w_dtype"], "compute_dtype": inputs["compute"]}
    return {
        f"t_{batch}": decode_seconds(
            system, num_parameters=inputs["params"], batch=batch, cache_bytes=cache, **dtypes
        ).seconds
        for batch in inputs["batch"]
    }


def weights_on_a_slice(record: Record) -> Answers:
    """The time to read all weights once, and the memory around them."""
    inputs = record["inputs"]
    system = slice_of(inputs["hardware"], inputs["mesh"])
    weights = inputs["params"] * dtype_bytes(inputs["dtype"])
    step = decode_seconds(system, num_parameters=inputs["params"], batch=0, cache_bytes=0, weight_dtype=inputs["dtype"])
    return {
        "t": step.weights_seconds,
        "bytes_per_chip": weights / system.num_chips,
        "free_hbm": free_bytes(system, weight_bytes=weights) / system.num_chips,
        "min_chips": smallest_system(system.chip, weights).num_chips,
    }


def product_under_tensor_parallelism(record: Record) -> Answers:
    """One product of an mlp split over many chips: its gather, its weights, its flops."""
    inputs = record["inputs"]
    flops = 2 * inputs["B"] * inputs["D"] * inputs["F"] / inputs["Y"]
    stream, weight = (dtype_bytes("bf16") * inputs[a] * inputs[b] for a, b in ("BD", "DF"))
    terms = {
        "ici": stream / inputs["W_ici"],
        "hbm": weight / inputs["Y"] / inputs["hbm_bw"],
        "math": flops / inputs["flops"],
    }
    return {f"t_{name}": time for name, time in terms.items()} | {"bound": max(terms, key=lambda name: terms[name])}


def evictions(record: Record) -> Answers:
    """Sequences and tokens that leave a batch each step."""
    inputs = record["inputs"]
    lengths = {"prefill_tokens": inputs["P"], "decode_tokens": inputs["G"]}
    tokens = evicted_tokens(batch=inputs["B"], **lengths)
    return {"tokens_per_step": tokens, "sequences_per_step": tokens / sum(lengths.values())}


def throughput_of_batches(record: Record) -> Answers:
    """Tokens a second of some batches of the model that the record's id names, and the largest of them that fits."""
    inputs = record["inputs"]
    model = next(model for name, model in PRESETS.items() if name in record["id"])
    system = parse_system(f"{inputs['hardware']}:{inputs['chips']}")
    weights = num_parameters(model) * dtype_bytes("bf16")
    cache = _cache_bytes(model, inputs.get("context", BOOK_CONTEXT), "bf16")
    rates = [
        decode_tokens_per_second(
            decode_seconds(system, num_parameters=num_parameters(model), batch=batch, cache_bytes=cache), batch=batch
        )
        for batch in inputs["batch"]
    ]
    most = largest_batch(system, weight_bytes=weights, cache_bytes=cache)
    fitting = max((batch for batch in inputs["batch"] if batch <= most), default=0)
    return {"tokens_per_s": rates, "max_batch_fitting": fitting}


FORMS: tuple[Form, ...] = (
    *BASIC_FORMS,
    ("memory", "dims dtype sharding mesh", "", memory_of_a_matrix),
    ("memory", "mesh", "w1 w2", shapes_of_mintext),
    ("memory", "params dtypes S", "", memory_to_serve),
    ("memory", "hardware params D L tokens checkpoints_per_layer", "", memory_to_train),
    ("strategy", "hardware B D F X dtype", "", gather_or_reduce),
    ("strategy", "hardware mesh B T L D F N K H V mfu", "", layout_of_a_model),
    ("strategy", "t_prefill t_step batch decode_len", "", servers),
    ("strategy", "T configs", "", megatron_layouts),
    ("strategy", "tp pp dp B", "", layout_by_degrees),
    ("strategy", "hardware mesh B D F dtype free_bytes", "", feedforward_that_fits),
    ("step_time", "hardware B params tokens mfu", "", days_to_train),
    ("step_time", "hardware mesh bytes pcie_bw batch", "", product_from_host_memory),
    ("params", "V S D N F L biases", "", parameters_of_mini_gpt),
    ("params", "L D F N K H V", "", parameters_of_a_decoder),
    ("kv_cache", "L K H dtype batch", "", cache_of_a_token),
    ("kv_cache", "S L KH dtype", "", cache_of_a_sequence),
    ("flops", "matmul mesh B D F", "", flops_of_a_product),
    ("flops", "policy", "", flops_with_remat),
    ("mfu", "flops t cores peak", "", utilisation_of_a_product),
    ("inference_latency", "hardware chips params w_dtype compute context kv_bytes_per_token batch", "", decode_steps),
    ("inference_latency", "hardware mesh params dtype", "", weights_on_a_slice),
    ("inference_latency", "B D F Y W_ici hbm_bw flops", "", product_under_tensor_parallelism),
    ("inference_throughput", "B P G", "", evictions),
    ("inference_throughput", "hardware chips batch", "", throughput_of_batches),
)


def form_of(record: Record) -> Callable[[Record], Answers] | None:
    """The function that answers a record; None where no form has its kind and inputs."""
    for kind, inputs, expected, answer in FORMS:
        has_inputs = set(inputs.split()) <= record["inputs"].keys()
        if kind == record["kind"] and has_inputs and set(expected.split()) <= record["expected"].keys():
            return answer
    return None

"""The steps of the engine and of generation, compiled on 8 simulated devices: what they move and hold is priced."""

from dataclasses import asdict

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.families.load import load_model
from meshwright.description.hlo.canonical import canonicalize_collective
from meshwright.description.hlo.collectives import read_collectives
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import parameters
from meshwright.description.step.serving import Serving, ServingLayout
from meshwright.execution.models.generation.cache import abstract_caches
from meshwright.execution.models.generation.generate import decode_layout, programs
from meshwright.execution.models.generation.sampling import Written, likeliest_of
from meshwright.execution.models.generation.serving_step import lower_prefill_step
from meshwright.execution.runtime.arrays import abstract
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.options.values import read_mesh
from meshwright.planning.cost.serving_bytes import serving_argument_bytes, serving_memory
from meshwright.planning.cost.serving_seconds import serving_collectives
from meshwright.record import merge
from meshwright.serving.engine.lowered import lower_engine_step

SMALL = ModelConfig(
    name="small", num_layers=2, embed=64, mlp=256, num_heads=8, num_kv_heads=4, head_dim=16, vocab=512
)  # fmt: skip
CASES = [
    ("small", "fsdp=2,sp=2,tp=2", "sequence"),
    ("gemma2", "fsdp=4,tp=2", "batch"),
    *(
        pytest.param(*case, marks=pytest.mark.matrix)
        for case in (
            ("small", "sp=2,tp=4", "heads"),
            ("small", "sp=2,tp=4", "batch"),
            ("small", "dp=2,tp=4", "heads"),
            ("gemma2", "fsdp=2,tp=4", "heads"),
            ("gemma3_text", "fsdp=2,sp=2,tp=2", "sequence"),
            ("gemma4_text_e2b", "fsdp=2,sp=2,tp=2", "sequence"),
            ("gemma3n_text", "fsdp=2,sp=2,tp=2", "sequence"),
            ("gpt2", "fsdp=2,tp=4", "heads"),
            ("gpt_neox", "fsdp=4,tp=2", "sequence"),
            ("mixtral", "fsdp=4,tp=2", "batch"),
            ("qwen2_moe", "fsdp=2,tp=4", "heads"),
            ("deepseek_v3", "fsdp=4,tp=2", "batch"),
            ("deepseek_v3", "tp=8", "sequence"),
            ("olmo2", "fsdp=4,tp=2", "batch"),
        )
    ),
]


@pytest.mark.parametrize(("name", "mesh", "cache"), CASES)
def test_a_decode_step_moves_and_holds_what_is_priced(name, mesh, cache):
    model = SMALL if name == "small" else load_model(f"tests/references/{name}/config.json")
    shape = read_mesh(mesh, 8)
    serving = Serving(
        model=model, prompt_len=48, output_len=16, batch=8, compute_dtype="f32", weight_dtype="f32", kv_dtype="f32"
    )
    layout = ServingLayout(shape, cache)
    memory = checked(lower_engine_step, serving, layout)
    # The pages are written in place, of windows no more than their tokens are in.
    assert memory.alias_size_in_bytes == serving_memory(serving, layout, serving.batch)["cache"]


@pytest.mark.parametrize(
    ("mesh", "cache"),
    [
        ("fsdp=2,sp=2,tp=2", "sequence"),
        pytest.param("sp=2,tp=4", "batch", marks=pytest.mark.matrix),
        pytest.param("dp=2,tp=4", "heads", marks=pytest.mark.matrix),
    ],
)
def test_generate_moves_what_is_priced_of_a_server_but_the_newest_tokens(mesh, cache):
    shape = read_mesh(mesh, 8)
    serving = Serving(
        model=SMALL, prompt_len=48, output_len=16, batch=8, compute_dtype="f32", weight_dtype="f32", kv_dtype="f32"
    )
    layout, own = ServingLayout(shape, cache), decode_layout(SMALL, shape, cache)
    priced = [move for move in serving_collectives(serving, layout, serving.batch) if move.array != "newest tokens"]
    mesh = build_mesh(shape)
    with jax.set_mesh(mesh):
        rows, seeds = (jax.ShapeDtypeStruct((8,), dtype, sharding=NamedSharding(mesh, P())) for dtype in ("i4", "u4"))
        caches = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.sharding.spec)),
            abstract_caches(SMALL, own, 8, serving.context, "f4"),
        )
        tokens = jax.ShapeDtypeStruct((8,), "i4", sharding=NamedSharding(mesh, own.spec("batch")))
        decode = programs(SMALL, shape, cache, 8, serving.context, np.dtype("f4")).decode
        params = abstract(parameters(SMALL), mesh, own, "f32")
        number = jax.ShapeDtypeStruct((), "i4", sharding=NamedSharding(mesh, P()))
        lowered = decode.lower(params, tokens, caches, rows, likeliest_of(seeds), Written(), number)
    assert found_in(lowered.compile(), shape) == summed(priced)


@pytest.mark.parametrize(
    ("name", "mesh", "cache"),
    [
        ("small", "sp=2,tp=4", "batch"),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (
                ("small", "dp=2,tp=4", "heads"),
                ("small", "fsdp=2,sp=2,tp=2", "sequence"),
                ("gemma2", "fsdp=4,tp=2", "batch"),
                ("gemma3_text", "fsdp=2,sp=2,tp=2", "sequence"),
                ("mixtral", "fsdp=4,tp=2", "batch"),
                ("deepseek_v3", "fsdp=4,tp=2", "batch"),
                ("qwen2_moe", "fsdp=2,tp=4", "heads"),
            )
        ),
    ],
)
def test_a_chunk_of_prompts_moves_and_holds_what_is_priced(name, mesh, cache):
    model = SMALL if name == "small" else load_model(f"tests/references/{name}/config.json")
    serving = Serving(
        model=model, phase="prefill", prompt_len=64, output_len=1, chunk=16, batch=8, compute_dtype="f32",
        weight_dtype="f32", kv_dtype="f32",
    )  # fmt: skip
    layout = ServingLayout(read_mesh(mesh, 8), cache)
    memory = checked(lower_engine_step, serving, layout)
    assert memory.alias_size_in_bytes == serving_memory(serving, layout, serving.batch)["cache"]


@pytest.mark.parametrize(
    ("name", "mesh", "cache"),
    [
        ("small", "fsdp=2,sp=2,tp=2", "sequence"),
        ("qwen2_moe", "fsdp=2,tp=4", "heads"),
        ("small", "dp=2,fsdp=2,tp=2", "batch"),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (
                ("small", "sp=2,tp=4", "sequence"),
                ("small", "dp=2,tp=4", "heads"),
                ("gemma2", "fsdp=4,tp=2", "batch"),
                ("gemma3_text", "fsdp=2,sp=2,tp=2", "sequence"),
                ("gpt2", "fsdp=8", "batch"),
                ("gpt_neox", "fsdp=4,tp=2", "sequence"),
                ("gpt_oss", "fsdp=2,tp=2,dp=2", "heads"),
                ("mixtral", "fsdp=4,tp=2", "sequence"),
                ("deepseek_v3", "fsdp=4,tp=2", "sequence"),
                ("deepseek_v3", "tp=8", "sequence"),
                ("olmo2", "fsdp=4,tp=2", "batch"),
            )
        ),
    ],
)
def test_prompts_are_read_with_what_is_priced(name, mesh, cache):
    model = SMALL if name == "small" else load_model(f"tests/references/{name}/config.json")
    serving = Serving(
        model=model, phase="prefill", prompt_len=48, output_len=1, batch=8, compute_dtype="f32", weight_dtype="f32",
        kv_dtype="f32",
    )  # fmt: skip
    checked(lower_prefill_step, serving, ServingLayout(read_mesh(mesh, 8), cache))


def checked(lower, serving, layout):
    """The memory of the compiled step, whose collectives and arguments are as priced."""
    mesh = layout.mesh
    compiled = lower(build_mesh(mesh), serving=asdict(serving), cache=layout.cache).compile()
    assert found_in(compiled, mesh) == summed(serving_collectives(serving, layout, serving.batch))
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == serving_argument_bytes(serving, layout, serving.batch)
    return memory


def found_in(compiled, mesh):
    """The bytes of the collectives of a compiled program, by kind and axes."""
    read = read_collectives(parse_hlo(compiled.as_text()), mesh.layout).collectives
    return summed(merge(one for move in read for one in canonicalize_collective(move, mesh.degrees)))


def summed(moves):
    """The bytes by kind and axes."""
    found = {}
    for move in moves:
        key = move.kind, frozenset(move.axes)
        found[key] = found.get(key, 0) + move.bytes
    return found

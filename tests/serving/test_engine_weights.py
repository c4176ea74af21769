"""A server with weights in int8, int4 and fp8 makes what `generate` makes with the numbers that they stand for."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_cases import answers, drawn_model, engine_of_few_programs, greedy_requests, prompts_of, tokens_of

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.serving import Serving, ServingLayout
from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.generate import decode_layout, placed_params
from meshwright.execution.models.quantised.scaled import as_declared, in_format, is_scaled
from meshwright.mesh import MeshShape
from meshwright.planning.cost.serving_bytes import weight_bytes
from meshwright.serving.engine.settings import EngineSettings

SMALL = replace(PRESETS["tiny"], num_layers=1)
SETTINGS = EngineSettings(rows=4, context=64, page_size=8, chunk_tokens=16)
STEPS = {"int8": 127, "int4": 7, "fp8": 14}
"""Steps between zero and a group's largest value; of e4m3, as long as its longest ones, 32 from 256 to 448."""


def stored_and_plain(model, dtype):
    """A model's parameters in a format, and the model whose weights are what these stand for."""
    context = decode_layout(model.config, model.mesh_shape, "batch" if model.mesh_shape.fsdp > 1 else "heads")

    def in_f32(params):
        return jax.tree.map(lambda leaf: as_declared(leaf, context, jnp.float32), params, is_leaf=is_scaled)

    with jax.set_mesh(model.mesh):
        stored = in_format(placed_params(model.params, model.config, context), model.config, context, dtype)
        return stored, replace(model, params=jax.jit(in_f32)(stored))


@pytest.mark.parametrize(
    ("dtype", "config", "shape"),
    [
        ("int4", "tiny", MeshShape()),
        ("fp8", "tiny", MeshShape(tp=2)),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (
                ("int4", "tiny", MeshShape(fsdp=2, tp=2)),
                ("int8", "tiny", MeshShape(fsdp=2, tp=2)),
                ("int4", "tiny-moe", MeshShape(ep=2, tp=2)),
                ("int8", "tiny-moe", MeshShape()),
                ("fp8", "tiny-moe", MeshShape(tp=2)),
                ("int4", "tiny-deepseek", MeshShape(tp=2)),
                ("int4", "tiny-gpt-oss", MeshShape(fsdp=2)),
                ("fp8", "tiny-qwen3-next", MeshShape(tp=2)),
            )
        ),
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_the_dequantised_weights(dtype, config, shape):
    model = drawn_model(shape, SMALL if config == "tiny" else PRESETS[config])
    stored, plain = stored_and_plain(model, dtype)
    stack = "layers" if "layers" in stored else "layers_0"
    for name, leaf in stored[stack].items():
        if is_scaled(leaf):
            before, after = (np.asarray(each.params[stack][name]) for each in (model, plain))
            assert 0 < np.abs(before - after).max() <= 0.52 * np.abs(before).max() / STEPS[dtype]
    requests = greedy_requests(prompts_of(6, vocab=model.config.vocab, longest=30), most_tokens=12)
    engine = engine_of_few_programs(model, replace(SETTINGS, weight_dtype=dtype))
    engine.start()
    try:
        got = answers(engine, requests)
    finally:
        engine.close()
    wanted = [plain.generate([list(each.prompt)], max_tokens=each.max_tokens, stop_tokens=())[0] for each in requests]
    assert [tokens_of(outputs) for outputs in got] == [each.tokens for each in wanted]


def test_weights_take_the_planned_bytes_on_each_device():
    for dtype, shape in (("int4", MeshShape(fsdp=2, tp=2)), ("int8", MeshShape(tp=2)), ("fp8", MeshShape())):
        stored, _ = stored_and_plain(drawn_model(shape, SMALL), dtype)
        own = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(stored))
        serving = Serving(
            model=SMALL, prompt_len=8, output_len=8, weight_dtype=dtype, compute_dtype="f32", kv_dtype="f32"
        )
        assert own == weight_bytes(serving, ServingLayout(shape))


def test_groups_are_cut_where_a_mesh_cuts_the_inputs_and_not_below_eight():
    model = drawn_model(MeshShape(tp=8), SMALL)
    stored, _ = stored_and_plain(model, "int4")
    # 8 heads of 16 over tp=8: 16 inputs a device. 384 of the MLP: 48 a device, of which 16 divides 128.
    assert [stored["layers"][name].values.shape[-2] * 2 for name in ("output", "down", "up")] == [16, 16, 128]
    narrow = replace(SMALL, mlp=160)
    with pytest.raises(MeshwrightError, match=r"gives a device 20 successive inputs; groups of 128 would be cut to 4"):
        stored_and_plain(drawn_model(MeshShape(tp=8), narrow), "int4")

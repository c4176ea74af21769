"""`generate` with the weights of layers in int8, int4 and fp8: the tokens of the numbers that they stand for."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from scaled_numbers import plain_numbers

import meshwright as mw
from meshwright.description.step.parameter_tree import leaves, map_leaves
from meshwright.execution.models.quantised.scaled import is_scaled
from meshwright.execution.runtime.arrays import fit

GOLDENS = Path(__file__).parents[2] / "references"


@pytest.mark.parametrize(
    ("family", "mesh", "dtype", "options"),
    [
        ("llama", "fsdp=4,tp=2", "int4", {}),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (
                ("llama", "dp=2,sp=2,tp=2", "int8", {"sp_method": "ring"}),
                ("llama", "tp=8", "int8", {}),
                ("mixtral", "ep=2,fsdp=2,tp=2", "fp8", {}),
                ("deepseek_v3", "fsdp=2,tp=4", "int8", {}),
                ("qwen3_next", "fsdp=2,tp=2,dp=2", "fp8", {}),
                ("gemma4_text_e2b", "fsdp=2,tp=2,dp=2", "int4", {}),
                ("gemma3n_text", "fsdp=4,tp=2", "int8", {}),
                ("gpt2", "fsdp=8", "int8", {}),
            )
        ),
    ],
)
def test_weights_with_scales_continue_as_the_dequantised_ones(family, mesh, dtype, options):
    """Those of a mesh that copies heads are quantised after that; prompts over fsdp gather dequantised weights."""
    model = mw.load(GOLDENS / family, on="cpu:8", mesh=mesh, dtype="f32", weight_dtype=dtype)
    one, numbers = mw.load(GOLDENS / family, on="cpu:1", dtype="f32"), plain_numbers(model)
    params = map_leaves(lambda path, array: jnp.asarray(fit(numbers[path], array.shape)), one.params)
    changed = [path for path, array in leaves(one.params) if (dict(leaves(params))[path] != array).any()]
    assert changed == [path for path, leaf in leaves(model.params) if is_scaled(leaf)]
    plain = replace(one, params=params)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, model.config.vocab, length).tolist() for length in (40, 31, 38, 5, 40, 17, 22, 9)]
    texts, wanted = model.generate(prompts, max_tokens=6, **options), plain.generate(prompts, max_tokens=6)
    assert [text.tokens for text in texts] == [text.tokens for text in wanted]


def test_weights_with_scales_are_only_for_generation():
    model = mw.load(GOLDENS / "llama", on="cpu:1", weight_dtype="int8")
    for call in (lambda: model.logits([[1, 2]]), lambda: model.losses([[1, 2]]), lambda: model.save("out")):
        with pytest.raises(mw.MeshwrightError, match="weight_dtype int8, which only generation reads; load it without"):
            call()
    with pytest.raises(mw.MeshwrightError, match="weight_dtype is 'int3'; did you mean int8"):
        mw.load(GOLDENS / "llama", on="cpu:1", weight_dtype="int3")

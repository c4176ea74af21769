"""Weights in fp8 with a scale for each block are read as transformers dequantises them, each device its own part."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from scaled_numbers import plain_numbers

import meshwright as mw
from meshwright.description.step.parameter_tree import leaves
from meshwright.execution.loading.library import find_model
from meshwright.execution.models.quantised.scaled import ScaledWeight
from meshwright.execution.weights.load import read_tensors

GOLDEN = Path(__file__).parents[2] / "references" / "quantised" / "deepseek_v3_fp8"
WEIGHT = "model.layers.1.self_attn.q_b_proj.weight"


@pytest.mark.parametrize(
    "mesh",
    [
        "1,1,4,2",
        pytest.param("ep=2,fsdp=4", marks=pytest.mark.matrix),
        pytest.param("1,8,1,1", marks=pytest.mark.matrix),
    ],
)
def test_logits_are_those_of_weights_that_transformers_dequantised(mesh):
    model, golden = mw.load(GOLDEN, on="cpu:8", mesh=mesh), np.load(GOLDEN / "golden.npz")
    assert model.dtype == "f32"
    found, wanted = np.asarray(model.logits(golden["tokens"])), golden["logits"]
    for row, length in enumerate(golden["lengths"]):
        assert np.abs(found[row, :length] - wanted[row, :length]).max() <= 2e-5 * (wanted.max() - wanted.min())


@pytest.mark.parametrize("mesh", ["fsdp=2", pytest.param("ep=2,fsdp=2", marks=pytest.mark.matrix)])
def test_a_server_keeps_the_values_and_scales_of_a_checkpoint(mesh):
    """Each group of a column has its block's scale; what they stand for are the dequantised weights, to the bit."""
    found = find_model(GOLDEN, on=f"cpu:{4 if 'ep' in mesh else 2}", mesh=mesh, dtype="f32")
    model = replace(found, weight_dtype="fp8").load()
    scaled = {path: leaf for path, leaf in leaves(model.params) if isinstance(leaf, ScaledWeight)}
    assert scaled.keys() > {"layers.expert_up", "layers.shared_down", "dense_layers.down", "layers.latent_query"}
    assert not scaled.keys() & {"embedding", "unembedding", "layers.router"}
    assert {leaf.values.dtype for leaf in scaled.values()} == {np.dtype(ml_dtypes.float8_e4m3fn)}
    ours = plain_numbers(model)
    for path, wanted in leaves(mw.load(GOLDEN, on="cpu:1", dtype="f32").params):
        np.testing.assert_array_equal(ours[path], np.asarray(wanted), err_msg=path)


def test_a_mesh_that_cuts_groups_too_small_is_refused():
    found = find_model(GOLDEN, on="cpu:2", mesh="tp=2", dtype="f32")
    with pytest.raises(mw.MeshwrightError, match="groups of 8 would be cut to 4, whose scales take as much memory"):
        replace(found, weight_dtype="fp8").load()


def test_they_are_written_whole(tmp_path):
    mw.load(GOLDEN, on="cpu:1").save(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    held, weight = read_tensors(tmp_path / "out"), read_tensors(GOLDEN)[WEIGHT]
    assert not [name for name in held if name.endswith("_scale_inv")]
    assert weight.scale is not None
    scales = np.kron(weight.scale.tensor.open(), np.ones(weight.scale.block, np.float32))
    np.testing.assert_array_equal(held[WEIGHT].open(), weight.open().astype(np.float32) * scales)


def test_the_last_blocks_of_a_weight_may_be_smaller(tmp_path):
    """As of DeepSeek-V3, with 576 rows in blocks of 128: here [112, 24] in blocks of 5 x 7, one scale a block."""
    scales = np.arange(1, 23 * 4 + 1, dtype=np.float32).reshape(23, 4)
    folder = only_one_quantised(tmp_path / "model", scales)
    found = mw.load(folder, on="cpu:8", mesh="1,2,1,4").params["layers"]["latent_query"][0]
    of_each = np.repeat(np.repeat(scales, 5, axis=0), 7, axis=1)[:112, :24]
    wanted = read_tensors(folder)[WEIGHT].open().astype(np.float32) * of_each
    np.testing.assert_array_equal(np.asarray(found).reshape(24, 112), wanted.T)


def test_scales_of_another_shape_are_refused_by_name(tmp_path):
    folder = only_one_quantised(tmp_path / "model", np.ones((22, 4), np.float32))
    with pytest.raises(mw.MeshwrightError, match=r"is F32 \[22, 4\]; blocks of 5 x 7 of .* \[112, 24\] have \[23, 4\]"):
        mw.load(folder, on="cpu:1")


def only_one_quantised(folder, scales):
    """The golden, all its weights whole but one, in blocks of 5 x 7."""
    shutil.copytree(GOLDEN, folder)
    held = read_tensors(GOLDEN)
    arrays = {name: tensor.open() for name, tensor in held.items()}
    arrays = {name: array if name == WEIGHT else array.astype(np.float32) for name, array in arrays.items()}
    arrays[f"{WEIGHT}_scale_inv"] = scales
    header, start = {}, 0
    for name, array in arrays.items():
        dtype = "F8_E4M3" if array.dtype == ml_dtypes.float8_e4m3fn else "F32"
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [start, start := start + array.nbytes]}
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in arrays.values())
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [5, 7]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "weights of quant_method 'bitsandbytes' are not read"),
        ({"quant_method": "fp8"}, "weight_block_size of two whole numbers"),
    ],
    ids=["bitsandbytes", "no blocks"],
)
def test_other_ways_to_quantise_are_refused_by_name(tmp_path, quantization, message):
    folder = shutil.copytree(GOLDEN, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(mw.MeshwrightError, match=message):
        mw.load(folder, on="cpu:1")

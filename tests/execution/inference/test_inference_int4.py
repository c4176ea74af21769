"""Weights of GPTQ and AWQ in four bits are read as what they stand for, each device its own part."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from queue import Queue

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scaled_numbers import plain_numbers

import meshwright as mw
from meshwright.description.step.parameter_tree import leaves
from meshwright.errors import MeshwrightError
from meshwright.execution.loading.library import find_model
from meshwright.execution.models.quantised.scaled import ScaledWeight
from meshwright.execution.weights.load import read_tensors
from meshwright.proof.verification.serving import verify_serving
from meshwright.serving.engine.engine import Engine
from meshwright.serving.engine.request import Request
from meshwright.serving.engine.settings import EngineSettings

GOLDEN = Path(__file__).parents[2] / "references" / "llama"
GROUP = 16
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
FORMATS = {
    "gptq": GPTQ,
    "gptq_v2": GPTQ | {"checkpoint_format": "gptq_v2"},
    "act-order": GPTQ | {"desc_act": True},
    "gptq-column": GPTQ | {"group_size": -1, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
}


def packed(values, places):
    """Eight numbers of four bits in each integer, along the last dim; `places[i]` is the i-th number's place."""
    values = values.reshape(*values.shape[:-1], -1, 8).astype(np.uint32)
    found = np.zeros(values.shape[:-1], np.uint32)
    for number, place in enumerate(places):
        found |= values[..., number] << np.uint32(4 * place)
    return found.view(np.int32)


def quantised(directory, name):
    """A directory in a format, and one of the weights that it stands for, in float32."""
    how, draw = FORMATS[name], np.random.default_rng(0)
    plain, stored = {}, {}
    for path, array in load_file(GOLDEN / "model.safetensors").items():
        if ".layers." not in path or array.ndim != 2:
            plain[path] = stored[path] = array
            continue
        (outputs, inputs), module = array.shape, path.removesuffix(".weight")
        size = inputs if how["group_size"] == -1 else GROUP
        group, groups = np.arange(inputs) // size, inputs // size
        if name == "act-order":
            group = draw.permutation(group)
        codes, zeros = draw.integers(0, 16, (inputs, outputs)), draw.integers(0, 16, (groups, outputs))
        scales = (draw.uniform(0.5, 1.5, (groups, outputs)) * array.std() / 5).astype(np.float16)
        plain[path] = np.ascontiguousarray(((codes - zeros[group]) * scales[group].astype(np.float32)).T, np.float32)
        straight, awq = range(8), (0, 4, 1, 5, 2, 6, 3, 7)
        if name == "awq":
            parts = {"qweight": packed(codes, awq), "qzeros": packed(zeros, awq)}
        else:
            stored_zeros = zeros if name == "gptq_v2" else (zeros - 1) % 16
            parts = {"qweight": packed(codes.T, straight).T, "qzeros": packed(stored_zeros, straight)}
            parts["g_idx"] = group.astype(np.int32)
        parts["scales"] = scales
        stored |= {f"{module}.{part}": np.ascontiguousarray(array) for part, array in parts.items()}
    for folder, tensors in ((directory / "packed", stored), (directory / "plain", plain)):
        shutil.copytree(GOLDEN, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = directory / "packed" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": how}))
    return directory / "packed", directory / "plain"


@pytest.mark.parametrize(
    ("name", "on", "mesh"),
    [
        ("gptq", "cpu:8", "dp=2,fsdp=2,tp=2"),
        ("awq", "cpu:8", "dp=2,fsdp=2,tp=2"),
        pytest.param("gptq_v2", "cpu:1", None, marks=pytest.mark.matrix),
        pytest.param("act-order", "cpu:4", "fsdp=2,tp=2", marks=pytest.mark.matrix),
    ],
)
def test_parameters_are_those_of_the_dequantised_weights(name, on, mesh, tmp_path):
    """To the bit, so that logits, served tokens and what is trained from them are too."""
    stored, plain = quantised(tmp_path, name)
    model, wanted = (mw.load(folder, on=on, mesh=mesh, dtype="f32") for folder in (stored, plain))
    for (path, array), (_, ours) in zip(leaves(wanted.params), leaves(model.params), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(array), err_msg=path)
    tokens = np.arange(24).reshape(2, 12)
    np.testing.assert_array_equal(np.asarray(model.logits(tokens)), np.asarray(wanted.logits(tokens)))
    model.save(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert not [name for name in read_tensors(tmp_path / "saved") if name.endswith("qweight")]


def served(folder, dtype, *, on, mesh):
    """A model as a server reads it, and its weights as numbers in float32."""
    model = replace(find_model(folder, on=on, mesh=mesh, dtype="f32"), weight_dtype=dtype).load()
    return model, plain_numbers(model)


@pytest.mark.parametrize(
    ("name", "on", "mesh"),
    [
        ("gptq", "cpu:4", "fsdp=2,tp=2"),
        ("awq", "cpu:2", "tp=2"),
        ("gptq-column", "cpu:4", "sp=2,tp=2"),
        pytest.param("gptq_v2", "cpu:1", None, marks=pytest.mark.matrix),
        pytest.param("awq", "cpu:8", "dp=2,fsdp=2,tp=2", marks=pytest.mark.matrix),
    ],
)
def test_a_server_keeps_the_integers_scales_and_zero_points_of_a_checkpoint(name, on, mesh, tmp_path):
    """What they stand for is what the dequantised weights are, to the bit; a device has half a byte for each."""
    stored, plain = quantised(tmp_path, name)
    model, found = served(stored, "int4", on=on, mesh=mesh)
    for path, wanted in leaves(mw.load(plain, on="cpu:1", dtype="f32").params):
        np.testing.assert_array_equal(found[path], np.asarray(wanted), err_msg=path)
    for path, leaf in leaves(model.params):
        assert isinstance(leaf, ScaledWeight) == (path.startswith("layers.") and "norm" not in path), path
        if isinstance(leaf, ScaledWeight):
            assert 2 * leaf.values.nbytes == found[path].size
            assert leaf.scale.dtype == np.float16
            assert leaf.zero.shape == leaf.scale.shape
            if name == "gptq-column":
                assert leaf.scale.addressable_shards[0].data.shape[-3] == 1


@pytest.mark.parametrize("name", ["gptq", "awq", "gptq-column"])
def test_a_plan_of_a_checkpoint_counts_its_groups_and_zero_points(name, tmp_path):
    """On each device, as a server has them; the step that is compiled for the plan has arguments of this size."""
    stored, _ = quantised(tmp_path, name)
    model, _ = served(stored, "int4", on="cpu:2", mesh="tp=2")
    own = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(model.params))
    plan = mw.plan(stored, "cpu:2", serve="decode", mesh="tp=2", weight_dtype="int4", prompt_len=32, output_len=16)
    assert plan.predicted.memory_bytes["weights"] == own
    if name != "awq":
        verified = verify_serving(plan)
        assert all(row.is_equal for row in verified.rows if row.quantity == "memory arguments")


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["awq", "gptq-column"])
def test_an_engine_of_a_checkpoint_writes_what_the_dequantised_weights_write(name, tmp_path):
    stored, plain = quantised(tmp_path, name)
    model, _ = served(stored, "int4", on="cpu:2", mesh="tp=2")
    engine, outputs = Engine(model, EngineSettings(rows=2, context=32, page_size=8, weight_dtype="int4")), Queue()
    engine.start()
    try:
        engine.submit(Request(prompt=[5, 11, 3, 40], max_tokens=8), lambda found: [outputs.put(one) for one in found])
        made = [outputs.get(timeout=120)]
        while made[-1].done is None:
            made.append(outputs.get(timeout=120))
    finally:
        engine.close()
    wanted = mw.load(plain, on="cpu:1", dtype="f32").generate([[5, 11, 3, 40]], max_tokens=8, stop_tokens=())[0]
    assert tuple(token for output in made for token in output.tokens) == wanted.tokens


def test_groups_that_do_not_follow_each_other_are_neither_served_nor_planned_in_int4(tmp_path):
    stored, _ = quantised(tmp_path, "act-order")
    said = r"do not follow each other \(g_idx, of desc_act\).*use int8"
    with pytest.raises(MeshwrightError, match=said):
        served(stored, "int4", on="cpu:1", mesh=None)
    options = {"serve": "decode", "mesh": "tp=2", "prompt_len": 32, "output_len": 16}
    with pytest.raises(MeshwrightError, match=said):
        mw.plan(stored, "cpu:2", **options, weight_dtype="int4")
    assert mw.plan(stored, "cpu:2", **options, weight_dtype="int8").serving.weight_group is None
    # Groups that were fixed before the weights were ordered are those of successive inputs.
    config = stored / "config.json"
    data = json.loads(config.read_text())
    data["quantization_config"]["static_groups"] = True
    config.write_text(json.dumps(data))
    assert mw.plan(stored, "cpu:2", **options, weight_dtype="int4").serving.weight_group == GROUP


def test_a_checkpoint_in_int4_is_quantised_again_in_int8_and_another_one_in_int4(tmp_path):
    stored, plain = quantised(tmp_path, "gptq")
    for folder, dtype, steps in ((stored, "int8", 127), (plain, "int4", 7)):
        _, found = served(folder, dtype, on="cpu:2", mesh="tp=2")
        for path, wanted in leaves(mw.load(plain, on="cpu:1", dtype="f32").params):
            moved = np.abs(found[path] - np.asarray(wanted)).max()
            assert moved <= 0.52 * np.abs(wanted).max() / steps, path
            assert (moved > 0) == (path.startswith("layers.") and "norm" not in path), path


def test_a_mesh_that_copies_heads_does_not_keep_a_checkpoints_integers(tmp_path):
    stored, plain = quantised(tmp_path, "gptq")
    with pytest.raises(MeshwrightError, match="cannot stay as they are, because mesh tp=8 pads or copies its heads"):
        served(stored, "int4", on="cpu:8", mesh="tp=8")
    model, _ = served(plain, "int4", on="cpu:8", mesh="tp=8")  # Quantised once heads are copied.
    assert isinstance(model.params["layers"]["query"], ScaledWeight)


MODULE = "model.layers.1.mlp.down_proj"


def dropped(part):
    return lambda held: held.pop(f"{MODULE}.{part}")


def changed(part, change):
    return lambda held: held.update({f"{MODULE}.{part}": np.ascontiguousarray(change(held[f"{MODULE}.{part}"]))})


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"bits": 8}, None, "gptq is read in 4 bits, not 8"),
        ({"checkpoint_format": "marlin"}, None, "gptq is read as 'gptq' and 'gptq_v2', not 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, None, "awq is read as version 'gemm', not 'gemv'"),
        ({"quant_method": "hqq"}, None, "weights of quant_method 'hqq' are not read; those of 'gptq' and 'awq'"),
        ({}, dropped("scales"), f"and no file of the directory {MODULE}.scales"),
        (
            {},
            changed("qzeros", lambda array: array[:, :-1]),
            "beside a qweight [8, 32] of gptq in 4 bits it is I32 [4, 4]",
        ),
        ({}, changed("scales", lambda array: array.astype(np.int32)), "it is F16 [4, 32]"),
        ({}, changed("g_idx", lambda array: array + 1), "has groups 1 to 4; there are 4"),
        ({}, changed("scales", lambda array: array * np.float16(np.inf)), "these weights cannot be used"),
        (None, None, "qweight, and its config.json has quant_method None"),
    ],
)
def test_what_is_not_read_is_refused_in_a_line(config, tensors, said, tmp_path):
    folder, _ = quantised(tmp_path, "gptq")
    path = folder / "config.json"
    data = json.loads(path.read_text())
    data = {**data, "quantization_config": None if config is None else data["quantization_config"] | config}
    path.write_text(json.dumps(data))
    if tensors is not None:
        held = load_file(folder / "model.safetensors")
        tensors(held)
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MeshwrightError) as error:
        mw.load(folder, on="cpu:1")
    assert said in str(error.value)
    assert "\n" not in str(error.value)

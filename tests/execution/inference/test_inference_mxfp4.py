"""gpt-oss with its experts in MXFP4: each device dequantises its own slice (`make_references.py`)."""

import json
from pathlib import Path

import numpy as np
import pytest

import meshwright as mw
from meshwright.execution.weights.load import read_tensors

GOLDEN = Path(__file__).parents[2] / "references" / "quantised" / "gpt_oss_mxfp4"


@pytest.mark.parametrize(
    "mesh",
    ["ep=2,tp=2,fsdp=2", pytest.param("1,8,1,1", marks=pytest.mark.matrix)],
)
def test_logits_are_those_of_weights_that_transformers_dequantised(mesh, tmp_path):
    model, golden = mw.load(GOLDEN, on="cpu:8", mesh=mesh, dtype="f32"), np.load(GOLDEN / "golden.npz")
    found, wanted = np.asarray(model.logits(golden["tokens"])), golden["logits"]
    for row, length in enumerate(golden["lengths"]):
        assert np.abs(found[row, :length] - wanted[row, :length]).max() <= 2e-5 * (wanted.max() - wanted.min())
    model.save(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    down = read_tensors(tmp_path / "out")["model.layers.0.mlp.experts.down_proj"].open()
    np.testing.assert_array_equal(down, np.asarray(model.params["layers"]["expert_down"][0]))


def test_blocks_without_their_scales_are_refused_by_name(tmp_path):
    from safetensors.numpy import load_file, save_file

    held = load_file(GOLDEN / "model.safetensors")
    name = "model.layers.2.mlp.experts.down_proj_scales"
    (tmp_path / "config.json").write_bytes((GOLDEN / "config.json").read_bytes())
    whole = held.pop(name)
    for changed, said in (({}, f"no file of the directory {name}"), ({name: whole[:, :-1]}, "weights in MXFP4 are U8")):
        save_file(held | changed, tmp_path / "model.safetensors")
        with pytest.raises(mw.MeshwrightError, match=said):
            mw.load(tmp_path, on="cpu:1")

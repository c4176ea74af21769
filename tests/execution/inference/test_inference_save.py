"""A model that is written is the model that is read again: a run of bytes, other dtypes, many files."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from byte_models import MODEL, byte_model
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

import meshwright as mw
from meshwright.cli.main import main
from meshwright.description.step.workload import Workload
from meshwright.execution.training.run_directory.run import RunConfig, begin_run
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.execution.weights.directory import tensor_dtype
from meshwright.execution.weights.load import read_tensors
from meshwright.mesh import MeshShape

GOLDEN = Path(__file__).parents[2] / "references" / "llama"
RUN = RunConfig(
    workload=Workload(model=MODEL, batch=8, seq_len=32, compute_dtype="f32"),
    mesh=MeshShape(fsdp=8),
    hardware="cpu:8",
    optimizer=Optimizer(),
    steps=1,
)


def test_a_run_is_exported_with_a_tokenizer_of_bytes_and_no_token_that_ends_a_text(tmp_path, capsys):
    out = tmp_path / "out"
    before = byte_model(seq_len=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.execution.loading.library.Found.load", lambda *_, **__: before)
        begin_run(tmp_path, RUN, 0)
        assert main(["export", str(tmp_path), str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["dtype"] == "f32"
    assert said["files"].keys() == {path.name for path in out.iterdir()}
    assert json.loads((out / "config.json").read_text()).items() >= {
        "max_position_embeddings": 32, "dtype": "float32", "eos_token_id": None, "bos_token_id": None,
    }.items()  # fmt: skip
    text = bytes(range(128)).decode() + "é😀\u0400"
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode(text).ids == list(text.encode())
    after = mw.load(out, on="cpu:8", mesh="fsdp=4,tp=2")
    assert jax.tree.all(jax.tree.map(lambda x, y: (np.asarray(x) == np.asarray(y)).all(), before.params, after.params))
    assert after.tokenizer.stop_tokens == ()
    assert after.generate("def é", max_tokens=6) == before.generate("def é", max_tokens=6)


def test_a_dtype_changes_the_weights_and_what_config_json_says_of_them(tmp_path):
    model = mw.load(GOLDEN, on="cpu:1")
    model.save(tmp_path / "half", dtype="f16", max_file_bytes=20_000)
    half = mw.load(tmp_path / "half", on="cpu:1")
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "float16"
    index = json.loads((tmp_path / "half/model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "half").glob("*.safetensors")}
    assert {*index["weight_map"].values()} == files
    assert len(files) > 2
    # They are computed with in f32, and written as they were.
    half.save(tmp_path / "again")
    one, other = (read_tensors(tmp_path / name) for name in ("half", "again"))
    assert tensor_dtype(other) == "f16"
    assert one.keys() == other.keys() == read_tensors(GOLDEN).keys()
    assert all((one[name].open() == other[name].open()).all() for name in one)


def test_a_bias_that_chooses_experts_stays_in_float32_in_any_dtype(tmp_path):
    """As transformers keeps it: rounded to bf16 it would choose others."""
    golden, name = GOLDEN.parent / "deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"
    model = mw.load(golden, on="cpu:1", dtype="bf16")
    assert {str(array.dtype) for array in jax.tree.leaves(model.params)} == {"bfloat16", "float32"}
    model.save(tmp_path / "out")
    before, after = read_tensors(golden), read_tensors(tmp_path / "out")
    assert {each for each, tensor in after.items() if tensor.dtype != "BF16"} == {name, name.replace(".1.", ".2.")}
    np.testing.assert_array_equal(after[name].open(), before[name].open())
    again = mw.load(tmp_path / "out", on="cpu:1")
    assert again.dtype == "bf16"
    assert jax.tree.all(jax.tree.map(lambda x, y: (np.asarray(x) == np.asarray(y)).all(), model.params, again.params))


def test_weights_that_an_export_would_overwrite_stay(tmp_path, capsys):
    kept = tmp_path / "kept"
    kept.mkdir()
    save_file({"x": np.ones(1, np.float32)}, kept / "model.safetensors")
    assert main(["export", str(GOLDEN), str(kept)]) == 2
    assert "is not empty; give a directory that is new" in capsys.readouterr().err
    assert [*load_file(kept / "model.safetensors")] == ["x"]
    assert [*kept.iterdir()] == [kept / "model.safetensors"]

"""Runs of DoRA, and of adapters outside the layers: what is loaded of them, exported, and begun from it."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_training_pretrained import folder, loss_of_batch, train  # noqa: F401  A fixture.

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.execution.loading.adapter import save_adapter

LORA = {"lora_rank": 4, "lora_alpha": 8.0, "learning_rate": 0.02}
DORA = {**LORA, "lora_targets": "q_proj,v_proj,gate_proj,down_proj", "lora_dora": True}
ENDS = {**LORA, "lora_targets": "q_proj,embed_tokens,lm_head"}
LOOKUP = {**LORA, "lora_targets": "embed_tokens"}


@pytest.fixture(scope="module")
def tied(folder, tmp_path_factory):  # noqa: F811
    """The model of `folder` with its embedding as its head."""
    directory = tmp_path_factory.mktemp("tied") / "llama"
    shutil.copytree(folder / "llama", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("options", "mesh", "is_tied"),
    [
        (DORA, "fsdp=2,sp=2,tp=2", False),
        (ENDS, "fsdp=2,sp=2,tp=2", False),
        (LOOKUP, "dp=2,fsdp=2,tp=2", True),
        (DORA | {"quantize_base": "int8"}, "fsdp=8", False),
    ],
)
def test_what_is_loaded_and_exported_has_the_loss_of_the_run(folder, tied, tmp_path, options, mesh, is_tied):  # noqa: F811
    """The next step's loss is that of the adapters beside their weights; loaded and exported they are their sum."""
    what = tied if is_tied else folder / "llama"
    plain = loss_of_batch(mw.load(what, on="cpu:1"), folder)
    found = train(folder, tmp_path / "run", mesh, what=what, steps=3, **options)
    if "quantize_base" not in options:
        assert found[0] == pytest.approx(plain, rel=1e-6)
    assert found[-1] < found[0]
    merged = loss_of_batch(mw.load(tmp_path / "run", on="cpu:1"), folder)
    save_adapter(tmp_path / "run", tmp_path / "adapter")
    losses: list[float] = []
    with pytest.warns(UserWarning, match="schedule of the learning rate"):
        mw.train(tmp_path / "run", resume=True, steps=4, on_step=lambda row: losses.append(row["loss"]))
    assert losses == pytest.approx([merged], rel=1e-6)
    if "quantize_base" in options:
        return
    with_adapter = mw.load(what, on="cpu:1", adapter=tmp_path / "adapter")
    assert with_adapter.config.tied_embeddings is False
    with_adapter.save(tmp_path / "saved")
    for model in (with_adapter, mw.load(tmp_path / "saved", on="cpu:1")):
        assert losses == pytest.approx([loss_of_batch(model, folder)], rel=1e-6)
    begun = train(folder, tmp_path / "begun", "fsdp=4,tp=2", what=what, steps=1, adapter=tmp_path / "adapter")
    assert begun == pytest.approx(losses, rel=1e-6)


@pytest.mark.matrix
def test_a_run_of_dora_begins_with_the_norms_of_the_columns(folder, tmp_path):  # noqa: F811
    """So that its first step is the model's own; frozen weights stay."""
    train(folder, tmp_path / "run", "fsdp=4,tp=2", steps=1, first_rate=0.0, **DORA)
    save_adapter(tmp_path / "run", tmp_path / "adapter")
    adapter, base = (
        load_file(tmp_path / "adapter" / "adapter_model.safetensors"),
        load_file(folder / "llama" / "model.safetensors"),
    )
    path = "model.layers.1.mlp.down_proj"
    magnitudes = adapter[f"base_model.model.{path}.lora_magnitude_vector"]
    np.testing.assert_allclose(magnitudes, np.linalg.norm(base[f"{path}.weight"], axis=1), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (DORA | {"lora_dropout": 0.1}, "lora_dropout is 0.1 with DoRA, in which PEFT multiplies dropped inputs"),
        (DORA | {"lora_targets": "lm_head"}, "DoRA of unembedding is read and merged, and not trained here"),
        ({"lora_dora": True}, "lora_dora is True of adapters without a rank; give lora_rank too, as 16"),
    ],
)  # fmt: skip
def test_what_no_run_can_have_is_one_line(folder, tmp_path, options, said):  # noqa: F811
    with pytest.raises(MeshwrightError) as error:
        train(folder, tmp_path / "run", "fsdp=8", steps=1, **options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)

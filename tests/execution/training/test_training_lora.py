"""Runs of adapters, beside one of all parameters: what they learn, what checkpoints hold, and what is exported."""

import shutil
import warnings

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_training_pretrained import folder, loss_of_batch, train  # noqa: F401  A fixture.

import meshwright as mw
from meshwright.description.step.parameter_tree import leaves
from meshwright.errors import MeshwrightError
from meshwright.execution.loading.adapter import save_adapter
from meshwright.execution.training.run_directory.checkpoint import Checkpoints
from meshwright.execution.training.run_directory.run import read_config

LORA = {"lora_rank": 4, "lora_alpha": 8.0, "lora_targets": "q_proj,v_proj,gate_proj,down_proj", "learning_rate": 0.02}


def held_out(model):
    """The mean loss of text that no run has read, of the same words."""
    words = np.random.default_rng(9).choice(["the", "cat", "sat", "mat", "dog"], 64)
    return float(model.losses(["".join(f" {word}" for word in words)])[0].mean())


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):  # noqa: F811
    """A directory that `meshwright export` writes, which runs begin from."""
    directory = tmp_path_factory.mktemp("exported") / "llama"
    mw.load(folder / "llama", on="cpu:1").save(directory)
    return directory


@pytest.fixture(scope="module")
def run(folder, exported, tmp_path_factory):  # noqa: F811
    """Six steps of adapters alone with checkpoints after each second, and their losses."""
    directory = tmp_path_factory.mktemp("lora") / "run"
    return directory, train(folder, directory, "dp=2,fsdp=2,tp=2", what=exported, steps=6, save_every=2, **LORA)


@pytest.mark.slow
def test_all_parameters_of_an_exported_model_learn(folder, exported, tmp_path):  # noqa: F811
    """Full fine-tuning, on another mesh than that of the adapters."""
    train(folder, tmp_path / "run", "1,2,2,2", what=exported, steps=6, learning_rate=0.003)
    before, after = (mw.load(path, on="cpu:1") for path in (exported, tmp_path / "run"))
    assert held_out(after) < held_out(before) - 0.1
    for (path, old), new in zip(leaves(before.params), (array for _, array in leaves(after.params)), strict=True):
        assert not np.array_equal(old, new), path


@pytest.mark.slow
def test_adapters_learn_and_their_checkpoints_hold_them_alone(folder, run):  # noqa: F811
    directory, losses = run
    assert losses[-1] < losses[0]
    assert held_out(mw.load(directory, on="cpu:1")) < held_out(mw.load(folder / "llama", on="cpu:1")) - 0.1
    model = read_config(directory).workload.config
    sizes = {part.name: sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
             for part in (directory / "checkpoints" / "6").iterdir() if part.is_dir()}  # fmt: skip
    assert model.lora is not None
    base = (folder / "llama" / "model.safetensors").stat().st_size
    assert sizes["params"] < base / 2
    assert sizes["frozen"] < base / 4


@pytest.mark.slow
def test_what_is_loaded_and_exported_has_the_logits_of_the_run_with_its_adapters(folder, run, tmp_path):  # noqa: F811
    """The next step's loss is that of the adapters beside their weights; of the export that of their sum."""
    directory, _ = run
    shutil.copytree(directory, tmp_path / "run")
    losses = []
    with pytest.warns(UserWarning, match="schedule of the learning rate"):
        mw.train(tmp_path / "run", resume=True, steps=7, on_step=lambda row: losses.append(row["loss"]))
    mw.load(directory, on="cpu:1").save(tmp_path / "merged")
    save_adapter(directory, tmp_path / "adapter")
    for model in (
        mw.load(tmp_path / "merged", on="cpu:1"),
        mw.load(folder / "llama", on="cpu:1", adapter=tmp_path / "adapter"),
    ):
        assert losses == pytest.approx([loss_of_batch(model, folder)], rel=1e-6)


@pytest.mark.matrix
def test_a_run_of_adapters_that_goes_on_is_the_one_that_was_not_stopped(folder, run, tmp_path):  # noqa: F811
    """To the bit on its mesh, and on stages to 1e-4."""
    directory, losses = run
    for mesh, rel in (("dp=2,fsdp=2,tp=2", 0), ("pp=2,fsdp=4", 1e-4)):
        shutil.copytree(directory, copy := tmp_path / mesh)
        shutil.rmtree(copy / "checkpoints" / "6")
        again: list[float] = []
        how = {} if rel == 0 else {"mesh": mesh, "num_microbatches": 2, "change": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # What is changed, and which steps are taken again.
            mw.train(copy, resume=True, steps=6, on_step=lambda row, to=again: to.append(row["loss"]), **how)
        assert again == pytest.approx(losses[4:], rel=rel, abs=0)


@pytest.mark.matrix
def test_a_run_does_not_go_on_with_other_frozen_weights(folder, tmp_path):  # noqa: F811
    shutil.copytree(folder / "llama", tmp_path / "llama")
    train(folder, tmp_path / "run", "fsdp=8", what=tmp_path / "llama", steps=2, **LORA)
    weights = tmp_path / "llama" / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name][3, 5] = np.nextafter(tensors[name][3, 5], np.float32(9))
    save_file(tensors, weights, metadata={"format": "pt"})
    said = r"llama holds another layers\.up than this run was begun with"
    with pytest.warns(UserWarning, match="schedule"), pytest.raises(MeshwrightError, match=said):
        mw.train(tmp_path / "run", resume=True, steps=3)
    with pytest.raises(MeshwrightError, match=said):
        mw.load(tmp_path / "run")
    shutil.rmtree(tmp_path / "llama")
    with pytest.raises(MeshwrightError, match="llama is not there; this run keeps its weights frozen"):
        mw.load(tmp_path / "run")


@pytest.mark.matrix
def test_frozen_parameters_stay_as_they_were(folder, tmp_path):  # noqa: F811
    train(folder, tmp_path / "run", "fsdp=8", steps=2, freeze=("embedding", "*norm*"))
    assert Checkpoints(tmp_path / "run").steps == [2]
    before, after = (mw.load(path, on="cpu:1").params for path in (folder / "llama", tmp_path / "run"))
    assert np.array_equal(before["embedding"], after["embedding"])
    assert np.array_equal(before["layers"]["mlp_norm"], after["layers"]["mlp_norm"])
    assert not np.array_equal(before["layers"]["down"], after["layers"]["down"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_rank": 4, "lora_targets": "q_porj"}, "'q_porj' is no matmul of llama; did you mean 'q_proj'?"),
        ({"lora_alpha": 4.0}, "lora_alpha is 4.0 of adapters without a rank; give lora_rank too, as 16"),
        ({"lora_rank": 4, "lora_dropout": 1.0}, "lora dropout is 1; it is a share from 0 to below 1, as 0.05"),
        ({"lora_dropout": 0.1}, "lora_dropout is 0.1 of adapters without a rank; give lora_rank too, as 16"),
        ({"lora_rank": 0}, "lora_rank is 0; it is a whole number from 1"),
        ({"freeze": ("embeding",)}, "'embeding', which names no parameter of the model; did you mean embedding?"),
        ({"freeze": ("*",)}, "leaves no parameter of llama to train"),
    ],
)  # fmt: skip
def test_what_no_run_can_have_is_one_line_before_anything_is_written(folder, tmp_path, options, said):  # noqa: F811
    with pytest.raises(MeshwrightError) as error:
        train(folder, tmp_path / "run", "fsdp=8", steps=1, **options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()

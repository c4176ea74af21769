"""Adapters in PEFT's format: what PEFT wrote loads here, and what we write is what it reads.

`tests/references/make_adapters.py` has PEFT make them; `tests/references/adapters.txt` is what it says to ours.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import meshwright as mw
from meshwright.description.families.adapters import read_adapter_config
from meshwright.description.families.load import load_model
from meshwright.description.step.parameter_tree import leaves
from meshwright.errors import MeshwrightError
from meshwright.execution.weights.peft import read_adapter, write_adapter

GOLDENS = Path(__file__).parents[2] / "references"
ADAPTERS = sorted(path.parent.name for path in GOLDENS.glob("adapters/*/adapter_config.json"))
IN_PARTS = ("mistral",)
"""Adapters by a pattern, of several ranks and scales, with modules that came whole: they are read, not written."""
LEFT_OUT = ("qwen3-excluded",)
"""Adapters that leave layers of a target out, which are written as zeros."""
FUSED = ("gpt2", "phi3", "gpt2-dora", "phi3-dora")
"""Families with modules that hold several products, for which PEFT has one A."""

QUICK = (("llama", "fsdp=2,tp=2"), ("gpt2", "fsdp=1"), ("mistral", "fsdp=1"), ("phi3-dora", "fsdp=2,tp=2"))
QUICK += (("gemma-ends", "fsdp=2,tp=2"), ("qwen3-excluded", "fsdp=1"))
CORE = [
    pytest.param(name, mesh, marks=() if (name, mesh) in QUICK else pytest.mark.matrix)
    for name in ADAPTERS for mesh in ("fsdp=1", "fsdp=2,tp=2")
]  # fmt: skip


def golden_of(name):
    """The directory of the model that PEFT made an adapter of."""
    return GOLDENS / name.partition("-")[0]


def adapted(name, folder=None):
    base = load_model(str(golden_of(name)))
    return replace(base, lora=read_adapter_config(folder or GOLDENS / "adapters" / name, base))


@pytest.mark.parametrize(("name", "mesh"), CORE)
def test_logits_with_an_adapter_of_pefts_are_pefts(name, mesh):
    golden = np.load(GOLDENS / "adapters" / name / "golden.npz")
    devices = 1 if mesh == "fsdp=1" else 4
    model = mw.load(golden_of(name), on=f"cpu:{devices}", mesh=mesh, adapter=GOLDENS / "adapters" / name)
    found, wanted = np.asarray(model.logits(golden["tokens"])), golden["logits"]
    assert np.abs(found - wanted).max() <= 1e-5 * (wanted.max() - wanted.min())
    plain = mw.load(golden_of(name), on=f"cpu:{devices}", mesh=mesh).logits(golden["tokens"])
    assert np.abs(np.asarray(plain) - wanted).max() > 0.05 * (wanted.max() - wanted.min())


@pytest.mark.parametrize(
    "name", ["phi3-dora", *(pytest.param(f"{name}-dora", marks=pytest.mark.matrix) for name in ("llama", "gpt2"))]
)
def test_merged_weights_with_magnitudes_are_pefts(name, tmp_path):
    golden = np.load(GOLDENS / "adapters" / name / "golden.npz")
    mw.load(golden_of(name), on="cpu:4", mesh="fsdp=2,tp=2", adapter=GOLDENS / "adapters" / name).save(
        tmp_path / "saved"
    )
    found = load_file(tmp_path / "saved" / "model.safetensors")
    names = set(golden.files) - {"tokens", "logits"}
    assert len(names) >= 8
    for path in names:
        np.testing.assert_allclose(found[path], golden[path], rtol=0, atol=1e-6 * np.abs(golden[path]).max())


def test_embeddings_that_were_tied_are_two_after_an_adapter_of_one(tmp_path):
    """PEFT adapts the lookup alone; the head stays the table that it was, also in what is saved."""
    golden = np.load(GOLDENS / "adapters" / "gemma2-ends" / "golden.npz")
    model = mw.load(GOLDENS / "gemma2", on="cpu:1", adapter=GOLDENS / "adapters" / "gemma2-ends")
    assert not model.config.tied_embeddings
    model.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    again = np.asarray(mw.load(tmp_path / "saved", on="cpu:1").logits(golden["tokens"]))
    assert np.abs(again - golden["logits"]).max() <= 1e-5 * np.ptp(golden["logits"])


@pytest.mark.matrix
def test_adapters_are_added_before_heads_are_copied():
    """More devices along tp than kv heads: it was a traceback."""
    golden = np.load(GOLDENS / "adapters" / "qwen3" / "golden.npz")
    model = mw.load(GOLDENS / "qwen3", on="cpu:8", mesh="tp=8", adapter=GOLDENS / "adapters" / "qwen3")
    assert np.abs(np.asarray(model.logits(golden["tokens"])) - golden["logits"]).max() <= 1e-5 * np.ptp(
        golden["logits"]
    )


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name not in (*IN_PARTS, *LEFT_OUT)])
def test_an_adapter_that_is_written_is_the_one_that_was_read(name, tmp_path):
    """The same tensors under the same names; of modules with several products the same sum B A, in blocks."""
    model = adapted(name)
    write_adapter(tmp_path, model, read_adapter(GOLDENS / "adapters" / name, model), base=name)
    ours, theirs = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, GOLDENS / "adapters" / name)
    )
    assert ours.keys() == {path for path in theirs if "base_layer" not in path}
    for path in (path for path in ours if "lora_A" in path):
        pair = path, path.replace("lora_A", "lora_B")
        if ours[path].shape == theirs[path].shape:
            assert all(np.array_equal(ours[one], theirs[one]) for one in pair)
        else:
            assert name in FUSED
            (one, other) = (held[pair[1]] @ held[pair[0]] for held in (ours, theirs))
            np.testing.assert_allclose(one, other, atol=1e-6)
    again = adapted(name, tmp_path)
    assert again.lora == replace(model.lora, alpha=again.lora.alpha)
    assert again.lora.alpha == pytest.approx(model.lora.alpha)
    first, second = (read_adapter(folder, again) for folder in (GOLDENS / "adapters" / name, tmp_path))
    assert [path for path, _ in leaves(first)] == [path for path, _ in leaves(second)]
    for (path, one), (_, other) in zip(leaves(first), leaves(second), strict=True):
        assert np.array_equal(one, other), path


def test_the_dropout_of_an_adapter_is_read_and_written(tmp_path):
    shutil.copytree(GOLDENS / "adapters" / "llama", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": 0.05}))
    model = adapted("llama", path.parent)
    assert model.lora.dropout == 0.05
    (tmp_path / "again").mkdir()
    write_adapter(tmp_path / "again", model, read_adapter(path.parent, model), base="llama")
    assert adapted("llama", tmp_path / "again").lora == model.lora


def test_peft_takes_every_adapter_that_we_write():
    said = (GOLDENS / "adapters.txt").read_text().splitlines()
    found = {line.split()[0]: float(line.split()[-1]) for line in said[3:]}
    assert sorted(found) == [name for name in ADAPTERS if name not in IN_PARTS]
    assert max(found.values()) < 1e-5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lora_dropout": 1.5}, "lora_dropout=1.5; it is a share from 0 to below 1"),
        ({"use_dora": True}, "lora_magnitude_vector"),
        (
            {"target_parameters": ["mlp.experts.gate_up_proj"]},
            "has target_parameters=['mlp.experts.gate_up_proj'], which",
        ),
        ({"exclude_modules": "("}, "exclude_modules='('; it takes names of modules, or a pattern"),
        ({"exclude_modules": ["q_proj"]}, "which no target of adapter_config.json has"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; 'LORA' is read"),
        ({"target_modules": ["lm_heat"]}, "lora target 'lm_heat' is no matmul of"),
        ({"target_modules": ["q_proj", "lm_head"]}, "has no base_model.model.lm_head.lora_A.weight"),
        ({"target_modules": ["q_proj"]}, "which no target of adapter_config.json has"),
        ({"r": 8}, "adapter_config.json makes them [8, in]"),
        ({"rank_pattern": {"q_proj": 8}}, "adapter_config.json makes them [8, in]"),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern={'q_proj': 'x'}; it takes an object of numbers"),
        ({"target_modules": r".*layers\.0\..*q_proj"}, "which no target of adapter_config.json has"),
        ({"layers_to_transform": [0]}, "which no target of adapter_config.json has"),
        ({"layers_to_transform": "all"}, "layers_to_transform='all'; it takes the number of a layer, or a list"),
        ({"target_modules": "(lm_head|.*q_proj)"}, "has no base_model.model.lm_head.lora_A.weight"),
        ({"target_modules": "q_proj"}, "which matches no matmul"),
        ({"target_modules": "("}, "which is no pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'], which is not read here"),
    ],
)
def test_an_adapter_that_is_none_of_this_model_is_refused_in_a_line(change, said, tmp_path):
    shutil.copytree(GOLDENS / "adapters" / "llama", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(MeshwrightError) as error:
        read_adapter(path.parent, adapted("llama", path.parent))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [{"layers_to_transform": 1}, {"layers_to_transform": [1]}, {"target_modules": r".*layers\.1\..*_proj"}],
    ids=["number", "list", "pattern"],
)
def test_layers_without_an_adapter_are_as_the_base_model(change, tmp_path):
    """Found with published adapters: layers_to_transform was refused, and a pattern had to match in all layers."""
    shutil.copytree(GOLDENS / "adapters" / "llama", tmp_path / "all")
    path = tmp_path / "all" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({k: v * (".layers.1." in k or "lora_A" in k) for k, v in tensors.items()}, path)
    shutil.copytree(GOLDENS / "adapters" / "llama", tmp_path / "some")
    save_file({k: v for k, v in tensors.items() if ".layers.1." in k}, tmp_path / "some" / "adapter_model.safetensors")
    config = tmp_path / "some" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    one, other = (adapted("llama", tmp_path / name) for name in ("all", "some"))
    assert one.lora == other.lora
    wanted, found = read_adapter(tmp_path / "all", one)["layers"], read_adapter(tmp_path / "some", other)["layers"]
    assert wanted.keys() == found.keys()
    for name, array in found.items():
        assert not array[0].any()
        assert name.endswith("_lora_a") or np.array_equal(array, wanted[name])
        assert np.array_equal(array[1], wanted[name][1])


def test_values_that_are_no_numbers_and_tensors_that_are_missing_are_refused(tmp_path):
    shutil.copytree(GOLDENS / "adapters" / "llama", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors, name = load_file(path), "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    model = adapted("llama")
    save_file({key: array for key, array in tensors.items() if key != name}, path)
    with pytest.raises(MeshwrightError, match=f"has no {name}; every layer has one of each target"):
        read_adapter(path.parent, model)
    save_file(tensors | {name: np.full_like(tensors[name], np.nan)}, path)
    with pytest.raises(MeshwrightError, match=f"{name} in .* holds values that are no finite numbers"):
        read_adapter(path.parent, model)

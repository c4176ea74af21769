"""Settings that few models have, and text parts of models of images, as transformers computes them: `make_odd.py`."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import meshwright as mw
from meshwright.description.families.load import load_model
from meshwright.description.families.registry import PRESETS, hugging_face_config, model_from_hugging_face
from meshwright.description.step.frequencies import YarnRopeScaling
from meshwright.description.step.model import Norms, rotary
from meshwright.description.step.parameter_tree import leaves

ODD = Path(__file__).parents[2] / "references" / "odd"
NAMES = sorted(path.parent.name for path in ODD.glob("*/config.json"))
QUICK = (("gpt_neox_odd_rotary", "1,1,1,1"), ("gemma3_wrapper", "1,1,1,1"))


@pytest.mark.filterwarnings("ignore:.*is a model of text and images")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if (name, mesh) in QUICK else pytest.mark.matrix)
        for name in NAMES
        for mesh in ("1,1,1,1", "1,2,2,2")
    ],
)
def test_logits_and_what_follows_greedily_are_those_of_transformers(name, mesh):
    golden = np.load(ODD / name / "golden.npz")
    model = mw.load(ODD / name, on=f"cpu:{8 if '2' in mesh else 1}", mesh=mesh)
    found, wanted, lengths = model.logits(golden["tokens"], golden["lengths"]), golden["logits"], golden["lengths"]
    for row, length in enumerate(lengths):
        off = np.abs(np.asarray(found[row, :length]) - wanted[row, :length]).max()
        assert off <= 2e-5 * (wanted.max() - wanted.min())
    prompts = [golden["tokens"][row, :length].tolist() for row, length in enumerate(lengths)]
    texts = model.generate(prompts, max_tokens=golden["continuations"].shape[1])
    assert [text.tokens for text in texts] == [tuple(row) for row in golden["continuations"].tolist()]


@pytest.mark.parametrize("name", NAMES)
def test_a_config_is_written_as_it_was_read(name):
    model = load_model(str(ODD / name))
    assert model_from_hugging_face(hugging_face_config(model), name=name) == model


def test_keys_of_layers_that_attend_to_those_of_earlier_ones_are_not_read(tmp_path):
    """Transformers ignores them too."""
    golden = ODD.parent / "gemma4_text_e2b"
    shutil.copy(golden / "config.json", tmp_path)
    unread = {f"model.layers.7.self_attn.{name}.weight": np.ones((2, 2), np.float32) for name in ("k_proj", "k_norm")}
    save_file(load_file(golden / "model.safetensors") | unread, tmp_path / "model.safetensors")
    ours, theirs = (dict(leaves(mw.load(path, on="cpu:1", mesh="dp=1").params)) for path in (tmp_path, golden))
    assert all(np.array_equal(array, theirs[path]) for path, array in ours.items())


def test_a_text_part_is_saved_as_a_model_of_text(tmp_path):
    """Its own config.json, and weights by the names of a model of text, with one note about what is left out."""
    with pytest.warns(UserWarning, match="the text's weights are read, multi_modal_projector, vision_tower not"):
        model = mw.load(ODD / "mistral3_wrapper", on="cpu:1", mesh="dp=1")
    model.save(tmp_path / "text")
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == "mistral"
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "text", ODD / "mistral3_wrapper"))
    for name, array in ours.items():
        assert np.array_equal(array, theirs[f"language_model.{name}"])


def test_the_text_of_a_mistral3_may_be_a_ministral3():
    """What its config.json does not say has the defaults of a Ministral 3."""
    text = {"model_type": "ministral3", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 8}
    model = model_from_hugging_face({"model_type": "mistral3", "text_config": text}, name="wrapped")
    assert (model.num_kv_heads, model.head_dim, model.attention.windows) == (8, 128, (None,))
    yarn = YarnRopeScaling(factor=16.0, original_max_seq_len=16_384, mscale=1.0, mscale_all_dim=1.0, query_beta=0.1)
    assert (model.norms, model.positions) == (Norms(epsilon=1e-5), rotary(1e6, yarn))
    assert hugging_face_config(model)["model_type"] == "ministral3"


def test_the_text_of_a_mistral3_may_be_a_mistral4():
    """Mistral Small 4 is published so; without its sizes a file means that model."""
    text = {"model_type": "mistral4", "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 12_288}
    text |= {"num_hidden_layers": 36, "num_attention_heads": 32}
    name = "mistral-small-4-119b"
    model = model_from_hugging_face({"model_type": "mistral3", "text_config": text}, name=name)
    assert model == PRESETS[name]


def test_a_qwen3_5_of_images_has_its_experts_in_one_tensor(tmp_path):
    """As Qwen/Qwen3.5-35B-A3B is published: prefixes, experts together, a vision tower, a second token's module."""
    text = ODD.parent / "qwen3_5_moe_text"
    config = json.loads((text / "config.json").read_text())
    config["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": config}))
    arrays = load_file(text / "model.safetensors")
    found = {"model.visual.patch_embed.weight": np.ones(2, np.float32), "mtp.norm.weight": np.ones(2, np.float32)}
    for layer in range(config["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([arrays.pop(f"{experts}.{n}.{name}_proj.weight") for n in range(config["num_experts"])])
            for name in ("gate", "up", "down")
        )
        arrays |= {f"{experts}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{experts}.down_proj": down}
    found |= {name.replace("model.", "model.language_model.", 1): array for name, array in arrays.items()}
    save_file(found, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="the text's weights are read, visual not"):
        model = mw.load(tmp_path, on="cpu:1")
    before = mw.load(text, on="cpu:1")
    assert model.config.experts == before.config.experts
    for (path, ours), (_, theirs) in zip(leaves(model.params), leaves(before.params), strict=True):
        assert np.array_equal(ours, theirs), path


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    shutil.copy(ODD / "qwen2_first_full" / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(mw.MeshwrightError, match=r"is a pointer of git-lfs.*`git lfs pull`"):
        mw.load(tmp_path, on="cpu:1", mesh="dp=1")

"""Directories that are not what they should be, each one line that names the file, the tensor or the field."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import meshwright as mw

GOLDEN = Path(__file__).parents[2] / "references" / "llama"
SHARDED = Path(__file__).parents[2] / "references" / "mixtral"
UP = "model.layers.1.mlp.up_proj.weight"


def tensors(change):
    """Write the weights anew after a change to them."""

    def apply(folder):
        path = folder / "model.safetensors"
        held = load_file(path)
        change(held)
        path.unlink()
        save_file(held, path, metadata={"format": "pt"})

    return apply


def data(name, change):
    """Change the bytes of a file."""

    def apply(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def fields(name="config.json", **changes):
    def apply(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


def index(change):
    def apply(folder):
        path = folder / "model.safetensors.index.json"
        held = json.loads(path.read_text())
        change(held)
        path.write_text(json.dumps(held))

    return apply


def replaced(name, text):
    return lambda folder: (folder / name).write_text(text)


def removed(name):
    return lambda folder: (folder / name).unlink()


def renamed(name, to):
    return lambda folder: (folder / name).rename(folder / to)


def header(change):
    """Change the JSON header of the weights, its length kept true."""

    def apply(raw):
        length = int.from_bytes(raw[:8], "little")
        text = json.loads(raw[8 : 8 + length])
        change(text)
        new = json.dumps(text).encode()
        return len(new).to_bytes(8, "little") + new + raw[8 + length :]

    return data("model.safetensors", apply)


def tokenizer(num_tokens):
    """A tokenizer of so many words."""

    def apply(folder):
        made = Tokenizer(models.WordLevel({f"w{n}": n for n in range(num_tokens)}, unk_token="w0"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
        made.save(str(folder / "tokenizer.json"))

    return apply


def move(held, name, to):
    held[to] = held.pop(name)


FIRST, SECOND = sorted(path.name for path in SHARDED.glob("model-*"))[:2]
BROKEN = {
    "no weights": (GOLDEN, removed("model.safetensors"), "holds no weights"),
    "pickle": (GOLDEN, renamed("model.safetensors", "pytorch_model.bin"), "a pickle runs code|A pickle runs code"),
    "torch file": (GOLDEN, renamed("model.safetensors", "model.pt"), "model.pt and no safetensors"),
    "no config": (GOLDEN, removed("config.json"), "config.json"),
    "config is no JSON": (GOLDEN, replaced("config.json", "{"), "is not JSON"),
    "config is a list": (GOLDEN, replaced("config.json", "[]"), "holds a list"),
    "empty file": (GOLDEN, replaced("model.safetensors", ""), "cut short or no safetensors"),
    "text": (GOLDEN, replaced("model.safetensors", "version https://git-lfs.github.com/spec/v1"), "git-lfs"),
    "cut in half": (GOLDEN, data("model.safetensors", lambda raw: raw[: len(raw) // 2]), "cut short"),
    "a byte short": (GOLDEN, data("model.safetensors", lambda raw: raw[:-1]), "cut short"),
    "a byte long": (GOLDEN, data("model.safetensors", lambda raw: raw + b"x"), "cut short or no safetensors"),
    "a long header": (GOLDEN, data("model.safetensors", lambda raw: b"\xff" * 8 + raw[8:]), "no safetensors"),
    "header is no JSON": (GOLDEN, data("model.safetensors", lambda raw: raw[:8] + b"?" + raw[9:]), "no safetensors"),
    "offsets overlap": (GOLDEN, header(lambda h: h[UP].update(data_offsets=[0, 8192])), "no safetensors"),
    "a shape too large": (GOLDEN, header(lambda h: h[UP].update(shape=[64, 33])), "no safetensors"),
    "a shape turned": (GOLDEN, header(lambda h: h[UP].update(shape=[32, 64])), r"has shape \[32, 64\].*\[64, 32\]"),
    "fp8": (
        GOLDEN,
        tensors(lambda held: held.update({UP: held[UP].astype(np.uint8)})),
        rf"{UP} in .*model.safetensors has dtype U8",
    ),
    "a tensor missing": (GOLDEN, tensors(lambda held: held.pop(UP)), rf"no {UP} \[64, 32\]"),
    "a tensor extra": (GOLDEN, tensors(lambda held: held.update(other=np.ones(3, np.float32))), r"holds other \[3\]"),
    "a layer extra": (
        GOLDEN,
        tensors(lambda held: held.update({UP.replace(".1.", ".9."): held[UP]})),
        r"holds model.layers.9.mlp.up_proj.weight",
    ),
    "another name": (GOLDEN, tensors(lambda held: move(held, UP, "up.weight")), rf"no {UP}"),
    "another shape": (
        GOLDEN,
        tensors(lambda held: held.update({UP: np.ones((60, 32), np.float32)})),
        r"model.safetensors has shape \[60, 32\]; config.json makes it \[64, 32\]",
    ),
    "no head": (GOLDEN, tensors(lambda held: held.pop("lm_head.weight")), r"no lm_head.weight \[96, 32\]"),
    "another width": (GOLDEN, fields(intermediate_size=48), r"\[64, 32\]; config.json makes it \[48, 32\]"),
    "fewer layers": (GOLDEN, fields(num_hidden_layers=3), "holds model.layers.3"),
    "more layers": (GOLDEN, fields(num_hidden_layers=5), "no model.layers.4"),
    "another vocab": (GOLDEN, fields(vocab_size=128), r"\[96, 32\]; config.json makes it \[128, 32\]"),
    "more heads": (GOLDEN, fields(num_attention_heads=16), "config.json makes it"),
    "a bias that is not there": (GOLDEN, fields(attention_bias=True), "no model.layers.0.self_attn.q_proj.bias"),
    "an unknown family": (GOLDEN, fields(model_type="nothing"), "model_type 'nothing'"),
    "an unknown field": (GOLDEN, fields(residual_multiplier=0.5), "residual_multiplier=0.5"),
    "an unknown scaling": (GOLDEN, fields(rope_parameters={"rope_type": "bent", "factor": 2.0}), "'bent'"),
    "quantised": (GOLDEN, fields(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "a file missing": (SHARDED, removed(SECOND), f"{SECOND} is missing"),
    "index is no JSON": (SHARDED, replaced("model.safetensors.index.json", "]"), "not an index of safetensors"),
    "index without a map": (SHARDED, replaced("model.safetensors.index.json", "{}"), "not an index of safetensors"),
    "index to elsewhere": (
        SHARDED,
        index(lambda held: held["weight_map"].update({"lm_head.weight": "../x.safetensors"})),
        "files are in the same directory",
    ),
    "index to another file": (
        SHARDED,
        index(lambda held: held["weight_map"].update({"lm_head.weight": FIRST, "model.norm.weight": FIRST})),
        "which model.safetensors.index.json",
    ),
    "index forgets a tensor": (SHARDED, index(lambda held: held["weight_map"].pop("lm_head.weight")), "lm_head.weight"),
    "two files changed": (SHARDED, lambda folder: shutil.copy(folder / FIRST, folder / SECOND), "does not hold"),
    "tokenizer of another vocab": (GOLDEN, tokenizer(97), "tokens up to 96; config.json has a vocab_size of 96"),
    "tokenizer is no JSON": (GOLDEN, replaced("tokenizer.json", "{"), "tokenizer.json is not a tokenizer"),
    "tokenizer.model is text": (
        GOLDEN,
        replaced("tokenizer.model", "IQ== 0\n"),
        "not a SentencePiece model, and there is",
    ),
    "SentencePiece of another vocab": (
        GOLDEN,
        lambda folder: shutil.copy(GOLDEN.parent / "sentencepiece/bpe.model", folder / "tokenizer.model"),
        "tokens up to 699; config.json has a vocab_size of 96",
    ),
    "SentencePiece cut in half": (
        GOLDEN,
        lambda folder: (folder / "tokenizer.model").write_bytes(
            (GOLDEN.parent / "sentencepiece/bpe.model").read_bytes()[:5000]
        ),
        "tokenizer.model is not a SentencePiece model",
    ),
    "vocab.json alone": (GOLDEN, replaced("vocab.json", "{}"), "vocab.json and no tokenizer.json"),
    "tokenizer config is no JSON": (
        GOLDEN,
        lambda folder: (tokenizer(9)(folder), replaced("tokenizer_config.json", "x")(folder)),
        "tokenizer_config.json is not JSON",
    ),
    "NaN": (
        GOLDEN,
        tensors(lambda held: held.update({UP: np.full((64, 32), np.nan, np.float32)})),
        rf"{UP} in .*model.safetensors has NaN",
    ),
    "two tables": (
        GOLDEN.with_name("gemma"),
        tensors(lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"] * 2})),
        "config.json says tie_word_embeddings, and .* holds a lm_head.weight that is not model.embed_tokens.weight",
    ),
    "infinity": (
        GOLDEN,
        tensors(lambda held: held["model.norm.weight"].__setitem__(3, np.inf)),
        "model.norm.weight in .*model.safetensors has infinite values",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_bad_directory_is_one_line(case, tmp_path):
    source, change, message = BROKEN[case]
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    change(folder)
    with pytest.raises(mw.MeshwrightError, match=message) as raised:
        mw.load(folder, on="cpu:2", mesh="1,2,1,1")
    assert "\n" not in str(raised.value)


def mask():
    return np.tril(np.ones((1, 1, 8, 8), bool))


OLD = {
    "GPT-2 without its head's prefix, with masks": (
        "gpt2",
        lambda held: (
            [move(held, name, name.removeprefix("transformer.")) for name in list(held)],
            held.update({"h.0.attn.bias": mask(), "h.0.attn.masked_bias": np.full((), -1e4, np.float32)}),
        ),
    ),
    "GPT-NeoX with masks and frequencies": (
        "gpt_neox",
        lambda held: held.update(
            {
                "gpt_neox.layers.1.attention.bias": mask(),
                "gpt_neox.layers.1.attention.masked_bias": np.full((), -1e9, np.float32),
                "gpt_neox.layers.1.attention.rotary_emb.inv_freq": np.ones(2, np.float16),
            }
        ),
    ),
    "Llama with frequencies": (
        "llama",
        lambda held: held.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}),
    ),
    "Gemma with its table twice": (
        "gemma",
        lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].copy()}),
    ),
    "Gemma with its table as the head": (
        "gemma",
        lambda held: move(held, "model.embed_tokens.weight", "lm_head.weight"),
    ),
}


@pytest.mark.parametrize("case", OLD)
def test_checkpoints_are_read_as_they_were_published(case, tmp_path):
    family, change = OLD[case]
    source = GOLDEN.with_name(family)
    shutil.copytree(source, tmp_path / "model")
    tensors(change)(tmp_path / "model")
    before, after = (mw.load(path, on="cpu:1").params for path in (source, tmp_path / "model"))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), before, after))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs hardware: --on"),
        ({"on": "cpu:9999"}, "needs 9999"),
        ({"on": "cpu:8", "mesh": "1,3,1,1"}, "needs 3 devices"),
        ({"on": "cpu:8", "mesh": "pp=8"}, "stages"),
        ({"on": "cpu:8", "mesh": "ep=8"}, "splits experts"),
    ],
)
def test_a_mesh_that_a_model_cannot_be_on_is_one_line(options, message):
    with pytest.raises(mw.MeshwrightError, match=message):
        mw.load(GOLDEN, **options)


def test_a_directory_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(mw.MeshwrightError, match="no directory"):
        mw.load(tmp_path / "none", on="cpu:1")

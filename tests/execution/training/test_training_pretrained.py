"""A run that begins with the weights of a Hugging Face directory, and reads text with its tokenizer."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.execution.weights.load import read_tensors

GOLDEN = Path(__file__).parents[2] / "references" / "llama"
BATCH, SEQ_LEN = 8, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trained model with a tokenizer of its vocabulary, and a text of exactly one batch."""
    root = tmp_path_factory.mktemp("pretrained")
    directory = root / "llama"
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, directory)
    vocab = json.loads((GOLDEN / "config.json").read_text())["vocab_size"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = [*"abcdefghijklmnopqrstuvwxyz", "\u0120"]  # How a space is written there.
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["</s>"], initial_alphabet=alphabet)
    made.train_from_iterator(["the cat sat on the mat and the dog ran after the cat"] * 4, trainer)
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    words = np.random.default_rng(0).choice(["the", "cat", "sat", "mat", "dog"], BATCH * SEQ_LEN)
    # A word is one token, and the end of the text one more: the last target.
    (root / "text.txt").write_text("".join(f" {word}" for word in words))
    return root


def train(folder, run, mesh, **options):
    losses = []
    mw.train(
        options.pop("what", folder / "llama"),
        run,
        on="cpu:8",
        mesh=mesh,
        batch=BATCH,
        seq_len=SEQ_LEN,
        data=(str(folder / "text.txt"),),
        on_step=lambda row: losses.append(row["loss"]),
        **options,
    )
    return losses


def loss_of_batch(model, folder):
    """The loss of the only batch there is, by a model's logits on one device."""
    text = (folder / "text.txt").read_text()
    corpus = np.array([*model.tokenizer.encode(text, add_special_tokens=False), *model.tokenizer.stop_tokens[:1]])
    assert len(corpus) == BATCH * SEQ_LEN + 1
    assert corpus[-1] == model.tokenizer.stop_tokens[0]
    shares = jax.nn.log_softmax(model.logits(corpus[:-1].reshape(BATCH, SEQ_LEN)), axis=-1)
    return -float(jnp.take_along_axis(shares, corpus[1:].reshape(BATCH, SEQ_LEN, 1), axis=-1).mean())


@pytest.fixture(scope="module")
def wanted(folder):
    return loss_of_batch(mw.load(folder / "llama", on="cpu:1"), folder)


@pytest.mark.parametrize(
    "mesh",
    ["1,2,2,2", *(pytest.param(mesh, marks=pytest.mark.matrix) for mesh in ("8,1,1,1", "fsdp=2,pp=2,tp=2"))],
)
def test_its_first_loss_is_that_of_the_weights(folder, wanted, tmp_path, mesh):
    assert train(folder, tmp_path / "run", mesh, steps=1) == pytest.approx([wanted], rel=1e-6)


def test_a_run_keeps_what_it_needs_and_goes_on_without_the_directory_it_began_from(folder, wanted, tmp_path):
    shutil.copytree(folder / "llama", tmp_path / "llama")
    run = tmp_path / "run"
    assert train(folder, run, "fsdp=8", what=tmp_path / "llama", steps=2)[1] < wanted
    shutil.rmtree(tmp_path / "llama")
    with pytest.warns(UserWarning, match="the schedule of the learning rate is stretched from 2 to 3 steps"):
        mw.train(run, resume=True, steps=3)
    loaded, before = mw.load(run), mw.load(folder / "llama", on="cpu:1")
    text = "the cat sat on the mat"
    assert loaded.encode(text).tolist() == before.encode(text).tolist()
    loaded.save(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (GOLDEN / "config.json").read_text()
    )
    assert read_tensors(tmp_path / "out").keys() == read_tensors(GOLDEN).keys()


def test_from_scratch_takes_the_tokenizer_alone(folder, wanted, tmp_path):
    [loss] = train(folder, tmp_path / "run", "fsdp=8", steps=1, from_scratch=True)
    assert abs(loss - wanted) > 1e-3
    assert mw.load(tmp_path / "run").tokenizer.num_tokens <= 96


def test_weights_of_another_model_are_refused(folder, tmp_path):
    config = json.loads((GOLDEN / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(MeshwrightError, match=r"norms\.epsilon is 0\.001, and 1e-06 in its config\.json"):
        train(folder, tmp_path / "run", "fsdp=8", what=other, weights=folder / "llama")
    assert not (tmp_path / "run").exists()

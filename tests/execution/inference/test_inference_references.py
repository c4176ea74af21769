"""Each family computes what transformers does, on weights read from its directory: `references/make_references.py`."""

import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "references"))
from fields import in_order

import meshwright as mw
from meshwright.description.step.parameter_tree import leaves
from meshwright.execution.models.decoder import loss_and_load
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.weights.load import read_tensors
from meshwright.execution.weights.places import places

GOLDENS = Path(__file__).parents[2] / "references"
FAMILIES = in_order(path.parent.name for path in GOLDENS.glob("*/config.json"))
VARIANTS = ("llama_dynamic", "llama_yarn", "phi3_longrope")
"""Other settings of families that are among them too, and have the same weights."""

MESHES = ("1,1,1,1", "1,8,1,1", "2,2,2,1", "1,1,4,2")
TOLERANCE = 2e-5
"""Of the logits' range, in float32."""


def load(family, mesh):
    shape = [int(degree) for degree in mesh.split(",")] if "=" not in mesh else None
    devices = int(np.prod(shape)) if shape else 8
    model = mw.load(GOLDENS / family, on=f"cpu:{devices}", mesh=mesh)
    return model, dict(np.load(GOLDENS / family / "golden.npz"))


CORE = {("llama", "1,8,1,1"), ("qwen2", "1,1,4,2"), ("phi3_longrope", "1,1,1,1")}
"""What `make test` has of them."""


def cases():
    """Every family on one device and on a mesh, each on another than the family before it."""
    alone = ((family, MESHES[0]) for family in FAMILIES)
    for family, mesh in sorted({*alone, *zip(FAMILIES, itertools.cycle(MESHES[1:]), strict=False), *CORE}):
        marks = () if (family, mesh) in CORE else (pytest.mark.matrix,)
        yield pytest.param(family, mesh, marks=marks, id=f"{family}-{mesh}")
    for family in ("qwen3_next", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"):
        yield pytest.param(family, "ep=2,fsdp=4", marks=pytest.mark.matrix, id=f"{family}-ep")


@pytest.mark.parametrize(("family", "mesh"), [*cases()])
def test_logits_and_what_follows_greedily_are_those_of_transformers(family, mesh):
    model, golden = load(family, mesh)
    wanted, lengths = golden["logits"], golden["lengths"]
    found = np.asarray(model.logits(golden["tokens"], lengths))
    allowed = TOLERANCE * (wanted.max() - wanted.min())
    for row, length in enumerate(lengths):
        assert np.abs(found[row, :length] - wanted[row, :length]).max() <= allowed
    # Rows of all lengths at once, read and then continued from a cache.
    prompts = [golden["tokens"][row, :length].tolist() for row, length in enumerate(lengths)]
    texts = model.generate(prompts, max_tokens=golden["continuations"].shape[1])
    assert [text.tokens for text in texts] == [tuple(row) for row in golden["continuations"].tolist()]


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["sp=2", "sp=4,tp=2"])
def test_logits_of_linear_attention_over_sp_are_those_of_transformers(mesh):
    """They were those of each device's tokens alone. Texts of one token are padded, so that each device has some."""
    model = mw.load(GOLDENS / "qwen3_next", on="cpu:8" if "tp" in mesh else "cpu:2", mesh=mesh)
    golden = np.load(GOLDENS / "qwen3_next" / "golden.npz")
    wanted, lengths = golden["logits"], golden["lengths"]
    for row in (lengths.argmin(), lengths.argmax()):
        found = np.asarray(model.logits(golden["tokens"][row : row + 1, : lengths[row]]))[0]
        assert np.abs(found - wanted[row, : lengths[row]]).max() <= TOLERANCE * np.ptp(wanted)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in VARIANTS])
def test_weights_in_and_out_are_equal_to_the_bit(family, tmp_path):
    model, _ = load(family, "1,4,2,1")
    model.save(tmp_path / "out")
    before, after = read_tensors(GOLDENS / family), read_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor.open(), after[name].open())
    assert (tmp_path / "out" / "config.json").read_bytes() == (GOLDENS / family / "config.json").read_bytes()


WITH_GRADIENTS = [
    family for family in FAMILIES if "gradient" in " ".join(np.load(GOLDENS / family / "golden.npz").files)
]


@pytest.mark.parametrize("family", WITH_GRADIENTS)
def test_gradients_are_those_of_transformers(family):
    model, golden = load(family, "1,1,2,1")
    batch = {"tokens": golden["tokens"][-1:, :-1], "targets": golden["tokens"][-1:, 1:]}
    layout = ShardingContext(model.mesh_shape)
    with jax.set_mesh(model.mesh):
        placed = {
            name: jax.device_put(x.astype(np.int32), layout.spec("batch", "sequence")) for name, x in batch.items()
        }

        @jax.jit
        def gradients(params):
            return jax.grad(
                lambda p: loss_and_load(p, placed, model.config, layout, dtype=jnp.float32, remat="none")[0]
            )(params)

        found = dict(leaves(gradients(model.params)))
    scale = max(np.abs(golden[name]).max() for name in golden if name.startswith("gradient."))
    for path, place in places(model.config).items():
        for numbers, name in place.names():
            wanted = place.view(golden[f"gradient.{name}"])
            assert np.abs(np.asarray(found[path][numbers]) - wanted).max() <= TOLERANCE * scale, name


def test_texts_and_seeds_do_not_depend_on_the_batch_they_are_in():
    model, golden = load("llama", "1,2,2,2")
    prompts = [golden["tokens"][row, :length].tolist() for row, length in enumerate(golden["lengths"])]
    how = [
        mw.Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.3, seed=n) for n in range(8)
    ]
    together = model.generate(prompts, max_tokens=6, sampling=how)
    assert len({text.tokens for text in together}) == 8
    assert model.generate(prompts[3], max_tokens=6, sampling=how[3]) == [together[3]]


@pytest.mark.matrix
def test_a_run_that_no_config_json_describes_is_loaded_and_not_saved(tmp_path):
    options = {"batch": 8, "seq_len": 16, "mesh": "fsdp=4,tp=2", "num_layers": 2}
    mw.train("tiny-moe-shared", tmp_path / "run", on="cpu:8", steps=1, **options)
    model = mw.load(tmp_path / "run")
    assert len(model.generate("def ", max_tokens=2)[0].tokens) == 2
    with pytest.raises(mw.MeshwrightError, match=r"no config\.json of Hugging Face describes tiny-moe-shared"):
        model.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.matrix
def test_a_run_of_linear_attention_over_sp_is_loaded_onto_a_mesh_that_generates(tmp_path):
    options = {"on": "cpu:8", "steps": 1, "batch": 4, "seq_len": 32, "mesh": "fsdp=4,sp=2"}
    mw.train("tiny-qwen3.5", tmp_path / "run", num_layers=4, **options)
    model = mw.load(tmp_path / "run")
    assert str(model.mesh_shape) == "fsdp=8"
    assert len(model.generate("def ", max_tokens=2)[0].tokens) == 2

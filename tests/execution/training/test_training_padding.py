"""Models whose vocabulary and heads tp=2 does not divide: trained, saved without padding, read and generated."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.model import Experts
from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.rules import rules_of
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.sampling import Sampling
from meshwright.execution.runtime.arrays import fit
from meshwright.execution.training.loop import run_steps
from meshwright.execution.training.run_directory.checkpoint import Checkpoints
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.run_directory.saving import Saving
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape
from meshwright.planning.plan import make_plan

GPT2 = replace(PRESETS["tiny-gpt2"], num_layers=1, embed=80, num_heads=5, num_kv_heads=5, head_dim=16, vocab=259)
"""As GPT-2 XL: an odd vocabulary, five heads to a head dim of a multiple of 16, and one table for both ends."""

LLAMA = replace(PRESETS["tiny"], num_layers=2, vocab=257)
"""As Llama 3 with one more token."""

GEMMA = replace(PRESETS["tiny"], name="gemma", num_layers=2, num_heads=8, num_kv_heads=1)
"""As Gemma 2B, with one kv head, of which every device of tp has a copy."""

CONFIGS = {
    model.name: RunConfig(
        workload=Workload(model=model, batch=8, seq_len=16, compute_dtype="f32"),
        mesh=MeshShape(),
        hardware="cpu:1",
        memory_headroom=0.1,
        optimizer=Optimizer(warmup_steps=1, decay_steps=40),
        steps=4,
        saving=Saving(every=2),
    )
    for model in (GPT2, LLAMA, GEMMA)
}
pytestmark = pytest.mark.filterwarnings("ignore:mesh .* takes the first")

PROMPTS = [[1, 2, 3, 250, 7], [9, 8, 7], [5] * 20]


def train(config, directory):
    """The losses of the steps that are left of a run."""
    rows = []
    run_steps(config, directory, on_step=rows.append, on_note=lambda line: None)
    return [row["loss"] for row in rows]


def on_mesh(config, mesh, **strategy):
    return replace(config, mesh=mesh, hardware=f"cpu:{mesh.num_devices}", strategy=Strategy(**strategy))


def stored(directory, step, model):
    """The parameters of a checkpoint, with the shapes that the model declares."""
    wanted = {path: jax.ShapeDtypeStruct(each.shape, np.float32) for path, each in leaves(parameters(model))}
    tree = {}
    for path, leaf in wanted.items():
        *parents, name = path.split(".")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = leaf
    return jax.tree.map(np.asarray, Checkpoints(directory).restore(step, {"params": tree})["params"])


@pytest.fixture(
    scope="module", params=[GPT2.name, *(pytest.param(each.name, marks=pytest.mark.matrix) for each in (LLAMA, GEMMA))]
)
def alone(request, tmp_path_factory):
    """A run of one device: its config, directory and losses."""
    config, directory = CONFIGS[request.param], tmp_path_factory.mktemp(request.param)
    return config, directory, train(config, directory)


@pytest.mark.slow
def test_a_run_goes_from_mesh_to_mesh_with_other_padding(alone, tmp_path):
    config, directory, losses = alone
    begun = on_mesh(config, MeshShape(fsdp=2, tp=2))
    found = train(replace(begun, steps=2), tmp_path)
    found += train(on_mesh(config, MeshShape(tp=4)), tmp_path)
    np.testing.assert_allclose(found, losses, rtol=2e-6)
    # Orbax raises for an array of another shape.
    ours, theirs = (dict(leaves(stored(folder, 4, config.workload.model))) for folder in (tmp_path, directory))
    for path, array in theirs.items():
        # A bias of keys that are not rotated changes no softmax: its gradient is rounding alone.
        if path == "layers.key_bias":
            continue
        np.testing.assert_allclose(ours[path], array, atol=2e-4, err_msg=path)


@pytest.mark.slow
def test_weights_come_out_as_they_are_and_in_again(alone, tmp_path):
    config, directory, _ = alone
    model = config.workload.model
    kept = dict(leaves(stored(directory, 4, model)))
    written = []
    for number, (on, mesh) in enumerate((("cpu:1", "tp=1"), ("cpu:4", "tp=4"), ("cpu:4", "sp=2,tp=2"))):
        mw.load(directory, on=on, mesh=mesh).save(tmp_path / str(number))
        written.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert written[0] == written[1] == written[2]
    assert json.loads((tmp_path / "1/config.json").read_text())["vocab_size"] == model.vocab
    read = mw.load(tmp_path / "0", on="cpu:4", mesh="fsdp=2,tp=2")
    whole = padded(model, MeshShape(tp=2), rules_of(Strategy()))
    declared = dict(leaves(parameters(whole)))
    for path, array in leaves(read.params):
        assert array.shape == declared[path].shape
        np.testing.assert_array_equal(array, fit(kept[path], array.shape))
        np.testing.assert_array_equal(fit(np.asarray(array), kept[path].shape), kept[path])


@pytest.mark.slow
@pytest.mark.parametrize(("on", "mesh"), [("cpu:4", "tp=4"), ("cpu:4", "fsdp=2,tp=2"), ("cpu:4", "sp=2,tp=2")])
def test_padding_is_never_chosen_and_changes_nothing(alone, on, mesh):
    config, directory, _ = alone
    one, model = mw.load(directory, on="cpu:1"), mw.load(directory, on=on, mesh=mesh)
    tokens = [[1, 2, 3, 4], [250, 7, 7, 1]]
    logits = model.logits(tokens)
    assert logits.shape[-1] == config.workload.config.vocab
    np.testing.assert_allclose(logits, one.logits(tokens), atol=1e-4)
    for ours, theirs in zip(model.losses(PROMPTS), one.losses(PROMPTS), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    for sampling in (Sampling(), Sampling(temperature=50.0, repetition_penalty=1.5, presence_penalty=1.0, seed=3)):
        ours, theirs = (each.generate(PROMPTS, max_tokens=8, sampling=sampling) for each in (model, one))
        assert [each.tokens for each in ours] == [each.tokens for each in theirs]
        assert max(token for each in ours for token in each.tokens) < config.workload.config.vocab


@pytest.mark.parametrize(
    ("optimizer", "model"), [("adafactor", LLAMA), ("muon", GPT2)], ids=lambda each: getattr(each, "name", each)
)
def test_an_optimizer_that_padding_would_change_is_refused(optimizer, model):
    config = on_mesh(CONFIGS[model.name], MeshShape(tp=2), optimizer=optimizer)
    with pytest.raises(
        MeshwrightError, match=rf"{optimizer} updates an array .* tp=2 has vocab padded from {model.vocab} to"
    ):
        run_steps(config, Path("unused"))


def test_a_plan_says_what_is_padded_and_counts_it():
    workload, mesh = CONFIGS[GPT2.name].workload, MeshShape(tp=2)
    plan = make_plan(workload, mesh, parse_system("cpu:2"), Strategy())
    (note,) = (note for note in plan.predicted.notes if "padded" in note)
    assert note.startswith("tp=2 has vocab padded from 259 to 260 and kv_heads padded from 5 to 6: ")
    even = replace(GPT2, vocab=260, num_heads=6, num_kv_heads=6)
    other = make_plan(replace(workload, model=even), mesh, parse_system("cpu:2"), Strategy())
    assert plan.predicted.flops == other.predicted.flops
    assert plan.predicted.memory_bytes == other.predicted.memory_bytes
    assert plan.predicted.collectives == other.predicted.collectives
    assert plan.predicted.mfu < other.predicted.mfu


@pytest.mark.slow
@pytest.mark.matrix
def test_experts_that_ep_does_not_divide_are_trained_saved_and_read(tmp_path):
    """Six experts over ep=4: saved as six, in every export, and those of zeros answer nothing."""
    experts = Experts(count=6, num_active=2, mlp=32)
    model = replace(PRESETS["tiny-moe"], num_layers=1, experts=experts)
    config = replace(CONFIGS[LLAMA.name], workload=Workload(model=model, batch=8, seq_len=16, compute_dtype="f32"))
    losses = train(config, tmp_path / "one")
    found = train(replace(on_mesh(config, MeshShape(ep=4, fsdp=2)), steps=2), tmp_path / "ep")
    found += train(on_mesh(config, MeshShape(ep=4)), tmp_path / "ep")
    np.testing.assert_allclose(found, losses, rtol=2e-6)
    ours, theirs = (dict(leaves(stored(tmp_path / name, 4, model))) for name in ("ep", "one"))
    for path, array in theirs.items():
        np.testing.assert_allclose(ours[path], array, atol=2e-4, err_msg=path)
    one, spread = mw.load(tmp_path / "ep", on="cpu:1"), mw.load(tmp_path / "ep", on="cpu:4", mesh="ep=4")
    written = []
    for name, each in (("alone", one), ("spread", spread)):
        each.save(tmp_path / name)
        written.append((tmp_path / name / "model.safetensors").read_bytes())
    assert written[0] == written[1]
    again = mw.load(tmp_path / "spread", on="cpu:4", mesh="ep=4")
    for path, array in leaves(again.params):
        np.testing.assert_array_equal(array, dict(leaves(spread.params))[path])
        assert array.shape[1] == 8 if "expert" in path else array.shape == theirs[path].shape
    tokens = [[1, 2, 3, 4], [250, 7, 7, 1], [5, 5, 5, 5], [9, 8, 7, 6]]
    np.testing.assert_allclose(again.logits(tokens), one.logits(tokens), atol=1e-4)
    ours, theirs = (each.generate(PROMPTS, max_tokens=8) for each in (again, one))
    assert [each.tokens for each in ours] == [each.tokens for each in theirs]

"""Each family over each mesh axis that can split it: training as on one device, texts as transformers'."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "references"))
from axes import FAMILIES, FOLDER, SERVING, TRAINING, axes_of, model_of

import meshwright as mw
from meshwright.description.step.strategy import DEFAULT
from meshwright.description.step.workload import Workload
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.step import initial_state, train_step
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape

CORE = {("qwen3", "sp"), ("gemma3_text", "pp")}
"""What `make matrix` has of training."""


def cases(axes):
    """The pairs of family and axis. Which can be split takes plans, so tests of others skip and say so."""
    for family in FAMILIES:
        for axis in axes:
            marks = pytest.mark.matrix if axes is TRAINING and (family, axis) in CORE else pytest.mark.exhaustive
            yield pytest.param(family, axis, marks=marks, id=f"{family}-{axis}")


@cache
def steps(model, axis, num_microbatches):
    """The losses and gradient norms of two steps of random weights on a mesh with this axis of 2; None: one device."""
    work = Workload(model=model, batch=4, seq_len=32, compute_dtype="f32", remat="block")
    shape = MeshShape(**{axis: 2}) if axis else MeshShape()
    layout, optimizer = ShardingContext(shape), Optimizer(learning_rate=1e-3, warmup_steps=1)
    # Adam's first updates are signs, also of gradients that are zero to rounding; SGD's are the gradients.
    strategy = replace(DEFAULT, optimizer="sgd", num_microbatches=num_microbatches)
    draw, mesh, found = np.random.default_rng(0), build_mesh(shape, jax.devices()[: shape.num_devices]), []
    with jax.set_mesh(mesh):
        state = initial_state(work, layout, optimizer, mesh, strategy, seed=3)
        step = train_step(work, layout, optimizer, strategy)
        for _ in range(2):
            tokens = draw.integers(0, work.config.vocab, (4, 33)).astype(np.int32)
            batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
            placed = {name: jax.device_put(array, layout.spec("batch", "sequence")) for name, array in batch.items()}
            state, metrics = step(state, placed)
            found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return np.array(found)


@pytest.mark.parametrize(("family", "axis"), [*cases(TRAINING)])
def test_steps_over_an_axis_are_those_of_one_device(family, axis):
    if axis not in axes_of(family)[0].split():
        pytest.skip(f"{axis} cannot split the training of {family}")
    # The loss of experts' balance is that of each microbatch, so one device has as many.
    model, count = model_of(family, axis), 2 if axis == "pp" else 1
    np.testing.assert_allclose(steps(model, axis, count), steps(model, None, count), rtol=2e-5)


@pytest.mark.parametrize(("family", "axis"), [*cases(SERVING)])
def test_texts_over_an_axis_are_those_of_transformers(family, axis):
    if axis not in axes_of(family)[1].split():
        pytest.skip(f"{axis} cannot split the serving of {family}")
    model, golden = mw.load(FOLDER / family, on="cpu:2", mesh=f"{axis}=2"), np.load(FOLDER / family / "golden.npz")
    prompts = [row[:length].tolist() for row, length in zip(golden["tokens"], golden["lengths"], strict=True)]
    texts = model.generate(prompts, max_tokens=golden["continuations"].shape[1])
    assert [text.tokens for text in texts] == [tuple(row) for row in golden["continuations"].tolist()]

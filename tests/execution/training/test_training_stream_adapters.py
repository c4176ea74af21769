"""Adapters of matmuls in the layout of the residual stream: of layers' own inputs, of the branch beside attention."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from test_training_qlora import losses_of, started, workload

import meshwright as mw
from meshwright.description.families.adapters import with_adapters
from meshwright.description.families.registry import PRESETS
from meshwright.description.step.parameter_tree import is_adapter, leaves
from meshwright.description.step.strategy import DEFAULT
from meshwright.execution.models.adapters import merge_adapters, merged_model
from meshwright.execution.models.forward import all_logits
from meshwright.mesh import MeshShape

INPUTS, BRANCH = ("per_layer_input_gate", "per_layer_projection"), ("linear_left", "linear_right")
SMALL = replace(PRESETS["tiny-gemma4-e2b"], num_kv_heads=4, mlp=96)
STREAMS = replace(PRESETS["tiny-gemma3n"], num_kv_heads=4, mlp=96)


@pytest.mark.parametrize(
    ("model", "targets", "options", "shape", "strategy"),
    [
        pytest.param(*case, marks=mark)
        for mark, *case in (
            (pytest.mark.matrix, SMALL, INPUTS, {}, MeshShape(dp=2, fsdp=2, tp=2), {}),
            (pytest.mark.exhaustive, SMALL, INPUTS, {"dora": True}, MeshShape(fsdp=4, tp=2), {}),
            (pytest.mark.matrix, STREAMS, BRANCH, {}, MeshShape(fsdp=2, sp=2, tp=2), {}),
            (pytest.mark.exhaustive, STREAMS, ("all-linear",), {}, MeshShape(fsdp=2, tp=2), {"zero_stage": 1}),
        )
    ],
    ids=lambda value: value.name if hasattr(value, "name") else None,
)
def test_steps_on_a_mesh_are_those_on_one_device_and_of_the_merged_weights(model, targets, options, shape, strategy):
    """After steps of SGD, whose updates are no signs of gradients near zero."""
    model = with_adapters(model, rank=4, targets=targets, **options)
    work, plain = workload(model), replace(DEFAULT, optimizer="sgd")
    one, alone = started(work, MeshShape(), plain)
    with jax.set_mesh(one):
        wanted, after = losses_of(alone, work, MeshShape(), plain, one)
        merged = jax.jit(lambda params: merge_adapters(params, model))(after["params"])
        tokens, lengths = np.arange(64, dtype=np.int32).reshape(2, 32), np.full(2, 32)
        scores = (
            all_logits(params, tokens, lengths, config, MeshShape(), np.float32)
            for params, config in ((after["params"], model), (merged, merged_model(model)))
        )
        np.testing.assert_allclose(*map(np.asarray, scores), rtol=1e-4, atol=1e-4)
    strategy = replace(plain, **strategy)
    mesh, state = started(work, shape, strategy)
    with jax.set_mesh(mesh):
        found, state = losses_of(state, work, shape, strategy, mesh)
    assert len(set(np.round(wanted, 3))) == 3
    np.testing.assert_allclose(found, wanted, rtol=5e-6)
    for (path, ours), (_, own) in zip(leaves(state["params"]), leaves(after["params"]), strict=True):
        if is_adapter(path):
            exact = np.asarray(own)
            assert exact.any(), path
            np.testing.assert_allclose(np.asarray(ours), exact, rtol=1e-3, atol=1e-4 * abs(exact).max(), err_msg=path)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "mesh"),
    [(SMALL, "dp=2,fsdp=2,tp=2"), (STREAMS, "fsdp=4,tp=2")],
    ids=lambda each: getattr(each, "name", each),
)
def test_a_step_is_as_planned(model, mesh):
    found = mw.verify(with_adapters(model, rank=4), on="cpu:8", batch=16, seq_len=64, mesh=mesh)
    exact = [row for row in found.rows if row.unit in ("flop", "B") and not row.quantity.startswith("memory")]
    assert all(row.is_equal for row in exact)
    assert all(row.is_equal for row in found.rows if row.quantity == "memory arguments")

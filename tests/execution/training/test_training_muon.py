"""Muon's update on one device is Optax's; on meshes `test_runtime_kit.py` holds it to one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.model import Experts
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.passes.muon import matrix_counts, matrix_of
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.execution.training.update.transformation import transformation
from meshwright.mesh import MeshShape
from meshwright.planning.cost.flops import step_flops, update_flops
from meshwright.planning.cost.memory import step_memory
from meshwright.planning.plan import make_plan

MODEL = replace(PRESETS["tiny"], embed=16, mlp=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab=32)
MOE = replace(MODEL, experts=Experts(count=4, num_active=2, mlp=8))
MUON = Strategy(optimizer="muon")


def workload(model, dtype="f32"):
    return Workload(model=model, batch=8, seq_len=16, compute_dtype=dtype)


@pytest.mark.parametrize("model", [MODEL, pytest.param(MOE, marks=pytest.mark.matrix)], ids=["dense", "moe"])
def test_an_update_is_that_of_optax(model):
    """Of matrices `optax.contrib.scale_by_muon` with the same dims as rows, of the rest Adam."""
    optimizer = Optimizer(learning_rate=0.1, warmup_steps=0, schedule="constant", weight_decay=0.2)
    declared = dict(leaves(parameters(model)))
    matrices = {path: found for path, parameter in declared.items() if (found := matrix_of(parameter))}
    assert {path for path in declared if path not in matrices} == {
        path for path in declared if "norm" in path or path in ("embedding", "unembedding")
    }
    dims = {
        path: MuonDimensionNumbers(
            tuple(range(found.num_stacked, found.num_stacked + found.num_rows)),
            tuple(range(found.num_stacked + found.num_rows, len(declared[path].shape))),
        )
        for path, found in matrices.items()
    }
    theirs = {
        "matrix": scale_by_muon(weight_dimension_numbers=dims, beta=optimizer.momentum),
        "rest": optax.scale_by_adam(optimizer.b1, optimizer.b2, optimizer.eps),
    }
    rng = np.random.default_rng(0)
    params = {path: jnp.asarray(rng.normal(size=each.shape), jnp.float32) for path, each in declared.items()}
    parts = {"matrix": {p: params[p] for p in matrices}, "rest": {p: params[p] for p in params if p not in matrices}}
    with jax.numpy_dtype_promotion("standard"), jax.set_mesh(build_mesh(MeshShape(), jax.devices()[:1])):
        rule = transformation(optimizer, workload(model), ShardingContext(MeshShape()), MUON)
        state = rule.init(params)
        states = {kind: theirs[kind].init(part) for kind, part in parts.items()}
        for _ in range(3):
            gradients = {path: jnp.asarray(rng.normal(size=each.shape), jnp.float32) for path, each in declared.items()}
            ours, state = rule.update(gradients, state, params)
            for kind, part in parts.items():
                found, states[kind] = theirs[kind].update({path: gradients[path] for path in part}, states[kind], part)
                for path, update in found.items():
                    decay = 0.2 * params[path] if optimizer.decays(path) else 0.0
                    sizes = matrices[path].sizes(declared[path].shape) if kind == "matrix" else ()
                    wanted = -0.1 * (update * (0.2 * np.sqrt(max(sizes)) if sizes else 1.0) + decay)
                    np.testing.assert_allclose(ours[path], wanted, rtol=2e-4, atol=2e-5, err_msg=path)


def test_updates_are_nearly_orthogonal_and_of_the_size_that_adamws_have():
    declared = dict(leaves(parameters(MODEL)))
    rng = np.random.default_rng(0)
    gradients = {path: jnp.asarray(rng.normal(size=each.shape), jnp.float32) for path, each in declared.items()}
    optimizer = Optimizer(learning_rate=1.0, warmup_steps=0, schedule="constant", weight_decay=0.0)
    rule = transformation(optimizer, workload(MODEL), ShardingContext(MeshShape()), MUON)
    updates, _ = rule.update(gradients, rule.init(gradients), gradients)
    for path in ("layers.query", "layers.output", "layers.up", "layers.down"):
        matrix = matrix_of(declared[path])
        rows, columns = matrix.sizes(declared[path].shape)
        each = np.asarray(updates[path]).reshape(-1, rows, columns)
        values = np.linalg.svd(each, compute_uv=False) / (0.2 * np.sqrt(max(rows, columns)))
        assert values.min() > 0.3
        assert values.max() < 1.3
        assert 0.1 < np.sqrt(np.mean(each**2)) < 0.3


def test_matrices_are_dealt_out_to_all_devices():
    """Of 2 layers each of 8 devices takes one, zeros for six; of 2 layers of 4 experts each takes one too."""
    mesh = MeshShape(dp=2, fsdp=2, tp=2)
    assert matrix_counts(MODEL, mesh, MUON) == {"matrices of layers": 8}
    counts = matrix_counts(MOE, MeshShape(ep=2, fsdp=2, tp=2), MUON)
    assert counts == {"matrices of layers": 8, "matrices of layers and experts": 8}
    sizes = [(16, 32), (16, 16), (16, 16), (16, 32), (16, 24), (16, 24), (16, 24)]
    flops = sum(5 * (4 * m * m * n + 2 * m**3) for m, n in sizes)
    assert update_flops(workload(MODEL), mesh, MUON) == flops
    assert update_flops(workload(MODEL), MeshShape(), MUON) == 2 * flops
    assert step_flops(workload(MODEL), mesh, MUON).total - step_flops(workload(MODEL), mesh).total == flops


def test_a_plan_with_muon_has_its_states_its_time_and_its_memory():
    big = Workload(model=PRESETS["llama3-8b"], batch=64, seq_len=4096)
    mesh, system = MeshShape(fsdp=16, tp=4), parse_system("v5p:4x4x4")
    adamw, muon = (make_plan(big, mesh, system, Strategy(optimizer=name)).predicted for name in ("adamw", "muon"))
    states = {name: step_memory(big, mesh, Strategy(optimizer=name))["optimizer"] for name in ("adamw", "lion", "muon")}
    assert states["lion"] < states["muon"] < 0.6 * states["adamw"]
    assert muon.breakdown_seconds["update"] > adamw.breakdown_seconds["update"]
    assert muon.flops > adamw.flops
    moved = {(move.kind, move.axes) for move in muon.collectives if move.phase == "update"}
    assert {("all-to-all", ("fsdp",)), ("all-to-all", ("tp",))} <= moved

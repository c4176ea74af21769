"""The decoder in the stages of a pipeline, beyond the rows of the kit: packed documents, and what is refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.legality import check_runnable
from meshwright.description.step.model import AttentionConfig
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.strategy import Strategy
from meshwright.errors import MeshwrightError
from meshwright.execution.models.decoder import loss_and_load
from meshwright.execution.models.pipelined import staged_loss_and_load
from meshwright.execution.runtime.arrays import initialise
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.mesh import MeshShape

MODEL = replace(PRESETS["tiny"], num_layers=4, embed=32, mlp=64, num_heads=4, num_kv_heads=2, head_dim=8, vocab=64)
GPIPE, ALTERNATING = Strategy(num_microbatches=4, schedule="gpipe"), Strategy(num_microbatches=4)
TEXT = np.random.default_rng(0).integers(0, MODEL.vocab, (16, 17))
BATCH = {"tokens": TEXT[:, :-1], "targets": TEXT[:, 1:]}


def packed():
    """The batch, each row two documents whose lengths differ from row to row."""
    place, lengths = np.arange(16)[None], np.random.default_rng(1).integers(3, 13, (16, 1))
    segments = (place >= lengths).astype(np.int32)
    return BATCH | {"positions": (place - lengths * segments).astype(np.int32), "segments": segments}


def loss_and_gradients(shape, run, batch, model=MODEL):
    """Loss and gradients of one batch in float32, the arrays whole."""
    mesh, layout = build_mesh(shape, jax.devices()[: shape.num_devices]), ShardingContext(shape)
    with jax.set_mesh(mesh):
        params = initialise(parameters(model), jax.random.key(0), mesh, layout, "f32")
        batch = jax.device_put(batch, jax.sharding.NamedSharding(mesh, layout.spec("batch", "sequence")))
        step = jax.jit(jax.value_and_grad(lambda params: run(params, batch, model, layout)))
        value, gradients = jax.block_until_ready(step(params))
    return float(value), jax.tree.map(np.asarray, gradients)


def staged(strategy, remat):
    """The loss in stages, to be given to `loss_and_gradients`."""

    def run(*given):
        return staged_loss_and_load(*given, strategy=strategy, dtype=jnp.float32, remat=remat)[0]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "schedule"),
    [
        (MeshShape(pp=4, dp=2), "1f1b"),
        pytest.param(MeshShape(pp=2, sp=2), "gpipe", marks=pytest.mark.matrix),
    ],
)
def test_documents_packed_in_a_row_stay_apart_in_stages(shape, schedule):
    check_equal(MODEL, shape, Strategy(num_microbatches=8, schedule=schedule, attention="flash", sp_method="ring"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "schedule"),
    [
        (MeshShape(pp=2), "gpipe"),
        pytest.param(MeshShape(pp=2, tp=2), "1f1b", marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_stages_whose_layers_differ_in_windows_run_a_fused_kernel_in_branches(shape, schedule, is_chunked):
    windows = AttentionConfig(windows=(5, 5, None), is_chunked=is_chunked)
    strategy = Strategy(num_microbatches=2, schedule=schedule, attention="flash")
    check_equal(replace(MODEL, attention=windows), shape, strategy)


def check_equal(model, shape, strategy):
    """The loss and every gradient of packed documents are those of one device."""
    found = loss_and_gradients(shape, staged(strategy, "block"), packed(), model)

    def whole(*given):
        return loss_and_load(*given, dtype=jnp.float32, remat="none", strategy=Strategy(attention="flash"))[0]

    wanted = loss_and_gradients(MeshShape(), whole, packed(), model)
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for (path, one), (_, other) in zip(leaves(found[1]), leaves(wanted[1]), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other), path


def test_what_does_not_run_as_stages_is_one_clear_error():
    with pytest.raises(MeshwrightError, match=r"ZeRO-2 on pp=4 stages .*, which is ZeRO-1; use zero_stage 1, or 3"):
        check_runnable(MODEL, MeshShape(pp=4), replace(GPIPE, zero_stage=2))


@pytest.mark.parametrize(
    ("strategy", "remat", "message"),
    [
        (replace(GPIPE, num_microbatches=3), "block", r"batch 16 cannot be cut into 3 microbatches on 1 shards"),
        (ALTERNATING, "none", "remat none can be planned with the schedule 1f1b, but what runs keeps with it block"),
        (GPIPE, "offload", "remat offload can be planned with the schedule gpipe"),
    ],
)
def test_a_batch_or_remat_that_stages_cannot_have_is_one_clear_error(strategy, remat, message):
    with pytest.raises(MeshwrightError, match=message):
        loss_and_gradients(MeshShape(pp=2), staged(strategy, remat), BATCH)

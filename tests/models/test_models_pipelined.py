"""The decoder's layers as the stages of a pipeline: the same loss and gradients, and the permutes that are planned."""

from collections import Counter
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.compiled import read_hlo
from meshwright.errors import MeshwrightError
from meshwright.hardware import parse_system
from meshwright.mesh import MeshShape
from meshwright.models import loss, staged_loss_and_load
from meshwright.parallel import Layout, build_mesh, initialise
from meshwright.planner import predict
from meshwright.training import Optimizer, initial_state, lower_train_step, train_step
from meshwright.workload import PRESETS, Strategy, Workload, check_runnable, leaves, parameters

MODEL = replace(PRESETS["tiny"], num_layers=4, embed=32, mlp=64, num_heads=4, num_kv_heads=2, head_dim=8, vocab=64)
TIED = replace(MODEL, tied_embeddings=True)
TEXT = np.random.default_rng(0).integers(0, MODEL.vocab, (16, 17))
GPIPE, ALTERNATING = Strategy(num_microbatches=4, schedule="gpipe"), Strategy(num_microbatches=4)


def loss_and_gradients(model, shape, run):
    """Loss and gradients of one batch in float32, the arrays whole."""
    mesh, layout = build_mesh(shape, jax.devices()[: shape.num_devices]), Layout(shape)
    with jax.set_mesh(mesh):
        params = initialise(parameters(model), jax.random.key(0), mesh, layout, "f32")
        place = layout.spec("batch", "sequence")
        batch = {"tokens": jax.device_put(TEXT[:, :-1], place), "targets": jax.device_put(TEXT[:, 1:], place)}
        step = jax.jit(jax.value_and_grad(lambda params: run(params, batch, model, layout)))
        value, gradients = jax.block_until_ready(step(params))
    return float(value), jax.tree.map(np.asarray, gradients)


@pytest.fixture(scope="module")
def alone():
    """Loss and gradients on one device, of the untied and of the tied model."""

    def whole(*given):
        return loss(*given, dtype=jnp.float32, remat="none")

    return {model: loss_and_gradients(model, MeshShape(), whole) for model in (MODEL, TIED)}


CASES = [
    (MODEL, MeshShape(pp=2), ALTERNATING, "block"),
    (MODEL, MeshShape(pp=4), GPIPE, "matmuls"),
    (MODEL, MeshShape(pp=4, dp=2), ALTERNATING, "block"),
    (MODEL, MeshShape(pp=2, fsdp=2, tp=2), ALTERNATING, "block"),
    (TIED, MeshShape(pp=2, fsdp=2, tp=2), GPIPE, "none"),
    (TIED, MeshShape(pp=2, sp=2, tp=2), replace(ALTERNATING, num_microbatches=16), "block"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "shape", "strategy", "remat"), CASES)
def test_stages_change_neither_loss_nor_gradients(model, shape, strategy, remat, alone):
    def staged(*given):
        return staged_loss_and_load(*given, strategy=strategy, dtype=jnp.float32, remat=remat)[0]

    found, wanted = loss_and_gradients(model, shape, staged), alone[model]
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for (path, one), (_, other) in zip(leaves(found[1]), leaves(wanted[1]), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other), path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "strategy"), [(MeshShape(pp=2, fsdp=2, tp=2), GPIPE), (MeshShape(pp=4, tp=2), ALTERNATING)]
)
def test_the_train_step_has_the_planned_permutes(shape, strategy):
    workload, ticks = Workload(model=MODEL, batch=16, seq_len=16, compute_dtype="f32"), 4 + shape.pp - 1
    lowered = lower_train_step(build_mesh(shape), workload=asdict(workload), strategy=asdict(strategy))
    compiled = read_hlo(lowered.compile().as_text() or "", shape.layout, hardware="cpu:8").collectives
    counts, sizes = ({source: Counter() for source in ("planned", "compiled")} for _ in range(2))
    for source, moves in (
        ("planned", predict(workload, shape, parse_system("cpu:8"), strategy).collectives),
        ("compiled", compiled),
    ):
        for move in moves:
            if move.kind == "collective-permute":
                counts[source][move.axes, move.phase] += move.count
                sizes[source][move.axes, move.phase] += move.bytes
    both = dict.fromkeys([(("pp",), "forward"), (("pp",), "backward")], ticks)
    assert counts["compiled"] == counts["planned"] == both
    assert sizes["compiled"] == sizes["planned"]


@pytest.mark.slow
def test_training_over_stages_takes_the_steps_that_one_device_takes():
    workload, optimizer = Workload(model=MODEL, batch=16, seq_len=16, compute_dtype="f32"), Optimizer(warmup_steps=1)
    losses = {}
    for shape, strategy in ((MeshShape(), Strategy()), (MeshShape(pp=2, fsdp=2), ALTERNATING)):
        layout, mesh = Layout(shape), build_mesh(shape, jax.devices()[: shape.num_devices])
        with jax.set_mesh(mesh):
            state = initial_state(workload, layout, optimizer, mesh, seed=0)
            place = layout.spec("batch", "sequence")
            batch = {"tokens": jax.device_put(TEXT[:, :-1], place), "targets": jax.device_put(TEXT[:, 1:], place)}
            step = train_step(workload, layout, optimizer, strategy)
            for _ in range(3):
                state, metrics = step(state, batch)
                losses.setdefault(shape, []).append(metrics["loss"].item())
    one, staged = losses.values()
    assert staged == pytest.approx(one, rel=1e-4)
    assert one[-1] < one[0]


@pytest.mark.parametrize(
    ("model", "shape", "strategy", "message"),
    [
        (replace(MODEL, num_layers=5), MeshShape(pp=2), ALTERNATING, r"pp=2 cannot split layers of .*=5: 5 % 2 = 1"),
        (replace(MODEL, vocab=66), MeshShape(pp=4), GPIPE, r"pp=4 cannot split vocab of embedding=66: 66 % 4 = 2"),
        (MODEL, MeshShape(pp=2), replace(GPIPE, virtual_stages=2), "2 virtual stages can be planned"),
    ],
)
def test_what_does_not_run_as_stages_is_one_clear_error(model, shape, strategy, message):
    with pytest.raises(MeshwrightError, match=message):
        check_runnable(model, shape, strategy)


@pytest.mark.parametrize(
    ("strategy", "remat", "message"),
    [
        (replace(GPIPE, num_microbatches=3), "block", r"batch 16 cannot be cut into 3 microbatches on 1 shards"),
        (ALTERNATING, "none", "remat none can be planned with the schedule 1f1b, but what runs keeps with it block"),
        (GPIPE, "offload", "remat offload can be planned with the schedule gpipe"),
    ],
)
def test_a_batch_or_remat_that_stages_cannot_have_is_one_clear_error(strategy, remat, message):
    shape = MeshShape(pp=2)

    def staged(*given):
        return staged_loss_and_load(*given, strategy=strategy, dtype=jnp.float32, remat=remat)[0]

    with pytest.raises(MeshwrightError, match=message):
        loss_and_gradients(MODEL, shape, staged)

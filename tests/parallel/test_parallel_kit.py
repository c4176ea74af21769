"""The correctness kit: a row is a way to train, and is held to one device, to its plan and to the compiler.

To add a way to train, add a row to `ROWS`: at most 8 devices, a batch of 16 sequences of 16 tokens. What it is held to
is `Row`'s to say.
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace

import jax
import numpy as np
import pytest

from meshwright.compiled import in_plans_terms, read_hlo
from meshwright.hardware import parse_system
from meshwright.mesh import MeshShape
from meshwright.parallel import Layout, build_mesh
from meshwright.planner import predict
from meshwright.training import Optimizer, initial_state, lower_train_step, train_step
from meshwright.training.gradients import loss_and_gradients
from meshwright.workload import DEFAULT, PRESETS, ModelConfig, Strategy, Workload, leaves, rules_of

TINY = replace(PRESETS["tiny"], embed=64, mlp=128, num_heads=4, num_kv_heads=4, head_dim=16)
TIED = replace(TINY, tied_embeddings=True)
WIDE = replace(TINY, embed=128)
"""Adafactor factors its second moments of dims from 128 on."""


@dataclass(frozen=True)
class Row:
    """A way to train, in float32: on a mesh, by a strategy, a model.

    Held to one device with the same optimizer and nothing else of the strategy: the loss, each gradient to 1e-5 of its
    norm, three steps' losses, and each parameter to a thousandth of how far they move it. Held to its plan: the bytes
    of each kind, axes and phase of collective in the program that XLA:CPU makes.
    """

    mesh: MeshShape
    strategy: Strategy = DEFAULT
    model: ModelConfig = TINY

    def __str__(self) -> str:
        changed = {k: v for k, v in asdict(self.strategy).items() if v != getattr(DEFAULT, k)}
        said = ",".join(f"{k}={v}" for k, v in changed.items())
        return "-".join(filter(None, (str(self.mesh), said, "tied" * self.model.tied_embeddings)))

    @property
    def workload(self) -> Workload:
        return Workload(model=self.model, batch=16, seq_len=16, compute_dtype="f32")


ROWS = [
    Row(MeshShape(fsdp=2), Strategy(num_microbatches=4)),
    Row(MeshShape(dp=2, fsdp=2, tp=2), Strategy(num_microbatches=2)),
    Row(MeshShape(dp=2, sp=2, tp=2), Strategy(num_microbatches=4), TIED),
    Row(MeshShape(dp=2, fsdp=4), Strategy(zero_stage=0)),
    Row(MeshShape(dp=2, fsdp=2, tp=2), Strategy(zero_stage=1)),
    Row(MeshShape(dp=2, fsdp=2, tp=2), Strategy(zero_stage=1, num_microbatches=2)),
    Row(MeshShape(dp=2, fsdp=2, sp=2), Strategy(zero_stage=2), TIED),
    Row(MeshShape(dp=2, fsdp=2, tp=2), Strategy(zero_stage=2, num_microbatches=4)),
    Row(MeshShape(fsdp=2, tp=2), Strategy(optimizer="lion")),
    Row(MeshShape(fsdp=2, tp=2), Strategy(optimizer="adafactor"), WIDE),
    Row(MeshShape(fsdp=2, tp=2), Strategy(optimizer="sgd", zero_stage=1)),
]


def prepared(row):
    """Mesh, layout and batch of a row."""
    shape = row.mesh
    mesh, layout = build_mesh(shape, jax.devices()[: shape.num_devices]), Layout(shape, rules_of(row.strategy))
    text = np.random.default_rng(0).integers(0, row.model.vocab, (row.workload.batch, row.workload.seq_len + 1))
    place = jax.sharding.NamedSharding(mesh, layout.spec("batch", "sequence"))
    batch = {"tokens": jax.device_put(text[:, :-1], place), "targets": jax.device_put(text[:, 1:], place)}
    return mesh, layout, batch


def run(row):
    """What a row makes: the first loss and gradients, the losses of three steps, and all parameters, arrays whole."""
    mesh, layout, batch = prepared(row)
    optimizer = Optimizer(warmup_steps=1, decay_steps=10)
    with jax.set_mesh(mesh):
        state = initial_state(row.workload, layout, optimizer, mesh, row.strategy, seed=0)
        found = jax.jit(lambda params: loss_and_gradients(params, batch, row.workload, layout, row.strategy))
        (value, _), gradients = jax.tree.map(np.asarray, found(state["params"]))
        first, losses = jax.tree.map(np.asarray, state["params"]), []
        step = train_step(row.workload, layout, optimizer, row.strategy)
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"].item())
    return float(value), gradients, losses, first, jax.tree.map(np.asarray, state["params"])


ALONE = {}


def alone(row):
    """What one device makes of a row's model with its optimizer, the batch whole."""
    strategy = Strategy(optimizer=row.strategy.optimizer)
    key = row.model, strategy
    if key not in ALONE:
        ALONE[key] = run(replace(row, mesh=MeshShape(), strategy=strategy))
    return ALONE[key]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_way_to_train_is_equal_to_one_device(row):
    value, gradients, losses, first, last = run(row)
    wanted = alone(row)
    assert value == pytest.approx(wanted[0], rel=1e-6)
    for (path, one), (_, other) in zip(leaves(gradients), leaves(wanted[1]), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other), path
    assert losses == pytest.approx(wanted[2], rel=1e-5)
    for (path, begun), (_, one), (_, other) in zip(leaves(first), leaves(last), leaves(wanted[4]), strict=True):
        moved = np.linalg.norm(other - begun)
        assert moved > 0, path
        assert np.linalg.norm(one - other) <= 1e-3 * moved, path


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.strategy.optimizer == "adamw"], ids=str)
def test_a_way_to_train_moves_what_is_planned(row):
    mesh, _, _ = prepared(row)
    lowered = lower_train_step(mesh, workload=asdict(row.workload), strategy=asdict(row.strategy))
    hardware = f"cpu:{row.mesh.num_devices}"
    compiled = in_plans_terms(read_hlo(lowered.compile().as_text() or "", row.mesh.layout, hardware=hardware))
    planned = predict(row.workload, row.mesh, parse_system(hardware), row.strategy)
    assert amounts(compiled) == amounts(planned)


def amounts(record):
    """The bytes of collectives by kind, axes and phase."""
    found = Counter()
    for move in record.collectives:
        found[move.kind, move.axes, move.phase] += move.bytes
    return found

"""The correctness kit: every row of the table in `kit_rows.py` is held to one device, its plan and the compiler.

A row is compiled once, for all that is checked of it. What one device makes is computed once in a session: it is in the
session's folder, where the other worker finds it too.
"""

import fcntl
import hashlib
import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_versions import COMBINES_AS_STORED
from kit_rows import DELTA, FAMILIES, FINE_TUNING, LLAMA4, REPEATED, ROWS, WITHOUT_DROPOUT, Row, covering

from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.records import read_hlo
from meshwright.description.step.legality import check_runnable
from meshwright.description.step.model import LearnedPositions
from meshwright.description.step.parameter_tree import CHOICE_BIAS, LAYER_SCALE, is_adapter, leaves, map_leaves
from meshwright.description.step.rules import rules_of
from meshwright.execution.models.decoder import loss_and_load
from meshwright.execution.runtime.arrays import fit
from meshwright.execution.runtime.attention.sequence import token_order
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.slots import layer_of_slots
from meshwright.execution.training.step import abstract_state, initial_state, train_step
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.execution.training.update.skipping import NORM_LIMIT
from meshwright.mesh import MeshShape
from meshwright.planning.cost.arguments import argument_bytes
from meshwright.planning.plan import make_plan
from meshwright.proof.verification.comparison import compare, in_plans_terms
from meshwright.proof.verification.differences import Difference
from meshwright.proof.verification.plans import static_overhead
from meshwright.record import Record

sys.path.insert(0, str(Path(__file__).parents[2] / "predictions"))
from records import KIT, read

OPTIMIZER = Optimizer(warmup_steps=1, decay_steps=10, first_rate=0.0)


@dataclass(frozen=True)
class Ran:
    """Three steps of a row: their metrics, the parameters before and after in the model's order, the compiled program.

    gradients: those of the first step, clipped and times a constant, as the first moments that start at zero have them;
    None of an optimizer without.
    """

    metrics: list[dict[str, float]]
    gradients: Mapping[str, Any] | None
    first: Mapping[str, Any]
    last: Mapping[str, Any]
    hlo: str
    argument_bytes: int


def run(row: Row, drawn: Mapping[str, Any]) -> Ran:
    """A row's train step from the state that one device draws, compiled once and run on one batch."""
    check_runnable(row.model, row.mesh, row.strategy)
    mesh = build_mesh(row.mesh, jax.devices()[: row.mesh.num_devices])
    layout = ShardingContext(row.mesh, rules_of(row.strategy))
    layers = layer_of_slots(row.model, layout, row.strategy) if row.mesh.pp > 1 else None
    metrics, gradients = [], None
    with jax.set_mesh(mesh):
        wanted = abstract_state(row.workload, layout, OPTIMIZER, mesh, row.strategy)
        state = jax.tree.map(
            lambda array, to: jax.device_put(fit(array, to.shape), to.sharding),
            in_slots(drawn, layers),
            wanted,
        )
        tokens = jax.sharding.NamedSharding(mesh, layout.spec("batch", "sequence"))
        batch = jax.device_put(text(row, layout), tokens)
        if row.strategy.dropout or row.workload.lora_dropout:
            whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            batch["draws"] = jax.device_put(np.array([0, 1], np.uint32), whole)
        if row.strategy.on_bad_step == "skip":
            whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            batch[NORM_LIMIT] = jax.device_put(np.float32(np.inf), whole)
        step = train_step(row.workload, layout, OPTIMIZER, row.strategy).lower(state, batch).compile()
        for _ in range(3):
            state, found = step(state, batch)
            assert not found.pop("skipped", False)
            metrics.append({name: value.item() for name, value in found.items()})
            if len(metrics) == 1:
                moments = in_order(optax.tree_utils.tree_get(state["optimizer"], "mu"), layers)
                gradients = without_padding(moments, drawn["params"])
    memory = step.memory_analysis()
    assert memory is not None
    # Of a moment that Adafactor does not keep one element is there, which nothing reads and no program takes.
    unread = sum(leaf.nbytes for leaf in jax.tree.leaves(state["optimizer"]) if leaf.shape == (1,))
    return Ran(
        metrics=metrics,
        gradients=gradients,
        first=drawn["params"],
        last=without_padding(in_order(state["params"], layers), drawn["params"]),
        hlo=step.as_text() or "",
        argument_bytes=memory.argument_size_in_bytes + unread,
    )


Slots = tuple[int | None, ...] | None
"""The layer in each slot of a pipeline; None where layers lie in their order."""


def in_slots(tree: Any, layers: Slots) -> Any:
    """Arrays in the model's order as the slots of a pipeline have them, empty ones zeros."""

    def one(path: Any, array: np.ndarray) -> np.ndarray:
        if layers is None or not is_of_layers(path):
            return array
        return np.stack([array[0] * 0 if layer is None else array[layer] for layer in layers])

    return jax.tree.map_with_path(one, tree)


def without_padding(tree: Any, drawn: Mapping[str, Any]) -> Any:
    """Arrays as the model declares them: padding must be zero to the bit, and copies of a head equal."""
    shapes = {path: array.shape for path, array in leaves(drawn)}

    def one(path: str, array: np.ndarray) -> np.ndarray:
        kept = fit(array, shapes[path])
        assert np.array_equal(fit(kept, array.shape), array), path
        return kept

    return None if tree is None else map_leaves(one, tree)  # SGD without momentum has no moments.


def in_order(tree: Any, layers: Slots) -> Any:
    """The way back, to arrays that are whole."""

    def one(path: Any, array: jax.Array) -> np.ndarray:
        if layers is None or not is_of_layers(path):
            return np.asarray(array)
        places = {layer: slot for slot, layer in enumerate(layers) if layer is not None}
        return np.asarray(array)[[places[layer] for layer in sorted(places)]]

    return jax.tree.map_with_path(one, tree)


def is_of_layers(path: Any) -> bool:
    """Whether a leaf of a state belongs to layers of one kind (`layers`), or of several that alternate (`layers_0`)."""
    return re.search(r"\['layers(_\d+)?'\]", jax.tree_util.keystr(path)) is not None


def start(row: Row) -> dict[str, Any]:
    """The state that one device draws, which every mesh draws to the bit (`test_training_strategy.py`).

    Adapters are as they are after some training: where one of A and B is zero the other has no gradient.
    """
    mesh, layout = build_mesh(row.mesh, jax.devices()[:1]), ShardingContext(row.mesh)
    with jax.set_mesh(mesh):
        state = jax.tree.map(np.asarray, initial_state(row.workload, layout, OPTIMIZER, mesh, row.strategy, seed=0))
    generator = np.random.default_rng(1)

    def trained(path: str, array: np.ndarray) -> np.ndarray:
        is_zero = is_adapter(path) and not array.any()
        return 0.1 * generator.standard_normal(array.shape, np.float32) if is_zero else array

    return state | {"params": map_leaves(trained, state["params"])}


def text(row: Row, layout: ShardingContext) -> dict[str, np.ndarray]:
    """A batch of a row, its tokens in the order in which the strategy has them lie."""
    shape = row.workload.batch, row.workload.seq_len
    tokens = np.random.default_rng(0).integers(0, row.model.vocab, (shape[0], shape[1] + 1), dtype=np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    order = token_order(shape[1], layout, row.strategy)
    if row.packed:
        batch |= documents(shape)
    elif order is not None:
        batch["positions"] = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return batch if order is None else {name: array[:, order] for name, array in batch.items()}


def documents(shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Two documents in each row, of other lengths in each, and padding; a quarter of the targets count for nothing."""
    place, draw = np.arange(shape[1])[None], np.random.default_rng(1)
    first, second = draw.integers(3, 13, (shape[0], 1)), draw.integers(5, 19, (shape[0], 1))
    starts = np.where(place < first, 0, np.where(place < first + second, first, first + second))
    segments = np.where(place < first, 1, np.where(place < first + second, 2, 0))
    weights = (segments > 0) * (draw.random(shape) > 0.25)
    return {
        "positions": (place - starts).astype(np.int32),
        "segments": segments.astype(np.int32),
        "weights": (weights / weights.mean()).astype(np.float32),
    }


@dataclass(frozen=True)
class Alone:
    """What one device draws and makes, from a folder that the workers of a session share."""

    folder: Path

    @cache  # noqa: B019
    def start(self, row: Row) -> dict[str, Any]:
        """The state that it draws."""
        return self._once("start", row, lambda: start(row))

    @cache  # noqa: B019
    def run(self, row: Row) -> Ran:
        """Its steps."""
        return self._once("run", row, lambda: run(row, self.start(row)))

    def _once(self, what: str, row: Row, compute: Callable[[], Any]) -> Any:
        path = self.folder / f"{what}_{hashlib.sha256(repr(row).encode()).hexdigest()}"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_bytes(pickle.dumps(compute()))
        return pickle.loads(path.read_bytes())


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The results of one device."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "kit_alone"
    folder.mkdir(exist_ok=True)
    return Alone(folder)


EVERY = (*ROWS, *WITHOUT_DROPOUT, *REPEATED, *FAMILIES, *FINE_TUNING)
COVERING = {id(row) for row in covering(EVERY)}
MARKS = {True: [], False: [pytest.mark.matrix]}
PARAMS = [
    pytest.param(row, marks=MARKS[row.core] if id(row) in COVERING else [pytest.mark.exhaustive]) for row in EVERY
]
"""`make exhaustive` trains those whose mechanisms other rows have too."""


SLOW = {("dropout", 0.2), ("optimizer", "adafactor"), ("virtual_stages", 2)}
"""What only rows of `make matrix` have: the cheapest of each takes 7 s and more."""


def test_the_core_rows_have_everything_that_any_row_has():
    """Numbers of devices, mesh axes, policies, and fields of strategies; pairs of them are for `make exhaustive`."""

    def parts(rows: list[Row]) -> set[Any]:
        found: set[Any] = set()
        for row in rows:
            found |= {row.mesh.num_devices, row.remat, row.packed, row.z_loss > 0, row.model.experts is not None}
            found |= {axis for axis, degree in row.mesh.degrees.items() if degree > 1}
            found |= {(name, value) for name, value in vars(row.strategy).items() if name != "num_microbatches"}
            found |= {("microbatches", row.strategy.num_microbatches > 1, row.mesh.pp > 1)}
        return found

    assert parts([row for row in ROWS if row.core]) == parts(ROWS) - SLOW


COMPILED = {entry["row"]: entry["compiled"] for entry in read(KIT)}
"""What `tests/predictions/make_kit.py` has stored of the programs of `ROWS`."""


@pytest.mark.slow
@pytest.mark.parametrize("row", PARAMS, ids=str)
def test_a_way_to_train_is_equal_to_one_device_and_as_planned(row, alone):
    """Compiled once: what it computes, what it moves, and that the stored record of it is what the compiler makes."""
    found = run(row, alone.start(row.alone))
    check_equal(row, found, alone.run(row.alone))
    hardware = f"cpu:{row.mesh.num_devices}"
    compiled = in_plans_terms(read_hlo(found.hlo, row.mesh.layout, hardware=hardware))
    check_planned(row, found, compiled)
    if stored := COMPILED.get(str(row)):
        record = compiled.to_json()
        assert found.argument_bytes == stored["argument bytes"]
        assert record["flops"] == stored["record"]["flops"]
        assert moves(record) == moves(stored["record"])


def loss(row: Row, drawn: Mapping[str, Any]) -> float:
    """The loss of a row's batch before any step, forward alone."""
    mesh, layout = build_mesh(row.mesh, jax.devices()[: row.mesh.num_devices]), ShardingContext(row.mesh)
    with jax.set_mesh(mesh):
        wanted = abstract_state(row.workload, layout, OPTIMIZER, mesh, row.strategy)["params"]
        params = jax.tree.map(lambda array, to: jax.device_put(array, to.sharding), drawn["params"], wanted)
        batch = jax.device_put(text(row, layout), jax.NamedSharding(mesh, layout.spec("batch", "sequence")))
        forward = partial(loss_and_load, model=row.model, layout=layout, dtype=jnp.float32, remat="none")
        return jax.jit(forward)(params, batch)[0].item()


@pytest.mark.slow
@pytest.mark.parametrize("row", [Row(DELTA, MeshShape(sp=2, tp=2)), Row(LLAMA4, MeshShape(ep=2, tp=2))], ids=str)
def test_layers_of_several_kinds_have_the_loss_of_one_device_on_a_mesh(row, alone):
    """A forward pass compiles in a fifth of the time of a step; `make matrix` trains rows of these models."""
    drawn = alone.start(row.alone)
    assert loss(row, drawn) == pytest.approx(loss(row.alone, drawn), rel=1e-6)


def check_equal(row: Row, found: Ran, wanted: Ran) -> None:
    """The loss, each gradient to 1e-5 of its norm, and three steps: each parameter to a part in 200 of its way.

    First updates are signs of gradients: where these may be off by 1e-5 of their norm, as many signs may be others, and
    the updates off by the root of twice that.
    """
    for ours, theirs in zip(found.metrics, wanted.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert found.metrics[0]["loss"] == pytest.approx(wanted.metrics[0]["loss"], rel=1e-6)
    if wanted.gradients is not None:
        for path, one, other in pairs(found.gradients, wanted.gradients):
            if path in without_gradient(row):
                continue
            assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other), path
    before = dict(leaves(wanted.first))
    for path, one, other in pairs(found.last, wanted.last):
        if path in without_gradient(row):
            continue
        if path.endswith((CHOICE_BIAS, LAYER_SCALE)) or path in row.workload.frozen_paths:
            assert np.array_equal(one, before[path])
            continue
        moved = np.linalg.norm(other - before[path])
        assert moved > 0, path
        away = np.abs(one - other)
        if row.strategy.optimizer == "lion":
            # Every update is a sign: of a momentum that is zero to rounding either sign is right, and one of them in
            # 16,384 elements is more than the bound. All other elements keep it.
            either = away > 5e-3 * moved / np.sqrt(away.size)
            assert either.sum() <= away.size / 4000, path
            away = np.where(either, 0, away)
        assert np.linalg.norm(away) <= 5e-3 * moved, path


def check_planned(row: Row, found: Ran, compiled: Record) -> None:
    """Its arguments, its flops and its collectives by kind, axes and phase, to the byte and the flop.

    But for what is named: experts without a capacity have room for any routing, which XLA:CPU multiplies too, and the
    text of a pipeline's program has branches that few ticks take.
    """
    plan = make_plan(row.workload, row.mesh, parse_system(compiled.hardware), row.strategy)
    assert found.argument_bytes == argument_bytes(row.workload, row.mesh, row.strategy)
    known = {Difference.DROPLESS_PADDING, Difference.UNTAKEN_BRANCHES}
    overhead = static_overhead(plan)
    rows = compare(plan.predicted, compiled, argument_bytes=found.argument_bytes, overhead=overhead)
    judged = [row for row in rows if row.unit in ("flop", "B") and not row.quantity.startswith("memory")]
    assert [row for row in judged if not row.is_equal and not known & {cause.difference for cause in row.causes}] == []


def moves(record: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """What is compared of the collectives of a program."""
    names = ("kind", "phase", "bytes", "count") if COMBINES_AS_STORED else ("kind", "phase", "bytes")
    return [(*(move[name] for name in names), *move["axes"]) for move in record["collectives"]]


def without_gradient(row: Row) -> set[str]:
    """The parameters whose gradient is rounding alone: a bias of keys that are not rotated changes no softmax."""
    return {"layers.key_bias"} if row.model.biases.qkv and isinstance(row.model.positions, LearnedPositions) else set()


def pairs(found, wanted):
    """The path of each leaf, and both arrays."""
    for (path, one), (_, other) in zip(leaves(found), leaves(wanted), strict=True):
        yield path, one, other

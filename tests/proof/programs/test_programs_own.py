"""meshwright's own train step, traced like anybody's function, has the collectives that its declared plan predicts."""

from collections import Counter
from typing import Any

import jax
import pytest

import meshwright as mw
from meshwright.description.step.rules import rules_of
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.step import abstract_batch, abstract_state, train_step
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape
from meshwright.record import Record


def declared_and_traced(model: str, mesh: str, **options: Any) -> tuple[Record, Record]:
    """The records of a model's declared plan, and of the same layout of its step, traced on one device."""
    plan = mw.plan(model, mesh=mesh, attention="scores", **options)
    layout = ShardingContext(MeshShape(), rules_of(plan.strategy))
    one = build_mesh(layout.mesh, jax.devices()[:1])
    with jax.set_mesh(one):
        state = abstract_state(plan.workload, layout, Optimizer(), one, plan.strategy)
        batch = abstract_batch(plan.workload, layout, one, plan.strategy)
        step = train_step(plan.workload, layout, Optimizer(), plan.strategy)
        found = mw.plan(step, state, batch, on=options["on"], mesh=mesh, num_compiled=0)
    atoms = {each.name: each.atom for each in found.classes}
    wanted = {"dp": "batch", "fsdp": "batch", "tp": "up:2"}
    data = {atom for name, atom in atoms.items() if name.startswith(("batch", "tokens", "dim of"))}
    chosen = next(
        each.predicted
        for each in found.candidates
        if each.layout
        and all(atoms[wanted[axis.name]] in axis.atoms for axis in each.layout.axes)
        and all(axis.is_stored == (axis.name == "fsdp") for axis in each.layout.axes)
        and all(len({*axis.atoms} - data) > 3 for axis in each.layout.axes if axis.name == "tp")
        and all((axis.name == "tp") != (data >= {*axis.atoms}) for axis in each.layout.axes)
        and all(data.isdisjoint(axis.atoms) for axis in each.layout.axes if axis.name == "tp")
    )
    assert chosen is not None
    return plan.predicted, chosen


def sent(record: Record) -> Counter[str]:
    """The bytes of collectives by kind."""
    found = Counter[str]()
    for move in record.collectives:
        found[move.kind] += move.bytes
    return found


TINY = {"on": "v5e:2x4", "batch": 16, "seq_len": 128}
LARGE = {"on": "v5p:4x4x2", "batch": 64, "seq_len": 4096}


@pytest.mark.parametrize(
    ("model", "mesh", "options"),
    [
        ("tiny", "dp=8", TINY),
        ("tiny", "tp=8", TINY | {"tp_stream": "whole"}),
        ("tiny", "dp=2,tp=4", TINY | {"tp_stream": "whole"}),
    ],
)
def test_sums_of_our_own_step_are_its_plans_to_the_byte(model, mesh, options):
    declared, traced = declared_and_traced(model, mesh, **options)
    assert sent(declared) == sent(traced)
    # Norms are traced as matmuls of one row.
    assert traced.flops == pytest.approx(declared.flops, rel=4e-3)


@pytest.mark.parametrize(("model", "mesh", "options"), [("tiny", "fsdp=8", TINY), ("llama3-8b", "fsdp=32", LARGE)])
def test_gathers_of_our_own_step_are_its_plans_to_the_byte(model, mesh, options):
    """The declared plan keeps the scales of norms whole and sums their gradients; a traced step gathers them too."""
    declared, traced = declared_and_traced(model, mesh, **options)
    (scales,) = (move.bytes for move in declared.collectives if (move.kind, move.phase) == ("all-reduce", "backward"))
    width = 4 * {"tiny": 128, "llama3-8b": 4096}[model]
    ours, theirs = sent(declared), sent(traced)
    assert theirs["reduce-scatter"] == ours["reduce-scatter"] + scales
    # Forward all of them, and for the backward pass all but the last norm's.
    assert theirs["all-gather"] == ours["all-gather"] + 2 * scales - width
    # Three leaves are scales, of which the norm of all gradients sums the squares.
    assert theirs["all-reduce"] == ours["all-reduce"] - scales + 3 * 4


WHOLE_STREAM = LARGE | {"tp_stream": "whole"}


@pytest.mark.parametrize(
    ("model", "mesh", "options"),
    [
        ("llama3-8b", "fsdp=32", LARGE),
        pytest.param("llama3-8b", "fsdp=32", LARGE | {"remat": "block"}, marks=pytest.mark.matrix),
        pytest.param("llama3-8b", "fsdp=8,tp=4", WHOLE_STREAM, marks=pytest.mark.matrix),
        pytest.param("llama3-70b", "fsdp=64", LARGE | {"on": "v5p:4x4x4"}, marks=pytest.mark.matrix),
        pytest.param("llama2-7b", "fsdp=32", LARGE | {"on": "v4:4x4x2"}, marks=pytest.mark.matrix),
        pytest.param("llama3-8b", "fsdp=32", LARGE | {"on": "v5e:4x8"}, marks=pytest.mark.matrix),
        pytest.param("llama3-8b", "fsdp=32", LARGE | {"on": "v6e:4x8"}, marks=pytest.mark.matrix),
    ],
)
def test_our_own_step_takes_as_long_as_its_plan_says(model, mesh, options):
    declared, traced = declared_and_traced(model, mesh, **options)
    assert traced.step_seconds == pytest.approx(declared.step_seconds, rel=0.03)

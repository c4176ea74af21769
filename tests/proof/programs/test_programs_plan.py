"""Plans of other people's programs: the known strategies are found, and compile to what was predicted."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from foreign import Sizes, make_state, tokens, train_step
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.description.hardware.system import parse_system
from meshwright.errors import MeshwrightError
from meshwright.proof.programs.classes import classes_of
from meshwright.proof.programs.price import Priced
from meshwright.proof.programs.search import find_layouts, model_sets
from meshwright.proof.programs.trace import trace
from meshwright.proof.programs.work import work_of

STEP = jax.jit(train_step, donate_argnums=0)


@pytest.fixture(autouse=True)
def _of_other_people():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def priced(function, *args, on="cpu:8"):
    program = trace(function, *args)
    classes = classes_of(program)
    return Priced(program, work_of(program, is_tpu=False), parse_system(on)), classes


def abstract_state(**options):
    return jax.eval_shape(lambda key: make_state(key, **options), jax.random.key(0))


def test_heads_mlp_and_vocabulary_are_a_set_that_one_axis_splits():
    found, classes = priced(STEP, abstract_state(), tokens())
    names = {one.atom: one.name for one in classes}
    sets = [{names[atom] for atom in one} for one in model_sets(found, [one for one in classes if not one.barred])]
    assert {"up:2", "k:2", "out:1", "embed:0"} in sets
    assert {"dim of 24"} in sets  # the sequence
    assert not any({"batch", "up:2"} <= one for one in sets)


def test_scanned_layers_are_planned_like_layers_one_by_one():
    plans = [
        mw.plan(STEP, abstract_state(scanned=scanned), tokens(), on="v5e:2x4", num_compiled=0)
        for scanned in (True, False)
    ]
    one, other = plans
    assert one.mesh == other.mesh
    assert one.num_layouts == other.num_layouts
    assert one.predicted.flops == other.predicted.flops
    sent = [[(move.kind, move.axes, move.bytes, move.count) for move in each.predicted.collectives] for each in plans]
    assert sent[0] == sent[1]


def renamed(tree, name):
    """A tree with other keys in its dicts, which JAX flattens in the order of the keys."""
    if isinstance(tree, dict):
        return {name(key): renamed(one, name) for key, one in tree.items()}
    if isinstance(tree, tuple):
        made = [renamed(one, name) for one in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)
    return tree


def test_other_names_and_another_order_of_arguments_give_the_same_plan():
    def other_step(rows, state):
        state, found = train_step(renamed(state, lambda key: key[1:]), rows)
        return found, renamed(state, last_first)

    def last_first(key):
        return chr(ord("a") + ord("z") - ord(key[0])) + key

    one = mw.plan(STEP, abstract_state(), tokens(), on="v5e:2x4", num_compiled=0)
    state = renamed(abstract_state(), last_first)
    assert list(state[0]) != sorted(state[0])
    other = mw.plan(jax.jit(other_step, donate_argnums=1), tokens(), state, on="v5e:2x4", num_compiled=0)
    assert one.num_layouts == other.num_layouts
    for ours, theirs in zip(one.candidates, other.candidates, strict=True):
        found = [
            (
                dict(each.predicted.mesh),
                each.predicted.flops,
                sorted((m.kind, m.axes, m.bytes) for m in each.predicted.collectives),
            )
            for each in (ours, theirs)
        ]
        assert found[0] == found[1]


def test_another_process_makes_the_same_plan_to_the_byte(tmp_path):
    """Sets of texts have another order in each process."""
    (tmp_path / "made.py").write_text(
        "import json, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import foreign, jax, meshwright as mw\n"
        "plan = mw.plan(foreign.train_step, jax.eval_shape(foreign.make_state, jax.random.key(0)), foreign.tokens(),"
        " on='v5e:2x4', num_compiled=0)\n"
        "print(json.dumps(plan.to_json()), *plan.candidates)\n"
    )
    made = [
        subprocess.run(
            [sys.executable, tmp_path / "made.py"],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert made[0] == made[1] != b""


@pytest.mark.parametrize("on", ["v5p:4x4x4", "h100:64"])
def test_scanned_layers_take_as_long_as_layers_one_by_one(on):
    """At the widths of a model of 7 billion parameters; the mask is computed before the loop, and free in it."""
    sizes = Sizes(batch=64, length=2048, vocab=32000, embed=4096, heads=32, head_dim=128, mlp=11008, layers=4)
    rows = jax.ShapeDtypeStruct((sizes.batch, sizes.length + 1), jnp.int32)
    one, other = (
        mw.plan(STEP, abstract_state(sizes=sizes, scanned=scanned), rows, on=on, num_compiled=0).predicted
        for scanned in (True, False)
    )
    assert one.step_seconds == pytest.approx(other.step_seconds, rel=0.02)


MESHES = {"dp=8": 0.0, "fsdp=8": 0.0, "dp=2,fsdp=4": 0.02, "tp=8": 0.01, "fsdp=2,tp=4": 0.05}
"""The layouts whose compiled collectives are compared, and the share of their bytes by which they may differ.

The compiler sums the two lookups of the cross entropy in one collective, sums the embedding's gradient over both axes
at once, and moves a part of it.
"""


@pytest.mark.parametrize("mesh", MESHES)
def test_the_compiled_collectives_are_the_predicted_ones(mesh):
    found, classes = priced(STEP, abstract_state(), tokens())
    degrees = dict(part.split("=") for part in mesh.split(","))
    layouts = find_layouts(found, classes, {axis: int(degree) for axis, degree in degrees.items()})
    wanted = "up:2" if "tp" in mesh else "batch"
    atom = next(one.atom for one in classes if one.name == wanted)
    chosen = next(
        one
        for one in layouts
        if all(atom in axis.atoms for axis in one.layout.axes if axis.name in ("tp", "dp"))
        and all(axis.is_stored == (axis.name in ("fsdp",)) for axis in one.layout.axes)
        and all(len(axis.atoms) > 1 for axis in one.layout.axes if axis.name == "tp")
    )
    plan = mw.plan(STEP, abstract_state(), tokens(), on="cpu:8", mesh=mesh, num_compiled=0)
    plan = type(plan)(**{**vars(plan), "candidates": (type(plan.best)(layout=chosen.layout, predicted=chosen.record),)})
    compiled = mw.inspect(plan.apply().lower(), mesh=plan.mesh)

    def sent(collectives):
        bytes_by_kind = Counter()
        for move in collectives:
            # XLA:CPU reduces, and slices afterwards.
            kind = "all-reduce" if move.kind == "reduce-scatter" else move.kind
            bytes_by_kind[kind] += move.bytes
        return bytes_by_kind

    ours, theirs = sent(chosen.record.collectives), sent(compiled.collectives)
    if MESHES[mesh] == 0:
        assert ours == theirs
    else:
        assert sum(theirs.values()) == pytest.approx(sum(ours.values()), rel=MESHES[mesh])


def test_a_planned_step_is_the_step():
    plan = mw.plan(STEP, abstract_state(), tokens(), on="cpu:8", mesh="data=2,model=4", num_compiled=0)
    assert dict(plan.mesh) == {"data": 2, "model": 4}
    one = jax.jit(train_step)(make_state(jax.random.key(0)), tokens())
    other = plan.apply()(make_state(jax.random.key(0)), tokens())
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert jnp.allclose(ours, theirs, atol=2e-5), (ours.shape, jnp.abs(ours - theirs).max())


def mlp_step(params, x):
    """A step of SGD of two layers."""
    value, gradients = jax.value_and_grad(lambda params: ((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2).mean())(
        params
    )
    return jax.tree.map(lambda one, gradient: one - 0.1 * gradient, params, gradients), value


MLP = {"up": jax.ShapeDtypeStruct((64, 256), jnp.float32), "down": jax.ShapeDtypeStruct((256, 64), jnp.float32)}
X = jax.ShapeDtypeStruct((32, 64), jnp.float32)


def test_the_function_as_it_is_given_is_compared():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = {
        name: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=NamedSharding(mesh, P("data")))
        for name, one in MLP.items()
    }
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P()))
    plan = mw.plan(mlp_step, params, x, on="cpu:8", num_compiled=1)
    given = [one for one in plan.candidates if one.layout is None]
    assert len(given) == 1
    assert given[0].compiled is not None
    assert given[0].compiled.collectives
    assert "as given" in str(plan)
    assert plan.to_json()["table"] == {name: list(axes) for name, axes in plan.table.items()}


def test_what_does_not_fit_is_said_and_split_further():
    big = {
        "up": jax.ShapeDtypeStruct((65536, 131072), jnp.float32),
        "down": jax.ShapeDtypeStruct((131072, 65536), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((64, 65536), jnp.float32)
    plan = mw.plan(jax.jit(mlp_step, donate_argnums=0), big, x, on="v5e:4x4", num_compiled=0)
    assert plan.best.fits
    # 68.7 GB of parameters on chips of 17: split between steps or in use.
    assert plan.predicted.memory_bytes["state"] <= 4.4e9
    whole = next(one for one in plan.candidates if not one.fits)
    assert whole.predicted is not None
    assert whole.predicted.memory_bytes["peak"] > 1.7e10


@pytest.mark.parametrize(("on", "times"), [("v5e:2x4", 1), ("cpu:8", 4)])
def test_gradients_that_a_loop_adds_up_are_summed_over_devices_once(on, times):
    """XLA moves the all-reduce out of the loop; XLA:CPU does not."""

    def step(params, batches):
        def add(total, x):
            gradients = jax.grad(lambda one: ((jnp.tanh(x @ one["up"]) @ one["down"]) ** 2).mean())(params)
            return jax.tree.map(jnp.add, total, gradients), None

        gradients, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
        return jax.tree.map(lambda one, gradient: one - 0.1 * gradient, params, gradients)

    batches = jax.ShapeDtypeStruct((4, 32, 64), jnp.float32)
    plan = mw.plan(step, MLP, batches, on=on, mesh="dp=8", num_compiled=0)
    record = next(
        one.predicted
        for one in plan.candidates
        if one.layout
        and one.layout.axes[0].atoms == (next(each.atom for each in plan.classes if each.size == 32),)
        and not one.layout.store
    )
    sums = [move for move in record.collectives if move.kind == "all-reduce" and move.phase == "backward"]
    assert sum(move.count for move in sums) == 2 * times
    assert sum(move.bytes for move in sums) == 2 * 64 * 256 * 4 * times


plan: Any = mw.plan  # also with arguments that its signature forbids

WRONG = {
    "no hardware": (lambda: plan(mlp_step, MLP), "mlp_step is planned with on='v5e:4x4'"),
    "no arguments": (lambda: plan(mlp_step, on="cpu:8"), "mlp_step is planned with its arguments"),
    "a model's option": (lambda: plan(mlp_step, MLP, X, on="cpu:8", top=3), "top is for models"),
    "another mesh": (lambda: plan(mlp_step, MLP, X, on="cpu:8", mesh="a=2"), "has 2 devices, cpu:8 8"),
    "nothing to compile": (lambda: plan(mlp_step, MLP, X, on="cpu:8", num_compiled=-1), "num_compiled is -1"),
    "nothing to split": (lambda: plan(jnp.sin, jnp.ones(7), on="cpu:8"), "no class of dims can be split"),
    "two places of hardware": (lambda: plan(*("tiny", "cpu:8"), on="cpu:4", batch=8), "'cpu:8' is too many"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_planned_is_said(call, words):
    with pytest.raises(MeshwrightError, match=words):
        call()


def test_sorts_and_shard_maps_are_said():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    inner = jax.shard_map(lambda one: one * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"))

    def step(params, x):
        return mlp_step(params, inner(x))

    plan = mw.plan(step, MLP, X, on="cpu:8", num_compiled=0)
    assert any("shard_map" in note for note in plan.notes)


def test_optimizers_moments_lie_as_their_parameters():
    optimizer = optax.adam(1e-3)

    def step(params, moments, x):
        value, gradients = jax.value_and_grad(lambda one: ((jnp.tanh(x @ one["up"]) @ one["down"]) ** 2).mean())(params)
        updates, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(params, updates), moments, value

    moments = jax.eval_shape(optimizer.init, MLP)
    plan = mw.plan(step, MLP, moments, X, on="cpu:8", mesh="fsdp=2,tp=4", num_compiled=0)
    (params, moments, _), _ = plan.shardings()

    assert jax.tree.map(lambda one: one.spec, params) == jax.tree.map(lambda one: one.spec, moments[0].mu)

"""A table applied to other people's programs: one device's results on every mesh, and the intended collectives."""

import math
import re
from collections import Counter

import jax
import numpy as np
import pytest
from foreign import loss, make_state, tokens, train_step

import meshwright as mw
from meshwright.proof.programs.apply import apply


@pytest.fixture(autouse=True)
def _of_other_people():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


AUTO = jax.sharding.AxisType.Auto
TP = {"*.q:2": "tp", "*.up:2": "tp", "out:1": "tp"}
MESHES = {
    "dp=2": ({"batch": "dp"}, ""),
    "fsdp=2": ({"batch": "fsdp"}, "fsdp"),
    "tp=4": (TP, ""),
    "dp=2,fsdp=4": ({"batch": "dp,fsdp"}, "fsdp"),
    "fsdp=2,tp=4": ({"batch": "fsdp", **TP}, "fsdp"),
    "dp=2,fsdp=2,tp=2": ({"batch": ("dp", "fsdp"), **TP}, "fsdp"),
    # Heads and the MLP where they are, and the batch in all other parts.
    "tp=2": ({**TP, "batch": "tp"}, ""),
    "dp=2,tp=2": ({**TP, "batch": ("dp", "tp")}, ""),
    "fsdp=4,tp=2": ({**TP, "batch": ("fsdp", "tp")}, "fsdp"),
}


def mesh_of(text):
    degrees = dict(one.split("=") for one in text.split(","))
    shape = tuple(map(int, degrees.values()))
    return jax.make_mesh(
        shape, tuple(degrees), devices=jax.devices()[: math.prod(shape)], axis_types=(AUTO,) * len(shape)
    )


def applied(text, function=train_step, state=None):
    table, store = MESHES[text]
    state = make_state(jax.random.key(0)) if state is None else state
    return apply(function, table, mesh_of(text), state, tokens(), store=store), state


@pytest.mark.parametrize("text", MESHES)
def test_a_step_on_a_mesh_is_the_step_on_one_device(text):
    step, state = applied(text)
    expected, expected_loss = jax.jit(train_step)(state, tokens())
    found, found_loss = step(state, tokens())
    np.testing.assert_allclose(found_loss, expected_loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_gradients_on_a_mesh_are_those_of_one_device():
    params, _ = make_state(jax.random.key(0))
    gradient = jax.jit(jax.grad(loss))
    step = apply(gradient, {"batch": "fsdp", **TP}, mesh_of("fsdp=2,tp=4"), params, tokens())
    for one, other in zip(
        jax.tree.leaves(step(params, tokens())), jax.tree.leaves(gradient(params, tokens())), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-5)


def kinds(text):
    """How many collectives of each kind a compiled program holds."""
    return Counter(
        re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)
    )


def test_fsdp_gathers_weights_and_moves_no_activations():
    """By the shardings of its arguments alone, the same step exchanges activations too."""
    step, state = applied("dp=2,fsdp=4")
    found = kinds(step.lower().compile().as_text())
    assert set(found) == {"all-gather", "all-reduce"}
    alone = jax.jit(train_step, in_shardings=step.shardings[0]).lower(state, tokens()).compile().as_text()
    assert kinds(alone)["all-to-all"] > 0
    assert kinds(alone)["all-reduce"] > found["all-reduce"]


def test_an_array_is_split_along_the_class_that_comes_first_in_the_table():
    arrays = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 16), "float32")
    for order, constraint in (("rows", "columns"), '[{"tp"}, {}]'), (("columns", "rows"), '[{}, {"tp"}]'):
        keys = {"rows": "rows:0", "columns": "weight:1"}
        table = {keys[name]: "tp" for name in order}
        step = apply(lambda rows, weight: rows @ weight, table, mesh_of("tp=2"), *arrays)
        *_, last = re.findall(r"sharding_constraint %\d <@mesh, (.*?)>", step.lower().as_text())
        assert last == constraint


def test_state_comes_back_as_it_lies_and_the_second_step_compiles_nothing(caplog):
    step, state = applied("dp=2,fsdp=4")
    (wanted, _), _ = step.shardings
    state = jax.device_put(state, wanted)
    state, _ = step(state, tokens())
    for leaf, one in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(one, leaf.ndim)
    with jax.log_compiles():
        step(state, tokens())
    assert [line for line in caplog.messages if "Compiling" in line and "_flat" in line] == []


def test_moments_lie_as_their_parameters():
    step, _ = applied("fsdp=2,tp=4")
    ((params, moments), _), _ = step.shardings
    for of_moment in (moments[0].mu, moments[0].nu):
        assert jax.tree.leaves(of_moment) == jax.tree.leaves(params)


def test_the_classes_are_printed_with_their_axes():
    step, _ = applied("fsdp=2,tp=4")
    lines = str(step).splitlines()
    assert any(line.startswith("fsdp") and "batch (16): tokens:0" in line for line in lines)
    assert any(line.startswith("tp") and "up:2 (64)" in line for line in lines)


def test_donated_state_stays_donated():
    state = make_state(jax.random.key(0))
    step = apply(jax.jit(train_step, donate_argnums=0), {"batch": "dp"}, mesh_of("dp=2"), state, tokens())
    assert step.lower().compile().memory_analysis().alias_size_in_bytes > 0


MISTAKES = [
    ({"nothing": "dp"}, "dp=2", "'nothing' names no class of dims; classes are batch"),
    ({"*:0": "dp"}, "dp=2", "classes of dims; they are"),
    ({"*.q:0": "dp"}, "dp=2", "cannot be split: layers"),
    ({"*.up:2": "dp", "*.down:1": "dp"}, "dp=2", "'*.down:1' and '*.up:2' name the same class of dims"),
    ({"batch": "xp"}, "dp=2", "'batch' is for mesh axis 'xp'; the mesh has"),
    ({"tokens:1": "dp"}, "dp=2", "has 25 elements, which dp of degree 2 does not divide"),
]


@pytest.mark.parametrize(("table", "text", "said"), MISTAKES)
def test_a_mistake_is_one_line(table, text, said):
    with pytest.raises(mw.MeshwrightError) as error:
        mw.apply(train_step, table, mesh_of(text), make_state(jax.random.key(0)), tokens())
    assert said in str(error.value)


def test_other_shapes_and_explicit_meshes_are_refused():
    step, state = applied("dp=2")
    with pytest.raises(mw.MeshwrightError, match="other shapes"):
        step(state, tokens()[:8])
    with pytest.raises(mw.MeshwrightError, match="explicit axes"):
        mw.apply(
            train_step,
            {"batch": "dp"},
            jax.make_mesh((2,), ("dp",), (jax.sharding.AxisType.Explicit,)),
            state,
            tokens(),
        )
    one = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])
    with jax.set_mesh(one), pytest.raises(mw.MeshwrightError, match="was traced in"):
        applied("dp=2")

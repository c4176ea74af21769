"""What is inspected is the program that its user would run: every way to write one, and all that its arguments say."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import P
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding

import meshwright
from meshwright.errors import MeshwrightError
from meshwright.execution.training.library import new_run
from meshwright.execution.training.run_directory.run import begin_run
from meshwright.proof.verification.plans import step_request


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def mesh_of(**degrees):
    return jax.make_mesh(tuple(degrees.values()), tuple(degrees), axis_types=(AxisType.Auto,) * len(degrees))


def array(mesh, shape, *spec, **how):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec), **how))


def mlp(mesh):
    args = array(mesh, (64, 64), "dp"), array(mesh, (64, 64), None, "tp"), array(mesh, (64, 64), "tp", None)
    return lambda x, w_in, w_out: jnp.sin(x @ w_in) @ w_out, args


def moves(found):
    return [(one.kind, one.axes) for one in found.collectives]


def made(args):
    return [jax.device_put(jnp.ones(one.shape, one.dtype), one.sharding) for one in args]


SUMS = [("all-reduce", ("tp",))]


class Equinox:
    """As `eqx.filter_jit` is: it lowers arrays, nothing abstract, and hides JAX's own stage in an attribute."""

    def __init__(self, function):
        self.jitted = jax.jit(function)

    def __call__(self, *args):
        return self.jitted(*args)

    def lower(self, *args):
        assert all(isinstance(one, jax.Array) for one in args)
        return SimpleNamespace(lowered=self.jitted.lower(*args))


def test_whatever_lowers_is_taken():
    mesh = mesh_of(dp=2, tp=4)
    function, args = mlp(mesh)
    jitted = jax.jit(function)
    for held in (
        (function, *args),
        (jitted, *args),
        (partial(jitted, args[0]), *args[1:]),
        (Equinox(function), *made(args)),
        (jitted.trace(*args),),
        (jitted.lower(*args),),
        (Equinox(function).lower(*made(args)),),
        (jitted.lower(*args).compile(),),
    ):
        found = meshwright.inspect(*held)
        assert (moves(found), found.record.mesh) == (SUMS, {"dp": 2, "tp": 4})
        assert found.memory["peak"] > 0


def test_arguments_are_given_by_name_too():
    function, (x, w_in, w_out) = mlp(mesh_of(dp=2, tp=4))
    assert moves(meshwright.inspect(function, x, w_out=w_out, w_in=w_in)) == SUMS


def nnx_step():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 10, 100)), wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda model: jax.nn.relu(model(x)).sum())(model)
        optimizer.update(model, gradients)
        return loss

    return step, model, optimizer


def test_a_train_step_of_nnx_is_taken_whole_here_and_for_a_target():
    step, model, optimizer = nnx_step()
    mesh = mesh_of(dp=8)
    x = array(mesh, (32, 64), "dp")
    for on in (None, "cpu:8"):
        found = meshwright.inspect(step, model, optimizer, x, on=on)
        assert set(moves(found)) == {("all-reduce", ("dp",))}
        assert found.memory["alias"] > 3 * 64 * 64 * 4  # parameters and moments are donated


def test_what_only_lowers_goes_to_a_target_too():
    function, args = mlp(mesh_of(dp=2, tp=4))
    assert moves(meshwright.inspect(Equinox(function), *made(args), on="cpu:8")) == SUMS
    assert moves(meshwright.inspect(jax.jit(function).lower(*args), on="cpu:8")) == SUMS


def test_a_mapped_function_has_the_mesh_of_its_axis():
    mapped = jax.pmap(lambda x: jax.lax.psum(x, "replicas"), axis_name="replicas")
    found = meshwright.inspect(mapped, jnp.ones((8, 64, 64)))
    assert found.record.mesh == {"replicas": 8}
    assert moves(found) == [("all-reduce", ("replicas",))]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_mesh_in_use_is_that_of_older_code_as_well():
    mesh = mesh_of(dp=2, tp=4)

    def function(x, w):
        return jax.lax.with_sharding_constraint(x, P("dp", "tp")) @ jax.lax.with_sharding_constraint(w, P("tp", None))

    x = np.ones((64, 64), np.float32)
    for use in (lambda: Mesh(mesh.devices, mesh.axis_names), lambda: jax.set_mesh(mesh)):
        for on in (None, "cpu:8"):
            with use():
                found = meshwright.inspect(function, x, x, on=on)
            assert found.record.mesh == {"dp": 2, "tp": 4}
            assert ("all-reduce", ("tp",)) in moves(found)


def test_a_program_that_needs_its_mesh_in_use_is_told_so():
    mesh = mesh_of(dp=8)
    found = meshwright.inspect(lambda x: jax.lax.with_sharding_constraint(x, P("dp")), array(mesh, (8, 8), "dp"))
    assert "lowered under jax.set_mesh of its arguments' mesh; as it is called: RuntimeError" in found.record.notes[0]


def test_axes_whose_type_nobody_said_are_explicit_and_auto_where_that_does_not_lower():
    def cut(x):
        return jax.lax.with_sharding_constraint(x, P("dp"))[:4] @ x.T

    x = np.ones((16, 16), np.float32)
    for on in (None, "cpu:8"):
        found = meshwright.inspect(lambda x: x @ x, x, mesh="dp=8", on=on)
        assert found.record.notes == ()
        found = meshwright.inspect(cut, x, mesh="dp=8", on=on)
        assert found.record.notes[0].startswith("lowered with ")
        assert "auto axes; " in found.record.notes[0]
        assert "with explicit axes" in found.record.notes[0]
        with pytest.raises(MeshwrightError, match="does not lower"):
            meshwright.inspect(cut, x, mesh="dp=8", types="explicit", on=on)


def test_weak_types_stay_weak():
    def function(x, scale):
        assert scale.weak_type
        return x * scale

    x, scale = jnp.ones((8, 8), jnp.bfloat16), jnp.asarray(2.0)
    for on in (None, "cpu:1"):
        assert "bf16[8,8]" in str(meshwright.inspect(function, x, 1 * scale.weak_type + 1.0, on=on).program.hlo)
    weak = jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)
    for on in (None, "cpu:1"):
        text = meshwright.inspect(function, x, weak, on=on).program.hlo
        assert "ROOT" in text
        assert "->bf16[8,8]" in text.partition("\n")[0].replace(" ", "")


def test_donation_and_layouts_stay_and_a_layout_that_cannot_go_to_a_target_is_refused():
    mesh = mesh_of(dp=8)
    sharding = NamedSharding(mesh, P("dp"))
    for on in (None, "cpu:8"):
        step = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=sharding)
        assert meshwright.inspect(step, array(mesh, (64, 32), "dp"), on=on).memory["alias"] == 8 * 32 * 4
    turned = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=Format(Layout(major_to_minor=(1, 0)), sharding))
    assert "f32[8,32]{0,1}" in meshwright.inspect(jnp.sin, turned).program.hlo.partition("\n")[0]
    with pytest.raises(MeshwrightError, match=r"asks for the layout \(1, 0\)"):
        meshwright.inspect(jnp.sin, turned, on="cpu:8")


def test_memory_kinds_stay():
    mesh = mesh_of(dp=8)
    x = array(mesh, (64, 32), "dp", memory_kind="pinned_host")
    for on in (None, "cpu:8"):
        assert "S(5)" in meshwright.inspect(lambda x: x, x, on=on).program.hlo.partition("\n")[0]


class Scale:
    """A class of the script that is inspected."""

    def __init__(self, by):
        self.by = by


jax.tree_util.register_pytree_node(Scale, lambda one: ((one.by,), None), lambda _, children: Scale(*children))


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def test_all_that_scripts_hold_goes_to_a_target():
    mesh, schedule = mesh_of(dp=8), optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    optimizer, activation, lock = optax.adamw(schedule), jax.nn.relu, SimpleNamespace(by=Scale(2.0))

    @jax.checkpoint
    def layer(scale, x, w):
        assert isinstance(scale, Scale)
        constrained = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("dp")))
        return scale.by * doubled(activation(constrained)) * lock.by.by

    def step(scale, x, w, state):
        jax.debug.print("{}", x.sum())
        gradient = jax.grad(lambda w: layer(scale, x, w).sum())(w)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, schedule(3)

    w = jnp.ones((16, 16))
    args = Scale(w[0, 0]), array(mesh, (32, 16), "dp"), w, optimizer.init(w)
    here, there = (meshwright.inspect(step, *args, on=on) for on in (None, "cpu:8"))
    assert moves(here) == moves(there)
    assert here.flops == there.flops > 0


def test_what_cannot_be_copied_is_lowered_as_it_is():
    mesh = mesh_of(dp=8)
    opened = iter([1])  # cannot be pickled

    def function(x):
        assert opened
        return jax.lax.with_sharding_constraint(x.sum(0), NamedSharding(mesh, P()))

    locked = (function, (one for one in ()))
    x = array(mesh, (32, 16), "dp")
    holds = lambda x: (locked, function(x))[1]  # noqa: E731
    assert moves(meshwright.inspect(holds, x, on="cpu:8")) == [("all-reduce", ("dp",))]
    with pytest.raises(MeshwrightError, match=r"is for a mesh of dp=8 and cannot be copied for one of dp=4"):
        meshwright.inspect(holds, x, mesh="dp=4", on="cpu:4")


WRONG = [
    (lambda: meshwright.inspect(42), "42 is not a function"),
    (lambda: meshwright.inspect(jnp.ones(3)), "is not a function"),
    (lambda: meshwright.inspect(jax.jit(jnp.sin).lower(jnp.ones(3)), 1), "has its arguments already"),
    (lambda: meshwright.inspect(jax.jit(jnp.sin).lower(jnp.ones(3)).compile(), x=1), "has its arguments already"),
    (lambda: meshwright.inspect(jax.jit(jnp.sin).lower(jnp.ones(3)), on="v5e:2x2"), "lowered for cpu and .*needs tpu"),
    (lambda: meshwright.inspect(lambda x: x @ jnp.ones(5), jnp.ones(3)), r"does not lower: TypeError: .*\(.*:\d+\)"),
    (lambda: meshwright.inspect(lambda x: x, jnp.ones(3), efort="fast"), "does not lower: TypeError: .*efort"),
]


@pytest.mark.parametrize(("call", "reason"), WRONG)
def test_what_cannot_be_inspected_is_one_line(call, reason):
    with pytest.raises(MeshwrightError, match=reason) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_of_a_plan_the_step_is_compiled_that_verify_compiles(monkeypatch, tmp_path):
    plan = meshwright.plan("tiny", on="cpu:8", batch=16, seq_len=64, mesh="fsdp=8")
    requests = []

    def note(request):
        requests.append(request)
        raise MeshwrightError(f"{request.function} was reached")

    monkeypatch.setattr("meshwright.proof.inspection.functions.compile_in_child", note)
    plan.write(tmp_path / "plan.yaml")
    (tmp_path / "run").mkdir()
    begin_run(tmp_path / "run", new_run("tiny", plan, tmp_path / "run", steps=2, settings={"learning_rate": None}), 0)
    for subject in (plan, tmp_path / "plan.yaml", str(tmp_path / "run")):
        with pytest.raises(MeshwrightError, match="train step of tiny was reached"):
            meshwright.inspect(subject, effort="fast")
    assert requests == [step_request(plan, effort="fast")] * 3
    for said in ({"on": "cpu:8"}, {"mesh": "fsdp=8"}, {"types": "auto"}):
        with pytest.raises(MeshwrightError, match=f"a plan sets its {next(iter(said))} itself"):
            meshwright.inspect(plan, **said)
    with pytest.raises(MeshwrightError, match="a plan sets its arguments itself"):
        meshwright.inspect(plan, 3)

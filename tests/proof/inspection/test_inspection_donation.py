"""What is state of a train step, by what computes it: updates of arguments are, gradients never."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax import P
from jax.sharding import AxisType, NamedSharding

import meshwright
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.updates import Updates
from meshwright.errors import MeshwrightError

MESH = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))


def array(shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*spec)))


def params(width):
    return {"a": array((512, width), None, "fsdp"), "b": array((width, 512), "fsdp")}


X, SCALAR = array((64, 512), "fsdp"), array(())


def loss(params, x):
    return ((jax.nn.relu(x @ params["a"]) @ params["b"]) ** 2).mean()


def decayed(params, x):
    return loss(params, x) + 0.5 * sum((one**2).sum() for one in jax.tree.leaves(params))


def add_decay(params, x, decay=1e-2):
    return jax.tree.map(lambda g, w: g + decay * w, jax.grad(jax.checkpoint(loss))(params, x), params)


def accumulated(params, xs):
    def add(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(decayed)(params, x)), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)[0]


def clipped(params, x):
    gradients = jax.grad(decayed)(params, x)
    return jax.tree.map(lambda g: g / jnp.maximum(optax.tree.norm(gradients), 1), gradients)


def sgd(params, x, rate=0.1):
    return jax.tree.map(lambda w, g: w - rate * g, params, jax.grad(decayed)(params, x))


def shrunk(params, x, rate):
    return jax.tree.map(lambda w, g: w * (1 - rate * 0.01) - rate * g, params, jax.grad(loss)(params, x))


def averaged(params, average, x):
    params = sgd(params, x)
    return params, jax.tree.map(lambda old, new: 0.999 * old + 0.001 * new, average, params)


def skipped(params, x):
    gradients = jax.grad(loss)(params, x)
    is_finite = jnp.isfinite(optax.tree.norm(gradients))
    return jax.lax.cond(is_finite, lambda: jax.tree.map(lambda w, g: w - g, params, gradients), lambda: params)


def several(params, xs):
    return jax.lax.scan(lambda params, x: (sgd(params, x), None), params, xs)[0]


def sharded(params, x):
    def body(params, x):
        def whole(params):
            a = jax.lax.all_gather(params["a"], "fsdp", axis=1, tiled=True)
            return {"a": a, "b": jax.lax.all_gather(params["b"], "fsdp", tiled=True)}

        gradients = jax.grad(lambda params: loss(whole(params), x))(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)

    specs = {"a": P(None, "fsdp"), "b": P("fsdp")}
    return jax.shard_map(body, mesh=MESH, in_specs=(specs, P("fsdp")), out_specs=specs)(params, x)


def optimized(params, state, x, optimizer):
    updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
    return optax.apply_updates(params, updates), state


def updates_alone(params, state, x, optimizer):
    return optimizer.update(jax.grad(loss)(params, x), state, params)[0]


def adversarial(params, x):
    return x + 0.01 * jnp.sign(jax.grad(loss, 1)(params, x))


def updated(function, *args):
    """The paths of the arguments that the results of a function are updates of."""
    lowered = jax.jit(function).trace(*args).lower()
    module = parse_hlo(lowered.compiler_ir("hlo").as_hlo_module().to_string())
    found, root = Updates(module), module.root(module.entry)
    names = {
        number: one.op_name.replace("\\'", "'") for number, one in module.computations[module.entry].parameters.items()
    }
    results = module.operands(root) if root.opcode == "tuple" else (root,)
    return [sorted(names[n] for n, share in found.of(one).items() if share.is_changed) for one in results]


ADAM = optax.adamw(optax.cosine_decay_schedule(1e-3, 10))
SMALL = params(64)
STATE = jax.eval_shape(ADAM.init, SMALL)
XS = array((4, 64, 512), None, "fsdp")

GRADIENTS = {
    "of a loss": (jax.value_and_grad(loss), SMALL, X),
    "of a loss with weight decay": (jax.grad(decayed), SMALL, X),
    "of a sum of squares": (jax.grad(lambda params, x: 0.5 * (params["a"] ** 2).sum() + x.sum()), SMALL, X),
    "with decay added": (add_decay, SMALL, X),
    "with decay added by a traced factor": (add_decay, SMALL, X, SCALAR),
    "summed over microbatches": (accumulated, SMALL, XS),
    "clipped": (clipped, SMALL, X),
    "of one array": (jax.value_and_grad(lambda w, x: ((x @ w) ** 2).mean() + 0.5 * (w**2).sum()), SMALL["a"], X),
    "as Adam's updates": (partial(updates_alone, optimizer=ADAM), SMALL, STATE, X),
}


@pytest.mark.parametrize("call", GRADIENTS.values(), ids=GRADIENTS)
def test_a_gradient_is_no_update(call):
    assert not any(updated(*call))


AB = [["params['a']"], ["params['b']"]]
STEPS = {
    "sgd": ((sgd, SMALL, X), AB),
    "shrunk": ((shrunk, SMALL, X, SCALAR), AB),
    "of one array": ((lambda w, x: w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w), SMALL["a"], X), [["w"]]),
    "averaged": ((averaged, SMALL, SMALL, X), [*AB, ["average['a']"], ["average['b']"]]),
    "skipped": ((skipped, SMALL, X), AB),
    "several": ((several, SMALL, XS), AB),
    "sharded": ((sharded, SMALL, X), AB),
    "an accumulator": (
        (lambda total, params, x: jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), SMALL, SMALL, X),
        [["total['a']"], ["total['b']"]],
    ),
}


@pytest.mark.parametrize(("call", "names"), STEPS.values(), ids=STEPS)
def test_new_values_are_updates_of_the_old_ones(call, names):
    found = updated(*call)
    assert [[name for name in each if name in here] for each, here in zip(names, found, strict=True)] == names


OPTIMIZERS = {
    "momentum": optax.sgd(0.1, 0.9),
    "adamw": ADAM,
    "lion": optax.lion(1e-3),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "every fourth": optax.MultiSteps(optax.adam(1e-3), 4),
    "if finite": optax.apply_if_finite(optax.adam(1e-3), 3),
    "amsgrad": optax.amsgrad(1e-3),
    "muon": optax.contrib.muon(1e-3),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_large_array_of_an_optimizer_is_state(optimizer):
    state = jax.eval_shape(optimizer.init, SMALL)
    found = updated(partial(optimized, optimizer=optimizer), SMALL, state, X)
    paths, _ = jax.tree_util.tree_flatten_with_path((SMALL, state))
    for names, (path, leaf) in zip(found, paths, strict=True):
        if len(leaf.shape) == 2:
            assert any(name.endswith(jax.tree_util.keystr(path[1:])) for name in names)


def told(function, *args, **how):
    return [found for found in meshwright.inspect(function, *args, **how).findings if found.kind == "not donated"]


def linear():
    return nnx.Linear(512, 2048, rngs=nnx.Rngs(0))


def batch(size=64):
    return jax.device_put(jnp.ones((size, 512)), NamedSharding(MESH, P("fsdp")))


def test_gradient_functions_of_any_size_and_library_are_not_told_to_donate():
    for width in (64, 4096, 65536):
        assert not told(jax.jit(jax.value_and_grad(decayed)), params(width), X)
    assert not told(jax.jit(adversarial), SMALL, array((65536, 512), "fsdp"))
    assert not told(nnx.jit(nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())), linear(), batch())
    model = nn.Dense(2048)
    variables = model.init(jax.random.key(0), batch())
    assert not told(jax.jit(jax.grad(lambda params, x: (model.apply(params, x) ** 2).mean())), variables, batch())


def test_train_steps_of_any_library_are_told_to_donate_all_of_their_state():
    model, optimizer = nn.Dense(2048), optax.adamw(1e-3)
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), batch()), tx=optimizer)

    @jax.jit
    def of_linen(state, x):
        return state.apply_gradients(grads=jax.grad(lambda p: (state.apply_fn(p, x) ** 2).mean())(state.params))

    @nnx.jit
    def of_nnx(*args):
        model, optimizer, x = args
        optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).mean())(model))

    (found,) = told(of_linen, state, batch())
    assert (found.count, found.trees) == (8, ("state",))
    (found,) = told(of_nnx, linear(), nnx.Optimizer(linear(), optimizer, wrt=nnx.Param), batch())
    assert (found.count, found.trees) == (8, ("args[0]", "args[1]"))
    assert "donate_argnums=[0, 1]" in found.fix


def test_parameters_in_low_precision_and_frozen_ones_are_state_too():
    def mixed(half, params, x):
        gradients = jax.grad(loss)(half, x.astype(jnp.bfloat16))
        params = jax.tree.map(lambda w, g: w - 0.1 * g.astype(jnp.float32), params, gradients)
        return jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), params

    def frozen(state, x):
        gradient = jax.grad(lambda b: loss({"a": state["a"], "b": b}, x))(state["b"])
        return {"a": state["a"], "b": state["b"] - 0.1 * gradient}

    wide = params(4096)
    half = jax.tree.map(lambda one: array(one.shape, *one.sharding.spec, dtype=jnp.bfloat16), wide)
    assert [found.count for found in told(jax.jit(mixed), half, wide, X)] == [4]
    assert [found.count for found in told(jax.jit(frozen), wide, X)] == [2]


def test_on_an_explicit_mesh_too_where_each_value_has_its_sharding():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))
    w = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=NamedSharding(mesh, P(None, None)))
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=NamedSharding(mesh, P("fsdp", None)))

    def step(w, momentum, x):
        momentum = 0.9 * momentum + jax.grad(lambda w: jnp.sin(x @ w).mean())(w)
        return w - 0.1 * momentum, momentum

    with jax.set_mesh(mesh):
        (found,) = meshwright.inspect(jax.jit(step, donate_argnums=0), w, w, x).findings
    assert (found.id, found.trees) == ("not-donated", ("momentum",))


def test_on_one_device_too():
    wide = jax.tree.map(lambda one: jnp.ones(one.shape), params(512))
    assert [found.count for found in told(jax.jit(sgd), wide, jnp.ones((64, 512)))] == [2]
    assert not told(jax.jit(jax.grad(decayed)), wide, jnp.ones((64, 512)))


def test_the_caller_may_say_what_is_state():
    wide = params(4096)
    assert [found.trees for found in told(jax.jit(jax.grad(loss)), wide, X, state="params")] == [("params",)]
    assert not told(jax.jit(sgd), wide, X, state=())
    with pytest.raises(MeshwrightError, match="state names 'parms'; the program's arguments are params, x"):
        told(jax.jit(sgd), wide, X, state=["parms"])


@pytest.mark.parametrize("kind", ["apart", "in one tree", "of nnx"])
def test_a_state_that_is_whole_beside_split_parameters_is_found_in_any_tree(kind):
    optimizer, split = optax.adamw(1e-3), params(4096)
    whole = jax.tree.map(lambda one: array(one.shape, dtype=one.dtype), jax.eval_shape(optimizer.init, split))
    shardings = jax.tree.map(lambda one: one.sharding, (split, whole))
    if kind == "of nnx":
        with jax.set_mesh(MESH):
            model = nnx.Linear(
                512, 4096, rngs=nnx.Rngs(0), kernel_init=nnx.with_partitioning(nnx.initializers.ones, (None, "fsdp"))
            )
            state = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
            state.opt_state = jax.tree.map(lambda one: jax.device_put(one, NamedSharding(MESH, P())), state.opt_state)

        @nnx.jit
        def step(model, state, x):
            state.update(model, nnx.grad(lambda model: (model(x) ** 2).mean())(model))

        report = meshwright.inspect(step, model, state, batch())
    elif kind == "apart":
        step = jax.jit(partial(optimized, optimizer=optimizer), out_shardings=shardings)
        report = meshwright.inspect(step, split, whole, X)
    else:

        def step(state, x):
            new, opt_state = optimized(state["params"], state["opt_state"], x, optimizer)
            return {"params": new, "opt_state": opt_state}

        state = {"opt_state": whole, "params": split}
        step = jax.jit(step, out_shardings=jax.tree.map(lambda one: one.sharding, state))
        report = meshwright.inspect(step, state, X)
    found = [found for found in report.findings if "replicated" in found.kind]
    assert [one.kind for one in found] == ["replicated optimizer state"]
    assert found[0].bytes > 14_000_000

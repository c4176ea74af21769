"""What is read in a jaxpr: the user's line, and values that are equal on devices."""

import jax
import jax.numpy as jnp
import optax
import planted
from flax import linen as nn
from jax import P
from jax.sharding import AxisType

import meshwright
from meshwright.proof.inspection import lower
from meshwright.proof.inspection.jaxprs import replicas

MESH = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))


def mapped(body, **given):
    specs = {"in_specs": P("dp"), "out_specs": P("dp"), "check_vma": False} | given
    return jax.jit(jax.shard_map(body, mesh=MESH, **specs))


def ids(function, *args):
    return [found.id for found in meshwright.inspect(function, *args, mesh=MESH).findings]


X = planted.array(MESH, (64, 64), "dp")


def test_a_loop_that_scales_its_carry_is_read_in_a_few_iterations(monkeypatch):
    """The numbers that a value was divided by would have no end, in powers of 0.9 or of 2."""
    runs = []
    run = replicas._Reader.run
    monkeypatch.setattr(replicas._Reader, "run", lambda self, *args: runs.append(1) or run(self, *args))

    def decayed(x):
        step = lambda carry, _: (0.9 * carry + 2 * carry + carry / 4, None)  # noqa: E731
        return jax.lax.psum(jax.lax.scan(step, x, length=3)[0], "dp")

    assert ids(mapped(decayed, out_specs=P()), X) == []
    assert len(runs) < 20


def test_a_sum_of_equal_values_that_is_divided_later_is_a_mean():
    def mean(x):
        total = jax.lax.psum(jax.lax.pmean(x, "dp"), "dp")
        return jnp.sin(x) + jax.lax.fori_loop(0, 2, lambda _, y: y, total) / 8

    def twice(x):
        return jnp.sin(x) + jax.lax.psum(jax.lax.pmean(x, "dp"), "dp")

    assert (ids(mapped(mean), X), ids(mapped(twice), X)) == ([], ["reduced-twice"])


def test_of_what_a_ring_made_nothing_is_said():
    def gathered(x):
        parts = [x]
        for _ in range(7):
            parts.append(jax.lax.ppermute(parts[-1], "dp", [(i, (i + 1) % 8) for i in range(8)]))
        return sum(parts)

    assert ids(mapped(gathered, out_specs=P()), X) == []


def test_a_ring_that_multiplies_parts_of_a_weight_makes_what_all_hold_alike():
    """Each device multiplies what arrives by the rows that belong to it: all add the same products in the end."""
    ring = [(i, (i - 1) % 8) for i in range(8)]

    def multiplied(x, w):
        def part(i, x):
            return x @ jax.lax.dynamic_slice_in_dim(w, (jax.lax.axis_index("dp") + i) % 8 * 8, 8)

        def hop(carry, i):
            total, x = carry
            x = jax.lax.ppermute(x, "dp", ring)
            return (total + part(i, x), x), None

        return jax.lax.scan(hop, (part(0, x), x), jnp.arange(1, 8))[0][0]

    args = planted.array(MESH, (64, 64), None, "dp"), planted.array(MESH, (64, 64))
    assert ids(mapped(multiplied, in_specs=(P(None, "dp"), P()), out_specs=P()), *args) == []


def test_what_has_no_trace_but_lowers_is_read_too():
    """As `eqx.filter_jit` returns it."""

    class Lowers:
        def __call__(self, x):
            return mapped(lambda x: x + jax.lax.psum(jax.lax.pmax(x, "dp"), "dp"))(x)

        def lower(self, *args):
            return jax.jit(self.__call__).lower(*args)

    assert ids(Lowers(), X) == ["reduced-twice"]


def test_a_count_of_devices_is_meant():
    assert ids(mapped(lambda x: x / jax.lax.psum(jnp.ones((1, 1)), "dp")), X) == []


def test_a_mistake_in_a_layer_of_a_library_is_at_the_users_line():
    model = nn.Dense(128, param_dtype=jnp.float32)
    params = {"params": {"kernel": planted.array(MESH, (64, 128)), "bias": planted.array(MESH, (128,))}}

    def layer(params, x):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return optax.tree.norm(model.apply(params, x))

    narrow = planted.array(MESH, (64, 64), "dp", dtype=jnp.bfloat16)
    for found in meshwright.inspect(jax.jit(layer), params, narrow, mesh=MESH).findings:
        assert "test_inspection_jaxprs.py:" in found.source
        assert "site-packages" not in found.source


def test_a_jaxpr_that_cannot_be_read_is_noted(monkeypatch):
    def fail(traced):
        raise KeyError("a primitive")

    monkeypatch.setattr(lower, "read_mistakes", fail)
    report = meshwright.inspect(jnp.sin, X, mesh=MESH)
    assert any("jaxpr cannot be read (KeyError: 'a primitive')" in note for note in report.record.notes)

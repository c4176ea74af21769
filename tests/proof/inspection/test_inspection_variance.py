"""Along which axes values differ: small programs on 8 simulated devices, told by what the devices really hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.text import hlo_text
from meshwright.proof.inspection.variance import Variance

MESH = {"a": 2, "b": 2, "c": 2}


def mesh():
    return jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * 3)


def scanned(x):
    return jax.lax.scan(lambda h, _: (h + jax.lax.axis_index("b"), None), x, None, length=3)[0]


def looped(x):
    return jax.lax.while_loop(lambda h: h.sum() < 999, lambda h: 1.3 * h + jax.lax.axis_index("c"), x)


# Each row: what every device does with its shard of an array that `a` splits, and the axes the result differs along.
BODIES = [
    (lambda x: x + 1, "a"),
    (lambda x: jax.lax.psum(x, "a"), ""),
    (lambda x: jax.lax.psum(x, "b"), "a"),
    (lambda x: jax.lax.all_gather(x, "a", tiled=True), ""),
    (lambda x: jax.lax.psum_scatter(x, "b", tiled=True), "ab"),
    (lambda x: jax.lax.psum(x, "a") * jax.lax.axis_index("c"), "c"),
    (lambda x: x * (jax.lax.axis_index("b") + jax.lax.axis_index("c")), "abc"),
    (lambda x: jnp.where(jax.lax.axis_index("b") == 0, 1.0, 2.0) * jnp.ones((4, 4)), "b"),
    (lambda x: jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, "a"), jax.lax.axis_index("c"), 1), "c"),
    (lambda x: jax.lax.cond(jax.lax.axis_index("b") > 0, jnp.sin, jnp.cos, jax.lax.psum(x, "a")), "b"),
    (looped, "ac"),
    (scanned, "ab"),
    (lambda x: jax.lax.ppermute(x, "b", [(0, 1), (1, 0)]), "a"),
    (lambda x: jax.lax.ppermute(x, "b", [(0, 1)]), "ab"),
]


def mapped(body, out):
    return jax.shard_map(body, mesh=mesh(), in_specs=P("a"), out_specs=out, check_vma=False)


@pytest.mark.parametrize(("body", "axes"), BODIES)
def test_a_value_differs_along_the_axes_along_which_devices_hold_other_numbers(body, axes):
    x = jax.device_put(jnp.arange(1.0, 33.0).reshape(8, 4), jax.NamedSharding(mesh(), P("a")))
    every = P(("a", "b", "c"))
    run = jax.jit(mapped(lambda x: body(x)[None], every))
    held = np.asarray(run(x)).reshape(2, 2, 2, -1)
    really = "".join(axis for number, axis in enumerate(MESH) if (held != np.take(held, [0], axis=number)).any())
    assert really == axes, "the table is wrong"
    module = parse_hlo(hlo_text(run.lower(x).compile()))
    assert "".join(sorted(Variance(module, MESH).axes(module.root(module.entry)))) == axes


def test_an_argument_that_does_not_say_how_it_lies_may_differ_along_every_axis():
    text = (
        "HloModule m, num_partitions=8\n\nENTRY %main (p: f32[4]) -> f32[4] {\n  ROOT %p = f32[4]{0} parameter(0)\n}\n"
    )
    module = parse_hlo(text)
    assert Variance(module, MESH).axes(module.root(module.entry)) == set(MESH)
    assert Variance(module, MESH).copies(module.root(module.entry)) == ()

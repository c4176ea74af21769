"""When an all-reduce is a reduce-scatter or an all-gather in other words, and when it only looks like one."""
# ruff: noqa: E501 - HLO prints an instruction in a line

import jax
import jax.numpy as jnp
import pytest
import toy_programs as toys
from jax import P

from meshwright.hlo import PADDED, SLICED, SLICED_IN_PART, UNREAD, meant, parse_hlo, read_collectives
from meshwright.record import Collective

DEGREES = {"fsdp": 2, "tp": 4}


def share(x, axis, *, shift=0):
    """The rows of `x` that belong to this device's place along an axis."""
    size = x.shape[0] // jax.lax.axis_size(axis)
    place = (jax.lax.axis_index(axis) + shift) % jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(x, place * size, size)


def summed(x):
    return jax.lax.psum(x, "tp")


def sliced_behind_views(x):
    """Two uses of the same share, one behind a transpose and a conversion."""
    y = summed(x)
    other = share(y.astype(jnp.bfloat16).reshape(16, 2, 4).transpose(0, 2, 1), "tp")
    return share(y, "tp") + other.transpose(0, 2, 1).reshape(4, 8).astype(jnp.float32)


def sliced_in_a_loop(x):
    def body(carry, _):
        carry = jnp.sin(carry)
        return carry, share(summed(carry), "tp")

    return jax.lax.scan(body, x, None, length=3)[1].sum(0)


def sliced_by_the_counter(x):
    """As many tiles as devices in a group, but which one says the loop, not the device."""

    def body(total, i):
        return total + jax.lax.dynamic_slice_in_dim(jax.lax.psum(total + x[:4] + x, "tp"), i * 4, 4), None

    return jax.lax.scan(lambda t, i: body(t, i), jnp.zeros((4, 8)), jnp.arange(4))[0]


def sliced_in_a_loop_by_its_counter(x):
    def body(carry, i):
        carry = jnp.sin(carry)
        return carry, jax.lax.dynamic_slice_in_dim(summed(carry), i * 4, 4)

    return jax.lax.scan(body, x, jnp.arange(4))[1].sum(0)


# Each row: what each device does with its [16, 8], and the note on the one all-reduce over tp that is in it.
PROGRAMS = [
    (lambda x: share(summed(x), "tp"), SLICED),
    (lambda x: share(summed(x), "tp", shift=1), SLICED),
    (sliced_behind_views, SLICED),
    (sliced_in_a_loop, SLICED),
    (lambda x: share(summed(x), "fsdp"), ""),  # along another axis
    (lambda x: share(share(summed(x), "tp"), "fsdp"), ""),  # only a part of the share
    (lambda x: summed(x), ""),  # not at all
    (lambda x: share(summed(x), "tp") + summed(x)[:4], ""),  # and used otherwise
    (lambda x: share(summed(x), "tp") * summed(x).sum(), ""),
    (lambda x: jax.lax.dynamic_slice_in_dim(summed(x), 4, 4), ""),  # the same share on all devices
    (lambda x: jax.lax.dynamic_slice_in_dim(summed(x), jax.lax.axis_index("tp") * 3, 4), ""),  # overlapping shares
    (lambda x: jax.lax.dynamic_slice_in_dim(summed(x), (jax.lax.axis_index("tp") // 2) * 8, 8), ""),  # two have one
    (lambda x: share(summed(x), "tp") + share(summed(x), "tp", shift=1), ""),  # two different shares
    (sliced_in_a_loop_by_its_counter, ""),
]  # fmt: skip


@pytest.mark.parametrize(("function", "note"), PROGRAMS)
def test_an_all_reduce_is_a_reduce_scatter_only_where_every_use_is_this_devices_share(function, note):
    lowered = toys.per_device(toys.cpu_mesh(**DEGREES), function, (16, 8), specs=[P()], out=P())
    traffic = read_collectives(parse_hlo(lowered.compile().as_text()), {"fsdp": 2, "tp": 4})
    assert [(c.kind, c.axes, c.note) for c in traffic.collectives] == [("all-reduce", ("tp",), note)]


def test_a_sum_over_two_axes_that_is_sliced_along_the_outer_one_is_both():
    def function(x):
        return share(jax.lax.psum(x, ("fsdp", "tp")), "fsdp")

    lowered = toys.per_device(toys.cpu_mesh(**DEGREES), function, (16, 8), specs=[P()], out=P())
    (found,) = read_collectives(parse_hlo(lowered.compile().as_text()), DEGREES).collectives
    assert found.note == SLICED_IN_PART.format(scattered="fsdp", rest="tp")


def padded(x, *, size=16, fill=0.0, reduce=jax.lax.psum):
    place = jax.lax.axis_index("tp") * x.shape[0]
    return reduce(jax.lax.dynamic_update_slice_in_dim(jnp.full((size, 8), fill), x, place, 0), "tp")


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (padded, PADDED),
        (lambda x: padded(x, fill=1.0), ""),  # not into zeros
        (lambda x: padded(x, size=32), ""),  # a part of the array stays empty
        (lambda x: jax.lax.psum(jnp.zeros((16, 8)).at[:4].set(x), "tp"), ""),  # all into the same place
        (lambda x: padded(x, reduce=jax.lax.pmax), ""),  # no sum: what is negative would be lost
    ],
)
def test_an_all_reduce_is_an_all_gather_only_where_every_device_writes_its_own_tile_into_zeros(function, note):
    lowered = toys.per_device(toys.cpu_mesh(**DEGREES), function, (16, 8), specs=[P("tp")], out=P())
    traffic = read_collectives(parse_hlo(lowered.compile().as_text()), DEGREES)
    assert [(c.kind, c.axes, c.note) for c in traffic.collectives] == [("all-reduce", ("tp",), note)]


TABLE = """HloModule m, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

ENTRY %main (p: f32[8,4], q: f32[8,4]) -> f32[2,4] {{
  %p = f32[8,4]{{1,0}} parameter(0)
  %q = f32[8,4]{{1,0}} parameter(1)
  %id = u32[] partition-id()
  %table = s32[8]{{0}} constant({table})
  %row = s32[1]{{0}} dynamic-slice(%table, %id), dynamic_slice_sizes={{1}}
  %offset = s32[] bitcast(%row)
  %zero = s32[] constant(0)
  %sums = (f32[8,4]{{1,0}}, f32[8,4]{{1,0}}) all-reduce(%p, %q), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, to_apply=%add
  %first = f32[8,4]{{1,0}} get-tuple-element(%sums), index=0
  %second = f32[8,4]{{1,0}} get-tuple-element(%sums), index=1
  %cut = f32[2,4]{{1,0}} dynamic-slice(%first, %offset, %zero), dynamic_slice_sizes={{2,4}}
  %whole = f32[2,4]{{1,0}} slice(%second), slice={{[0:2], [0:4]}}
  ROOT %out = f32[2,4]{{1,0}} add(%cut, %whole)
}}
"""


@pytest.mark.parametrize(
    ("table", "note"),
    [
        ("{0, 2, 4, 6, 0, 2, 4, 6}", SLICED),
        ("{6, 4, 2, 0, 0, 2, 4, 6}", SLICED),
        ("{0, 2, 4, 4, 0, 2, 4, 6}", ""),
        ("{0, 0, 2, 2, 4, 4, 6, 6}", ""),
        ("{0, 2, 4, 8, 0, 2, 4, 6}", ""),
        ("{...}", UNREAD),
    ],
)
def test_each_array_of_a_combined_all_reduce_is_judged_by_itself(table, note):
    traffic = read_collectives(parse_hlo(TABLE.format(table=table)), DEGREES)
    notes = [c.note for c in traffic.collectives]
    assert notes == ([note, ""] if note else [""])
    assert sum(c.bytes for c in traffic.collectives) == 2 * 4 * 32


def test_what_a_collective_is_meant_as_follows_from_its_note():
    def one(note: str, kind: str = "all-reduce") -> Collective:
        return Collective(kind=kind, axes=("dp", "fsdp"), phase="backward", bytes=800, note=note)

    degrees = {"dp": 2, "fsdp": 4}
    assert meant(one(""), degrees) == (one(""),)
    assert [(c.kind, c.bytes) for c in meant(one(SLICED), degrees)] == [("reduce-scatter", 800)]
    assert [(c.kind, c.bytes) for c in meant(one(f"{PADDED}; promoted from bf16 by the CPU compiler"), degrees)] == [
        ("all-gather", 400)
    ]
    parts = meant(one(SLICED_IN_PART.format(scattered="fsdp", rest="dp")), degrees)
    assert [(c.kind, c.axes, c.bytes) for c in parts] == [
        ("reduce-scatter", ("fsdp",), 800),
        ("all-reduce", ("dp",), 200),
    ]

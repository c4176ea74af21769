"""When an all-reduce is a reduce-scatter or an all-gather in other words, and when it only looks like one."""
# ruff: noqa: E501 - HLO prints an instruction in a line

import jax
import jax.numpy as jnp
import pytest
import toy_programs as toys
from jax import P

from meshwright.description.hlo.canonical import canonicalize_collective
from meshwright.description.hlo.collectives import read_collectives
from meshwright.description.hlo.parser import parse_hlo
from meshwright.record import Collective, LoweredAs, Lowering

PARTLY_SLICED = Lowering(form=LoweredAs.PARTLY_SLICED_ALL_REDUCE, scatter_axes=("fsdp",), reduce_axes=("tp",))
SLICED, UNREADABLE = LoweredAs.SLICED_ALL_REDUCE, LoweredAs.UNREADABLE_SLICE
DEGREES = {"fsdp": 2, "tp": 4}


def forms(collective):
    return [lowering.form for lowering in collective.lowerings]


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


# Each row: what each device does with its [16, 8], and the lowering of the one all-reduce over tp that is in it.
PROGRAMS = [
    (lambda x: share(summed(x), "tp"), SLICED),
    (lambda x: share(summed(x), "tp", shift=1), SLICED),
    (sliced_behind_views, SLICED),
    (sliced_in_a_loop, SLICED),
    (lambda x: share(summed(x), "fsdp"), None),  # along another axis
    (lambda x: share(share(summed(x), "tp"), "fsdp"), None),  # only a part of the share
    (lambda x: summed(x), None),  # not at all
    (lambda x: share(summed(x), "tp") + summed(x)[:4], None),  # and used otherwise
    (lambda x: share(summed(x), "tp") * summed(x).sum(), None),
    (lambda x: jax.lax.dynamic_slice_in_dim(summed(x), 4, 4), None),  # the same share on all devices
    (lambda x: jax.lax.dynamic_slice_in_dim(summed(x), jax.lax.axis_index("tp") * 3, 4), None),  # overlapping shares
    (lambda x: jax.lax.dynamic_slice_in_dim(summed(x), (jax.lax.axis_index("tp") // 2) * 8, 8), None),  # two have one
    (lambda x: share(summed(x), "tp") + share(summed(x), "tp", shift=1), None),  # two different shares
    (sliced_in_a_loop_by_its_counter, None),
]  # fmt: skip


@pytest.mark.parametrize(("function", "form"), PROGRAMS)
def test_an_all_reduce_is_a_reduce_scatter_only_where_every_use_is_this_devices_share(function, form):
    lowered = toys.per_device(toys.cpu_mesh(**DEGREES), function, (16, 8), specs=[P()], out=P())
    traffic = read_collectives(parse_hlo(lowered.compile().as_text()), {"fsdp": 2, "tp": 4})
    assert [(c.kind, c.axes, forms(c)) for c in traffic.collectives] == [
        ("all-reduce", ("tp",), [form] if form else [])
    ]


def test_a_sum_over_two_axes_that_is_sliced_along_the_outer_one_is_both():
    def function(x):
        return share(jax.lax.psum(x, ("fsdp", "tp")), "fsdp")

    lowered = toys.per_device(toys.cpu_mesh(**DEGREES), function, (16, 8), specs=[P()], out=P())
    (found,) = read_collectives(parse_hlo(lowered.compile().as_text()), DEGREES).collectives
    assert found.lowerings == (PARTLY_SLICED,)


def padded(x, *, size=16, fill=0.0, reduce=jax.lax.psum):
    place = jax.lax.axis_index("tp") * x.shape[0]
    return reduce(jax.lax.dynamic_update_slice_in_dim(jnp.full((size, 8), fill), x, place, 0), "tp")


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (padded, LoweredAs.PADDED_ALL_REDUCE),
        (lambda x: padded(x, fill=1.0), None),  # not into zeros
        (lambda x: padded(x, size=32), None),  # a part of the array stays empty
        (lambda x: jax.lax.psum(jnp.zeros((16, 8)).at[:4].set(x), "tp"), None),  # all into the same place
        (lambda x: padded(x, reduce=jax.lax.pmax), None),  # no sum: what is negative would be lost
    ],
)
def test_an_all_reduce_is_an_all_gather_only_where_every_device_writes_its_own_tile_into_zeros(function, form):
    lowered = toys.per_device(toys.cpu_mesh(**DEGREES), function, (16, 8), specs=[P("tp")], out=P())
    traffic = read_collectives(parse_hlo(lowered.compile().as_text()), DEGREES)
    assert [(c.kind, c.axes, forms(c)) for c in traffic.collectives] == [
        ("all-reduce", ("tp",), [form] if form else [])
    ]


ON_SPARSE_CORES = """HloModule m, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%called (operand: f32[16,8], ready: token[]) -> f32[16,8] {
  %ready = token[] parameter(1)
  %operand = f32[16,8] parameter(0)
  ROOT %all-reduce = f32[16,8] all-reduce(%operand), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
}, execution_thread="sparsecore"

ENTRY %main (shard: f32[4,8]) -> f32[16,8] {
  %shard = f32[4,8] parameter(0)
  %zero = f32[] constant(0)
  %zeros = f32[16,8] broadcast(%zero), dimensions={}
  %id = u32[] partition-id()
  %four = u32[] constant(4)
  %place = u32[] remainder(%id, %four)
  %row = u32[] multiply(%place, %four)
  %none = u32[] constant(0)
  %padded = f32[16,8] dynamic-update-slice(%zeros, %shard, %row, %none)
  %ready = token[] after-all()
  %start = ((f32[16,8], token[]), f32[16,8]) call-start(%padded, %ready), to_apply=%called
  ROOT %done = f32[16,8] call-done(%start)
}
"""


def test_a_gather_as_an_all_reduce_is_found_in_a_call_of_its_own():
    """On TPU7x an all-reduce runs on SparseCores, in a computation that a `call-start` calls."""
    (found,) = read_collectives(parse_hlo(ON_SPARSE_CORES), DEGREES).collectives
    assert (found.kind, found.axes, forms(found)) == ("all-reduce", ("tp",), [LoweredAs.PADDED_ALL_REDUCE])


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
    ("table", "form"),
    [
        ("{0, 2, 4, 6, 0, 2, 4, 6}", SLICED),
        ("{6, 4, 2, 0, 0, 2, 4, 6}", SLICED),
        ("{0, 2, 4, 4, 0, 2, 4, 6}", None),
        ("{0, 0, 2, 2, 4, 4, 6, 6}", None),
        ("{0, 2, 4, 8, 0, 2, 4, 6}", None),
        ("{...}", UNREADABLE),
    ],
)
def test_each_array_of_a_combined_all_reduce_is_judged_by_itself(table, form):
    traffic = read_collectives(parse_hlo(TABLE.format(table=table)), DEGREES)
    assert [forms(c) for c in traffic.collectives] == ([[form], []] if form else [[]])
    assert sum(c.bytes for c in traffic.collectives) == 2 * 4 * 32


def test_what_a_collective_stands_for_follows_from_its_lowering():
    def one(*lowerings: Lowering) -> Collective:
        return Collective(kind="all-reduce", axes=("fsdp", "tp"), phase="backward", bytes=800, lowerings=lowerings)

    def canonical(*lowerings: Lowering) -> list[tuple]:
        return [(c.kind, c.axes, c.bytes) for c in canonicalize_collective(one(*lowerings), DEGREES)]

    assert canonicalize_collective(one(), DEGREES) == (one(),)
    assert canonical(Lowering(form=SLICED)) == [("reduce-scatter", ("fsdp", "tp"), 800)]
    padded = Lowering(form=LoweredAs.PADDED_ALL_REDUCE, promoted_from="bf16")
    assert canonical(padded) == [("all-gather", ("fsdp", "tp"), 400)]
    assert canonical(PARTLY_SLICED) == [("reduce-scatter", ("fsdp",), 800), ("all-reduce", ("tp",), 400)]

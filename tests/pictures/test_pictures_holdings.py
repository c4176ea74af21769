"""What each device holds by our own count is what JAX says it holds."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.array_parser import parse_array
from meshwright.description.notation.legality import Sizes
from meshwright.errors import MeshwrightError
from meshwright.pictures.drawings.holdings import holdings_of

MESHES = [(1,), (8,), (2, 2), (2, 4), (4, 2), (1, 8), (2, 2, 2), (2, 1, 4), (3, 2), (4, 1, 2)]
AXES = "XYZ"
DIMS = "IJKL"


@st.composite
def placed_arrays(draw):
    """A random legal array of rank 1 to 4 on a random mesh of up to three axes, and its sizes."""
    degrees = dict(zip(AXES, draw(st.sampled_from(MESHES)), strict=False))
    dims = DIMS[: draw(st.integers(1, 4))]
    axes = dict.fromkeys(dims, ())
    for axis in draw(st.permutations(list(degrees))):
        dim = draw(st.sampled_from([*dims, None]))
        if dim:
            axes[dim] += (axis,)
    parts = {dim: math.prod(degrees[axis] for axis in axes[dim]) for dim in dims}
    sizes = {dim: parts[dim] * draw(st.integers(1, 3)) for dim in dims}
    return ShardedArray("A", tuple(dims), tuple(axes.values())), Sizes(degrees=degrees, dims=sizes)


def jax_sharding(array, degrees):
    devices = np.array(jax.devices()[: math.prod(degrees.values())]).reshape(tuple(degrees.values()))
    return NamedSharding(Mesh(devices, tuple(degrees)), P(*(axes or None for axes in array.axes)))


@given(placed_arrays())
@settings(max_examples=150, deadline=None)
def test_every_device_holds_the_block_that_jax_gives_it(placed):
    array, sizes = placed
    shape = tuple(sizes.dims[dim] for dim in array.dims)
    sharding = jax_sharding(array, sizes.degrees)
    expected = {
        device.id: tuple(part.indices(size)[:2] for part, size in zip(block, shape, strict=True))
        for device, block in sharding.devices_indices_map(shape).items()
    }
    holdings = holdings_of(array, sizes)
    assert {holder.device: holder.block for holder in holdings.holders} == expected
    assert holdings.local_shape == sharding.shard_shape(shape)
    assert [tuple(holder.coordinates.values()) for holder in holdings.holders] == list(
        np.ndindex(sharding.mesh.devices.shape)
    )


@given(placed_arrays())
@settings(max_examples=80, deadline=None)
def test_every_element_is_held_by_as_many_devices_as_there_are_copies(placed):
    array, sizes = placed
    holdings = holdings_of(array, sizes)
    held = np.zeros(holdings.shape, int)
    for holder in holdings.holders:
        held[tuple(slice(*span) for span in holder.block)] += 1
    assert (held == holdings.copies).all()
    assert holdings.copies == math.prod(sizes.degrees[axis] for axis in holdings.copied_axes)
    assert sorted(itertools.chain(*holdings.shards.values())) == list(range(len(holdings.holders)))


def test_devices_along_an_unreduced_axis_hold_different_values_and_are_no_copies():
    sizes = Sizes(degrees={"X": 4, "Y": 2}, dims={"I": 8, "K": 8})
    holdings = holdings_of(parse_array("C[I, K]{U_X}"), sizes)
    assert (len(holdings.shards), holdings.copies, holdings.copied_axes) == (1, 2, ("Y",))


def test_a_scalar_is_on_every_device():
    holdings = holdings_of(parse_array("C[]"), Sizes(degrees={"X": 2, "Y": 2}, dims={}))
    assert holdings.shards == {(): (0, 1, 2, 3)}
    assert holdings.block_text(()) == "C"


def test_bytes_are_of_the_dtype_and_of_one_device():
    sizes = Sizes(degrees={"X": 2}, dims={"I": 8, "J": 3}, element_bytes=0.5)
    assert holdings_of(parse_array("A[I_X, J]"), sizes).bytes_per_device == 6


def test_json_says_who_holds_what():
    data = holdings_of(parse_array("A[I_X, J]"), Sizes(degrees={"X": 2}, dims={"I": 8, "J": 3})).to_json()
    assert data["devices"][1] == {"device": 1, "coordinates": {"X": 1}, "holds": [[4, 8], [0, 3]]}
    assert (data["num_shards"], data["copies"], data["bytes_per_device"]) == (2, 1, 24)


def test_a_mesh_beyond_all_machines_is_refused_before_it_fills_the_memory():
    with pytest.raises(MeshwrightError, match="1,000,000,000 devices is too large"):
        holdings_of(parse_array("A[I]"), Sizes(degrees={"X": 10**9}, dims={"I": 8}))

"""Ways to sharded products carried out in every mode of JAX: exact, and compiled to the collectives inferred."""

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.expression import Chain, Einsum, Stage
from meshwright.description.notation.inference import infer
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.parser import parse
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.fuse_matmuls import overlapped_collectives
from meshwright.execution.runtime.modes import MODES
from meshwright.execution.runtime.product import compile_product, make_product_mesh
from meshwright.proof.verification.products import check_product

DIMS = {"I": 16, "J": 32, "K": 16, "L": 8}
MESH = {"X": 2, "Y": 4}


def inferred(text, degrees=MESH):
    return infer(parse(text, axes=degrees), Sizes(degrees=degrees, dims=DIMS, element_bytes=4))


def assert_is_exact_and_as_inferred(inference, mode, way=None):
    found = check_product(inference, mode=mode, implementation=way)
    assert found.error == 0
    assert found.is_as_inferred, (
        f"{way or inference.implementation}: compiled {found.compiled}, inferred {found.inferred}"
    )


PRODUCTS = [
    # Sums that begin, pass through or end as sums.
    "AllReduce_X(A[I, J]{U_X}) -> A[I, J]",
    "ReduceScatter_{X,J}(A[I, J]{U_XY}) -> A[I, J_X]{U_Y}",
    "A[I, J]{U_XY} -> A[I_X, J_Y]",
    "A[I]{U_Y} -> A[I_YX]",
    "A[I, J_XY] @ B[J_XY, K] -> C[I_Y, K_X]",
    "A[I, J_XY] @ B[J_XY, K] -> C[I, K]{U_Y}",
    # Sums over a dim of one operand alone, on which `jnp.einsum` would not wait for the product.
    "A[I_X, J] @ B[K] -> C[J, K]",
    "A[I_X, J_Y] @ B[K_X] -> C[J_Y]",
    # Several axes in another order than the mesh's, and from dim to dim.
    "A[I_YX, J] @ B[J, K_Y] -> C[I_YX, K]",
    "A[I_YX, J] -> A[I, J_XY]",
    # Batch dims, three operands, and a chain that says how.
    "A[L_X, I, J_Y] @ B[L_X, J_Y, K] -> C[L_X, I, K_Y]",
    "In[I_X, J] @ Win[J, K_Y] @ Wout[K_Y, L_X] -> Out[I_X, L]",
    "I J_X @ J_X K = I K -> AR over X -> I K -> I K_X",
    "A[I_X] @ B[J] -> C[I_X, J] -> AG over X -> C[I, J]",
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("text", PRODUCTS)
def test_a_way_is_carried_out_with_the_collectives_inferred(text, mode):
    assert_is_exact_and_as_inferred(inferred(text), mode)


OVERLAPPED = [
    ("A[I_X, J] @ B[J, K_X] -> C[I_X, K]", [("collective-permute", ("X",), 4 * 32 * 16 // 2)]),
    ("A[I, J_Y] @ B[J_Y, K] -> C[I_Y, K]", [("collective-permute", ("Y",), 4 * 16 * 16 * 3 // 4)]),
    # The larger of two gathers.
    ("A[I_X, J_Y] @ B[J_X, K_Y] -> C[I_X, K_Y]", [("collective-permute", ("Y",), 4 * 8 * 32 * 3 // 4)]),
    # Every device of X would repeat the product: the gather hides behind nothing.
    ("A[I_X, J] @ B[J, K] -> C[I, K]", [("all-gather", ("X",), 4 * 16 * 16)]),
    ("A[I, J_X] @ B[J_X, K] -> C[I, K]", [("all-reduce", ("X",), 4 * 16 * 16)]),
]


@pytest.mark.parametrize(("text", "expected"), OVERLAPPED)
def test_the_largest_collective_beside_a_product_becomes_a_ring(text, expected):
    inference = inferred(text)
    found = overlapped_collectives(inference.implementation, inference.sizes)
    assert [(move.kind, move.axes, move.bytes) for move in found][: len(expected)] == expected
    assert len(found) == len(inference.implementation.collectives)
    assert_is_exact_and_as_inferred(inference, "overlapped")


@pytest.mark.parametrize("mode", MODES)
def test_a_result_that_stays_a_sum_is_taken_after_the_program(mode):
    inference = inferred("A[I, J_X] @ B[J_X, K] -> C[I, K]{U_X}")
    left, right = np.ones((16, 32), np.float32), np.ones((32, 16), np.float32)
    program = compile_product(inference, make_product_mesh(MESH), mode=mode)
    assert "all-reduce" not in program.hlo
    np.testing.assert_array_equal(np.asarray(program.run(left, right)), left @ right)


def test_the_result_lies_as_asked_for():
    inference = inferred("A[I, J_X] @ B[J_X, K] -> C[I_Y, K_X]")
    mesh = make_product_mesh(MESH)
    found = compile_product(inference, mesh).run(np.ones((16, 32), np.float32), np.ones((32, 16), np.float32))
    assert found.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P("Y", "X")), 2)


def test_another_mesh_or_other_arrays_are_one_clear_error():
    inference, mesh = inferred("A[I, J_X] @ B[J_X, K] -> C[I, K]"), make_product_mesh(MESH)
    with pytest.raises(MeshwrightError, match="inferred for mesh X=2,Y=4; this one is X=8"):
        compile_product(inference, make_product_mesh({"X": 8}))
    with pytest.raises(MeshwrightError, match="2 operands; 1 are given"):
        compile_product(inference, mesh).run(np.ones((16, 32)))
    with pytest.raises(MeshwrightError, match=r"B\[J_X, K\] has the shape \[32, 16\]; the array given has \[16, 32\]"):
        compile_product(inference, mesh).run(*[np.ones((16, 32), np.float32)] * 2)
    with pytest.raises(MeshwrightError, match="mesh X=16 needs 16 devices; there are 8"):
        make_product_mesh({"X": 16})


@st.composite
def arrays(draw, name, dims, axes, may_be_sum=False):
    """An array whose axes lie anywhere, in any order."""
    places = [*range(len(dims)), None, *(["U"] if may_be_sum else [])]
    order = draw(st.permutations(axes))
    where = {axis: draw(st.sampled_from(places)) for axis in order}
    on_dims = tuple(tuple(axis for axis in order if where[axis] == place) for place in range(len(dims)))
    return ShardedArray(name, dims, on_dims, tuple(axis for axis in order if where[axis] == "U"))


def some_dims():
    return st.lists(st.sampled_from("IJKL"), unique=True, min_size=1, max_size=3).map(tuple)


@st.composite
def expressions(draw, axes):
    """A resharding, or a product of two or three arrays of any dims, any of which may be summed."""
    count = draw(st.sampled_from([1, 2, 2, 3]))
    operands = tuple(draw(arrays("ABC"[n], draw(some_dims()), axes, may_be_sum=n == 0)) for n in range(count))
    if count == 1:
        return Chain(operands[0], (Stage(None, (), draw(arrays("A", operands[0].dims, axes))),))
    every = list(dict.fromkeys(dim for operand in operands for dim in operand.dims))
    kept = tuple(draw(st.lists(st.sampled_from(every), unique=True, max_size=3)))
    return Einsum(operands, draw(st.none() | arrays("R", kept, axes, may_be_sum=True)))


MESHES = [{"X": 2, "Y": 2, "Z": 2}, {"X": 4, "Y": 2, "Z": 1}, {"X": 2, "Y": 4}, {"X": 8}, {"X": 2, "Y": 3}]


@st.composite
def ways(draw):
    """An inference from a random expression on a mesh of up to 8 devices, and one of its ways."""
    degrees = draw(st.sampled_from(MESHES))
    dims = {"I": 12, "J": 24, "K": 12, "L": 6} if 3 in degrees.values() else DIMS
    try:
        inference = infer(draw(expressions(tuple(degrees))), Sizes(degrees=degrees, dims=dims, element_bytes=4))
    except MeshwrightError as error:
        assume("cannot split" not in str(error) and "cannot stay a sum" not in str(error))
        raise
    return inference, draw(st.sampled_from(inference.implementations[:6]))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(ways())
def test_any_way_of_a_random_expression_is_carried_out_with_the_collectives_inferred(mode, drawn):
    inference, way = drawn
    assert_is_exact_and_as_inferred(inference, mode, way)


@pytest.mark.matrix
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(ways())
def test_60_ways_are_carried_out(mode, drawn):
    inference, way = drawn
    assert_is_exact_and_as_inferred(inference, mode, way)

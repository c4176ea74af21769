"""Sharded products in every mode of JAX: equal to one device, and compiled to the collectives that were inferred."""

from dataclasses import replace

import pytest

from meshwright.description.notation.inference import infer
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.parser import parse
from meshwright.proof.verification.products import check_product

MODES = ("auto", "explicit", "manual")
DIMS = {"I": 16, "J": 32, "K": 16, "L": 8}
TOLERANCE = 2e-6
"""float32 sums of 32 random numbers, against float64."""

PRODUCTS = [
    ("A[I_X, J] @ B[J, K_Y] -> C[I_X, K_Y]", {"X": 4, "Y": 2}),
    ("A[I, J_X] @ B[J, K] -> C[I, K]", {"X": 8}),
    ("A[I, J_X] @ B[J_X, K] -> C[I, K]", {"X": 4}),
    ("A[I, J_X] @ B[J_X, K] -> C[I_X, K]", {"X": 4, "Y": 2}),
    ("A[I, J_X] @ B[J_X, K] -> C[I, K]{U_X}", {"X": 2}),
    ("A[I_X, J] @ B[J, K_X] -> C[I_X, K]", {"X": 4}),
    ("A[I_X, J] @ B[J, K_X] -> C[I, K_X]", {"X": 4}),
    ("A[I_X, J] @ B[J, K] -> C[I, K]", {"X": 4}),
    ("A[I_XY, J] @ B[J, K] -> C[I, K]", {"X": 2, "Y": 4}),
    ("In[I_X, J_Y] @ Win[J_X, K_Y] -> Out[I_X, K_Y]", {"X": 2, "Y": 2}),
    ("A[I_X, J_Y] @ B[J_Y, K_Z] @ C[K_Z, L] -> D[I_X, L_Y]", {"X": 2, "Y": 2, "Z": 2}),
    ("A[L_X, I, J] @ B[L_X, J, K_Y] -> C[L_X, I, K]", {"X": 2, "Y": 4}),
    ("A[I_X, J] -> A[I, J_X]", {"X": 4}),
    ("A[I_XY, J] -> A[I_X, J_Y]", {"X": 2, "Y": 2}),
    ("AllGather_X(A[I_X, J]) -> A[I, J]", {"X": 8}),
    ("I J_x @ J_x K = I K -> RS over x -> I K_x", {"x": 4}),
]


def inferred(text, degrees):
    sizes = Sizes(degrees=degrees, dims=DIMS, element_bytes=4)
    return infer(parse(text, axes=degrees), sizes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("text", "degrees"), PRODUCTS)
def test_a_product_is_computed_with_the_collectives_inferred(text, degrees, mode):
    found = check_product(inferred(text, degrees), mode=mode)
    assert found.error < TOLERANCE
    assert found.is_as_inferred, f"compiled {found.compiled}, inferred {found.inferred}"


def test_a_collective_more_or_other_bytes_than_inferred_are_seen():
    found = check_product(inferred("A[I, J_X] @ B[J_X, K] -> C[I, K]", {"X": 4}), mode="manual")
    (reduced,) = found.compiled
    assert found.is_as_inferred
    assert not replace(found, inferred=()).is_as_inferred
    assert not replace(found, inferred=(replace(reduced, bytes=reduced.bytes - 4),)).is_as_inferred

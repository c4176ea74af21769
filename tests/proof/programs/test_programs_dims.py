"""Dims are united as a program shows them to be the same, and split where a reshape meets only a part."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.proof.programs.dims import Dims


def sizes(dims, dim):
    return [dims.size((atom,)) for atom in dims.atoms(dim)]


def test_united_dims_are_one():
    dims = Dims()
    first, second, third = dims.new(8), dims.new(8), dims.new(8)
    assert dims.unite(first, second)
    assert dims.atoms(first) == dims.atoms(second) != dims.atoms(third)


def test_a_dim_splits_into_the_parts_it_meets_for_all_that_are_united_with_it():
    dims = Dims()
    fused, other, parts, heads, width = dims.new(3072), dims.new(3072), dims.new(3), dims.new(16), dims.new(64)
    dims.unite(fused, other)
    assert dims.unite(fused, (*parts, *heads, *width))
    assert sizes(dims, other) == [3, 16, 64]
    assert dims.atoms(other)[1] == dims.atoms(heads)[0]


def test_parts_that_do_not_divide_are_not_united():
    dims = Dims()
    assert not dims.unite(dims.new(6), (*dims.new(4), *dims.new(2)))


def test_a_reason_not_to_split_holds_for_all_that_are_united_later():
    dims = Dims()
    first, second = dims.new(4), dims.new(4)
    dims.bar(first, "a loop")
    dims.unite(second, first)
    assert dims.why_barred() == {dims.atoms(second)[0]: "a loop"}


@given(st.lists(st.integers(2, 5), min_size=1, max_size=4), st.data())
def test_any_grouping_of_factors_meets_any_other(factors, data):
    """A reshape of [a, b, c, …] grouped at some places, and of the same grouped at others, agree on the factors."""
    dims = Dims()
    atoms = [dims.new(size) for size in factors]

    def grouped():
        cuts = sorted(data.draw(st.sets(st.integers(1, len(factors) - 1)))) if len(factors) > 1 else []
        edges = [0, *cuts, len(factors)]
        found = []
        for start, end in pairwise(edges):
            found.append(dims.new(math.prod(factors[start:end])))
        return tuple(atom for dim in found for atom in dim)

    one, other = grouped(), grouped()
    whole = tuple(atom for dim in atoms for atom in dim)
    assert dims.unite(one, whole)
    assert dims.unite(other, whole)
    assert sizes(dims, one) == sizes(dims, other) == factors
    assert dims.atoms(one) == dims.atoms(other)


@pytest.mark.parametrize("size", [1, 2])
def test_a_dim_of_one_element_has_no_atoms(size):
    assert len(Dims().new(size)) == size - 1

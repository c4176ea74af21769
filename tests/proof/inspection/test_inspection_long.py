"""In a program of 200 lines one mistake is found, as one finding, and no other; without it there is none."""

import jax
import long_program
import pytest
from jax.sharding import AxisType

import meshwright

MESH = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
SHORT = ("moments split along another dim",)
CASES = [
    pytest.param(mistake, marks=[pytest.mark.matrix] * (mistake not in SHORT), id=mistake)
    for mistake in long_program.MISTAKES
]


def found(mistake, **given):
    function, args = long_program.make(MESH, mistake)
    with jax.numpy_dtype_promotion("standard"):
        return meshwright.inspect(function, *args, mesh=MESH, **given).findings


def test_the_program_as_it_should_be_has_no_finding():
    assert found("") == ()


@pytest.mark.parametrize("mistake", CASES)
def test_a_mistake_is_the_only_finding(mistake):
    (finding,) = found(mistake)
    assert finding.id == long_program.MISTAKES[mistake]


@pytest.mark.matrix
def test_mistakes_in_the_jaxpr_come_from_the_process_that_compiles_too():
    (here,), (there,) = found("scaled by a NumPy number"), found("scaled by a NumPy number", on="cpu:8")
    assert (here.id, here.evidence, here.source) == (there.id, there.evidence, there.source)
    assert "long_program.py:" in here.source

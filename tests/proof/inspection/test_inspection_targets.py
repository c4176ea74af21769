"""Mistakes that only a target shows: planted ones found by its own compiler, and their twins without a finding."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import planted
import pytest
from jax.sharding import AbstractMesh, AxisType

import meshwright
from meshwright.errors import MeshwrightError


class Target(NamedTuple):
    """A program for some hardware and mesh, and the same without its mistake; the finding it must have."""

    kind: str
    program: Any
    hardware: str
    mistaken: tuple[dict[str, int], dict[str, Any]]
    clean: tuple[dict[str, int], dict[str, Any]]


V5E, H100 = "v5e:2x4", "h100:16"
DP8, TP8, DP_TP = {"dp": 8}, {"tp": 8}, {"dp": 2, "tp": 4}
TP_OUTERMOST, TP_INNERMOST = {"tp": 2, "dp": 8}, {"dp": 8, "tp": 2}

TARGETS = [
    Target("exposed communication", planted.waits, V5E, (TP8, {"for_nothing": True}), (TP8, {"for_nothing": False})),
    Target("padding", planted.small_matrices, V5E, (DP8, {"size": 17}), (DP8, {"size": 128})),
    Target("repeated work", planted.transformer, V5E, (DP_TP, {"applied": False}), (DP_TP, {"applied": True})),
    Target("mesh axes on slow links", planted.row_and_column, H100, (TP_OUTERMOST, {}), (TP_INNERMOST, {})),
]  # fmt: skip

PACKAGES = {"v5e": "libtpu", "h100": "jax_cuda13_plugin"}


def inspection(target, degrees, choices):
    pytest.importorskip(PACKAGES[target.hardware.partition(":")[0]])
    mesh = AbstractMesh(tuple(degrees.values()), tuple(degrees), axis_types=(AxisType.Auto,) * len(degrees))
    function, args = target.program(mesh, **choices)
    return meshwright.inspect(function, *args, mesh=mesh, on=target.hardware)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.program.__name__)
def test_a_planted_mistake_is_found_on_its_target_and_its_twin_is_clean(target):
    mistaken, clean = (inspection(target, *which) for which in (target.mistaken, target.clean))
    found = [finding for finding in mistaken.findings if finding.kind == target.kind]
    assert found
    assert all(finding.cost_seconds > 0 for finding in found)
    assert clean.findings == ()


@pytest.mark.slow
def test_a_sum_between_slices_is_told_beside_those_within():
    pytest.importorskip("libtpu")
    mesh = AbstractMesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    function, args = planted.transformer(mesh, applied=True)
    found = meshwright.inspect(function, *args, on="2*v5e:2x2")
    between = [one for one in found.collectives if one.note == "between slices"]
    assert {(one.kind, one.axes) for one in between} == {("all-reduce", ("dp",))}
    assert all(one.seconds for one in between)
    assert ("all-reduce", ("tp",)) in {(one.kind, one.axes) for one in found.collectives}
    assert "between slices" in str(found)


def with_placed_arrays(mesh):
    """A product whose operands are real arrays on the devices of a mesh."""
    w = jax.device_put(jnp.ones((256, 1024)), jax.NamedSharding(mesh, jax.P(None, "tp")))
    x = jax.device_put(jnp.ones((512, 256)), jax.NamedSharding(mesh, jax.P("dp")))
    spread = jax.NamedSharding(mesh, jax.P("dp", "tp"))
    return jax.jit(lambda w, x: jax.lax.with_sharding_constraint(x @ w, spread).sum()), (w, x)


def lowered_with_placed_arrays(mesh):
    function, args = with_placed_arrays(mesh)
    return function.lower(*args)


@pytest.mark.slow
def test_a_function_may_place_arrays_on_hardware_that_is_not_there():
    pytest.importorskip("libtpu")
    options = {"mesh": "dp=2,tp=4", "on": V5E, "types": "auto", "effort": "fast"}
    found = meshwright.inspect("test_inspection_targets:with_placed_arrays", **options)
    assert {(one.kind, one.axes) for one in found.collectives} == {("all-reduce", ("dp", "tp"))}
    assert found.memory["arguments"] >= 4 * (256 * 256 + 256 * 256)  # of each array the shard that a device has
    with pytest.raises(MeshwrightError, match="places arrays on hardware that is not here and lowers its function"):
        meshwright.inspect("test_inspection_targets:lowered_with_placed_arrays", **options)

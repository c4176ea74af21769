"""Every planted mistake is found, and no program without one has a finding."""

from typing import Any, NamedTuple

import jax
import planted
import pytest
from jax.sharding import AxisType
from jax_versions import SPLITS_FOURIER_TRANSFORMS

import meshwright


class Pair(NamedTuple):
    """A program that a mistake is planted in, its clean twin, the mesh, and the kind of finding that it must have."""

    kind: str
    program: Any
    mesh: dict[str, int]
    mistaken: dict[str, Any]
    clean: dict[str, Any]


DP_TP, FSDP, PP, CUBE = {"dp": 2, "tp": 4}, {"fsdp": 8}, {"pp": 2, "dp": 4}, {"dp": 2, "fsdp": 2, "tp": 2}

# Along the dim that dp splits, where the partitioner gathers the lines of no other dim.
LEFT_TO_THE_PARTITIONER = {"by_partitioner": True, "axis": 0 if SPLITS_FOURIER_TRANSFORMS else 1}

PAIRS = [
    Pair("repeated work", planted.transformer, DP_TP, {"applied": False}, {"applied": True}),
    Pair("repeated work", planted.unsplit_batch, DP_TP, {"split": False}, {"split": True}),
    Pair("replicated parameter", planted.forgotten_weight, FSDP, {"forgotten": True}, {"forgotten": False}),
    Pair("constraint without effect", planted.wasted_constraint, DP_TP, {"used": False}, {"used": True}),
    Pair("constraint without effect", planted.uneven_constraint, DP_TP, {"size": 126}, {"size": 128}),
    Pair("full rematerialization", planted.reshuffled, CUBE, {"far": True}, {"far": False}),
    Pair("unexpected collective", planted.microbatches, {"dp": 8}, {"outer": True}, {"outer": False}),
    Pair("unexpected collective", planted.transposed, DP_TP, {"matching": False}, {"matching": True}),
    Pair("unexpected collective", planted.rolled, DP_TP, {"on_split_dim": True}, {"on_split_dim": False}),
    Pair("unexpected collective", planted.gathered_batch, {"dp": 8}, {"gathered": True}, {"gathered": False}),
    Pair("all-reduce for reduce-scatter", planted.gradient_norm, FSDP, {"whole": True}, {"whole": False}),
    Pair("gathered twice", planted.gathers_in_loop, FSDP, {"inside": True}, {"inside": False}),
    Pair("gathered twice", planted.gathers_twice, FSDP, {"twice": True}, {"twice": False}),
    Pair("reduced twice", planted.sums_twice, DP_TP, {"twice": True}, {"twice": False}),
    Pair("reduced twice", planted.scalar_summed_twice, {"tp": 8}, {"how": "sum"}, {"how": "mean"}),
    Pair("missing sum", planted.unsummed, DP_TP, {"summed": False}, {"summed": True}),
    Pair("replicated optimizer state", planted.optimizer_step, FSDP, {"state": False}, {}),
    Pair("replicated batch", planted.optimizer_step, FSDP, {"batch": False}, {}),
    Pair("not donated", planted.optimizer_step, FSDP, {"donated": False}, {}),
    Pair("constraint without effect", planted.put_on_a_device, {"dp": 8}, {"inside": True}, {"inside": False}),
    Pair("unexpected collective", planted.transformed, {"dp": 8}, LEFT_TO_THE_PARTITIONER, {"by_partitioner": False}),
    Pair("unexpected collective", planted.accumulated, {"dp": 8}, {"on_split_dim": True}, {"on_split_dim": False}),
    Pair("uneven stages", planted.stages, PP, {"layers": (1, 7)}, {"layers": (4, 4)}),
]  # fmt: skip

NAMES = [pair.program.__name__ for pair in PAIRS]


def mesh_of(degrees):
    return jax.make_mesh(tuple(degrees.values()), tuple(degrees), axis_types=(AxisType.Auto,) * len(degrees))


def inspection(pair, choices):
    mesh = mesh_of(pair.mesh)
    function, args = pair.program(mesh, **choices)
    return meshwright.inspect(function, *args, mesh=mesh)


@pytest.mark.parametrize("pair", PAIRS, ids=NAMES)
def test_a_planted_mistake_is_found_with_its_evidence_its_cost_and_a_fix(pair):
    findings = [found for found in inspection(pair, pair.mistaken).findings if found.kind == pair.kind]
    assert findings, "not found"
    for found in findings:
        assert found.evidence
        assert found.fix
        assert found.bytes > 0 or found.cost_seconds > 0
        assert "planted.py:" in found.source


@pytest.mark.parametrize("pair", PAIRS, ids=NAMES)
def test_its_clean_twin_has_no_finding(pair):
    assert inspection(pair, pair.clean).findings == ()


def test_a_fourier_transform_of_whole_lines_is_a_mistake_where_the_partitioner_gathers_them():
    pair = PAIRS[NAMES.index("transformed")]
    assert bool(inspection(pair, {"by_partitioner": True, "axis": 1}).findings) is not SPLITS_FOURIER_TRANSFORMS

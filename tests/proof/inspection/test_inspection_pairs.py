"""Each file of pairs/ has a program with a mistake and the same without it: the one is found, the other has no finding.

`python tests/proof/inspection/test_inspection_pairs.py [v5e:2x4]` prints by kind how many mistakes are found.
"""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType

import meshwright

FILES = sorted(Path(__file__).with_name("pairs").glob("*.py"))
LONG = {
    *("rbg_bits_made_whole", "tensor_parallel_sum_recomputed", "heads_constrained_whole_in_training"),
    *("sum_in_scan_of_sum", "activations_returned_whole", "noise_differs_where_declared_equal", "adam_not_donated"),
    *("sum_in_every_microbatch", "top_k_over_split_vocabulary", "parameters_come_back_along_another_dim"),
}
"""Pairs that only `make matrix` runs, which repeat what others of their kind show."""

ON_TPUS = {"hidden_constrained_whole", "microbatches_under_jit", "copies_of_shards_not_donated"}
"""Pairs that `make matrix` compiles for TPUs too, where fusions hide what the checks look for."""

NOT_ON_TPUS = {"weights_come_back_in_another_layout"}
"""A `Format` of another mesh's sharding does not lower (JAX 0.10.2)."""

SLICES = {8: "v5e:2x4", 4: "v5e:2x2"}


def load(file):
    """The module of a pair, and its mesh."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    pair = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pair)
    degrees, names = tuple(pair.MESH.values()), tuple(pair.MESH)
    return pair, jax.make_mesh(degrees, names, axis_types=(AxisType.Auto,) * len(names))


def findings(program, mesh, on=None):
    """What is found in a program of a pair."""
    function, args = program(mesh)
    return meshwright.inspect(function, *args, mesh=mesh, on=on).findings


def check(file, on=None):
    """Compare both programs of a pair with what is to be found in them."""
    pair, mesh = load(file)
    on = on and SLICES[mesh.size]
    found = [one for one in findings(pair.mistake, mesh, on) if one.id == pair.FINDS]
    assert len(found) == 1, "not found, or not merged"
    assert found[0].evidence
    assert found[0].fix
    assert found[0].cost_seconds is not None
    assert found[0].source.startswith(str(file)) or not found[0].source
    assert findings(pair.clean, mesh, on) == ()


def cases(is_less, mark, files=FILES):
    """Every pair, with a mark on some of them."""
    return [pytest.param(file, marks=[mark] * is_less(file.stem), id=file.stem) for file in files]


@pytest.mark.parametrize("file", cases(lambda name: name in LONG, pytest.mark.matrix))
def test_a_mistake_is_found_once_and_its_clean_twin_has_no_finding(file):
    check(file)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "file",
    cases(lambda name: name not in ON_TPUS, pytest.mark.exhaustive, [f for f in FILES if f.stem not in NOT_ON_TPUS]),
)
def test_so_it_is_with_the_compiler_of_tpus(file):
    check(file, on="v5e")


if __name__ == "__main__":
    total, right, flagged = Counter(), Counter(), Counter()
    for each in FILES:
        pair, mesh = load(each)
        on = SLICES[mesh.size] if len(sys.argv) > 1 else None
        total[pair.KIND] += 1
        right[pair.KIND] += pair.FINDS in {one.id for one in findings(pair.mistake, mesh, on)}
        flagged[pair.KIND] += bool(findings(pair.clean, mesh, on))
    for kind, count in total.items():
        print(f"{kind:10} found {right[kind]:2} of {count:2}, clean programs flagged: {flagged[kind]}")

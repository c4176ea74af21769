"""What `matmul --run` runs, and the formulas that `collective` prints."""

import json
import subprocess
import sys

import jax
import pytest

from meshwright.cli.main import main
from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo import versions
from meshwright.description.notation.parser import parse_numbers
from meshwright.pictures.answers.collective import KINDS
from meshwright.planning.cost.formulas import collective_formula
from meshwright.planning.cost.rates.collective import collective_seconds


@pytest.fixture(autouse=True)
def eight_devices():
    """JAX started with the devices of the tests: a command would start it with as many as it wants itself."""
    assert len(jax.devices()) == 8


def matmul(product, mesh, dims, on, *options):
    return main(["matmul", product, "--mesh", mesh, "--dims", dims, "--on", on, *options])


def ran(capsys, *words):
    assert matmul(*words, "--run", "--json") == 0
    return json.loads(capsys.readouterr().out)["run"]


CUT = [
    # A multiple of what the degrees divide, whatever the dim was before.
    ("A[I, J_X] @ B[J_X, K] -> C[I, K]", "X=4", "I=8192,J=30000,K=7", {"I": 256, "J": 256, "K": 7}),
    ("A[I_X, J] @ B[J, K_X] -> C[I_X, K]", "X=3", "I=3000,J=64,K=999", {"I": 255, "J": 64, "K": 255}),
]


@pytest.mark.parametrize(("product", "mesh", "dims", "cut"), CUT)
def test_dims_are_cut_to_what_the_degrees_divide(product, mesh, dims, cut, capsys):
    found = ran(capsys, product, mesh, dims, f"cpu:{mesh[-1]}")
    assert found["dims"] == cut
    assert list(found["modes"]) == ["auto", "explicit", "manual", "overlapped"]
    assert all(mode["error"] == 0 and mode["is_as_inferred"] for mode in found["modes"].values())


def test_the_way_that_is_cheapest_on_the_hardware_is_run(capsys):
    """By bytes it would be the all-gather; here J is long and the product takes longer than the all-reduce."""
    words = ("A[I, J] @ B[J_X, K] -> C[I, K]", "X=4", "I=1024,J=8192,K=4096", "v5p:4x4x4")
    assert matmul(*words, "--json") == 0
    priced = json.loads(capsys.readouterr().out)
    (collective,) = priced["collectives"]
    assert collective["kind"] == "all-reduce"
    assert ran(capsys, *words)["modes"]["manual"]["compiled"] == [
        {"kind": "all-reduce", "axes": ["X"], "bytes": 4 * 256 * 256}
    ]


def test_an_all_reduce_that_is_then_sliced_is_read_as_it_is_written(capsys):
    """XLA:CPU writes the same for a reduce-scatter."""
    found = ran(capsys, "B M_x @ M_x E = B E -> AR over x -> B E -> B E_x", "x=4", "B=16,M=64,E=32", "cpu:4")
    for mode in found["modes"].values():
        assert mode["is_as_inferred"]
        assert [move["kind"] for move in mode["compiled"]] == ["all-reduce"]


def test_with_a_jax_that_no_test_has_seen_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(versions, "version", lambda package: "0.13.0")
    assert matmul("A[I, J_X] @ B[J_X, K] -> C[I, K]", "X=4", "I=16,J=16,K=16", "v5e:4x4") == 0
    assert "not tested" not in capsys.readouterr().out  # nothing is compiled
    assert matmul("A[I, J_X] @ B[J_X, K] -> C[I, K]", "X=4", "I=16,J=16,K=16", "v5e:4x4", "--run") == 0
    assert capsys.readouterr().out.count("note: meshwright is not tested with JAX 0.13.0") == 1


def test_a_line_for_each_mode_has_inferred_beside_compiled(capsys):
    assert matmul("A[I_X, J] @ B[J, K_X] -> C[I_X, K]", "X=4", "I=512,J=512,K=512", "v5e:4x4", "--run") == 0
    printed = capsys.readouterr().out
    assert "run on 4 simulated devices in float32, dims reduced to 256: I=256,J=256,K=256" in printed
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.endswith("as inferred")}
    gather, ring = ["all-gather", "X", "262", "kB"], ["collective-permute", "X", "197", "kB"]
    verdict = ["as", "inferred"]
    assert rows == {
        "auto": ["0", *gather, *gather, *verdict],
        "explicit": ["0", *gather, *gather, *verdict],
        "manual": ["0", *gather, *gather, *verdict],
        "overlapped": ["0", *ring, *ring, *verdict],
    }


def test_more_devices_than_can_be_simulated_are_one_clear_error(capsys):
    assert matmul("A[I_X, J] @ B[J, K]", "X=256", "I=1024,J=512,K=512", "v5e:16x16", "--run") == 2
    assert "--run simulates up to 64 devices; the mesh has 256" in capsys.readouterr().err


def test_a_price_loads_no_jax():
    code = (
        "import sys\n"
        "from meshwright.cli.main import main\n"
        "main(['matmul', 'A[I_X, J] @ B[J, K]', '--mesh', 'X=4', '--dims', 'I=8,J=8,K=8', '--on', 'v5e:2x2'])\n"
        "main(['collective', 'permute', '--mesh', 'X=4', '--axis', 'X', '--on', 'v5e:2x2', '--bytes', '64M'])\n"
        "sys.exit('jax' in sys.modules or 'numpy' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


PLACES = [
    ("v5e:4x4", "X=4,Y=4", "X"),
    ("v5p:4x4x4", "X=4,Y=16", "X"),
    ("v5p:4x4x4", "X=4,Y=16", "Y"),
    ("v5p:4x4x4", "X=2,Y=32", "X,Y"),
    ("2*v5e:16x16", "X=2,Y=16,Z=16", "X,Y"),
    ("tpu7x:4x4x4", "X=16,Y=8", "Y"),
    ("h100:64", "X=8,Y=8", "X"),
    ("h100:64", "X=4,Y=16", "Y"),
    ("cpu:6", "X=6", "X"),
]


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize(("on", "mesh", "axes"), PLACES)
def test_a_formula_as_printed_gives_the_time_it_explains(on, mesh, axes, kind):
    placement = lay_mesh(parse_system(on), parse_numbers(mesh)).placement(tuple(axes.split(",")))
    found = collective_seconds(kind, 64e6, placement)
    assert found.terms
    for term in found.terms:
        formula, numbers = collective_formula(kind, term, placement)
        assert eval(formula, {"V": 64e6, **numbers}) == pytest.approx(term.seconds, rel=1e-12)


def test_an_axis_twice_is_one_clear_error(capsys):
    assert (
        main(["collective", "all-gather", "--mesh", "X=4", "--axis", "X,X", "--on", "v5e:4x4", "--bytes", "64M"]) == 2
    )
    assert "--axis X,X names an axis twice" in capsys.readouterr().err

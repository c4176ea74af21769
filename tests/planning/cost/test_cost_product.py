"""What a sharded product costs: times, intensities, verdicts and thresholds in words of the dims."""

import re

import pytest

from meshwright.description.hardware.system import parse_system
from meshwright.description.notation.inference import infer
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.parser import parse, parse_numbers
from meshwright.errors import MeshwrightError
from meshwright.planning.cost.rates.product import price
from meshwright.planning.cost.threshold import say_threshold


def priced(text, mesh, dims, on, dtype="bf16", element_bytes=2):
    degrees = parse_numbers(mesh)
    sizes = Sizes(degrees=degrees, dims=parse_numbers(dims), element_bytes=element_bytes)
    return price(infer(parse(text, axes=degrees), sizes), parse_system(on), dtype=dtype)


def sentence(chosen):
    assert chosen.threshold
    return say_threshold(chosen.threshold)


TENSOR_PARALLEL = "B M_x @ M_x E = B E -> RS over x -> B E_x"


# MaxText's sharding guide (github.com/AI-Hypercomputer/maxtext, docs/explanations/sharding.md): |M_x| > 5100 on v6e
def test_tensor_parallelism_on_v6e_has_the_intensity_of_maxtexts_guide():
    product = priced(TENSOR_PARALLEL, "x=4", "B=1024,M=32768,E=8192", "v6e:4x4")
    network = product.chosen.network
    assert network
    assert (network.dims, network.value, network.hardware) == ("M_x", 8192, pytest.approx(5100))
    assert product.chosen.bound == "compute"
    assert sentence(product.chosen) == "compute bound when M_x > 5100; here (ICI x: line of 4) when M_x > 7650"


@pytest.mark.parametrize(("rows", "bound"), [(7600, "communication"), (7700, "compute")])
def test_the_verdict_turns_where_the_threshold_for_these_links_says(rows, bound):
    assert priced(TENSOR_PARALLEL, "x=4", f"B=8192,M={4 * rows},E=8192", "v6e:4x4").chosen.bound == bound


def test_the_answer_as_data_has_the_fields_of_the_command():
    data = priced(TENSOR_PARALLEL, "x=4", "B=1024,M=32768,E=8192", "v6e:4x4").to_json()
    assert list(data) == [
        "case",
        "cases",
        "result",
        "collectives",
        "local_shapes",
        "flops_per_device",
        "intensity",
        "bound",
        "threshold",
        "alternatives",
    ]
    assert (data["case"], data["result"], data["bound"]) == (3, "B E_x", "compute")
    (collective,) = data["collectives"]
    assert collective == {
        "kind": "reduce-scatter",
        "axes": ["x"],
        "array": "BE",
        "bytes": 2 * 1024 * 8192,
        "seconds": pytest.approx(0.75 * 2 * 1024 * 8192 / 9e10),
    }
    assert data["local_shapes"] == {"B M_x": [1024, 8192], "M_x E": [8192, 8192], "B E_x": [1024, 2048]}
    assert data["flops_per_device"] == 2 * 1024 * 8192 * 8192
    assert [c["kind"] for c in data["alternatives"][0]["collectives"]] == ["all-reduce"]


THRESHOLDS = [
    # Rings: v5p, whole cubes. FSDP, 2550 tokens a chip on one axis, 850 on three (scaling book, training).
    ("A[B_X, D] @ W[D_X, F] -> C[B_X, F]", "X=4,Y=16", "v5p:4x4x4", "B_X > 2550"),
    ("A[B_X, D] @ W[D_X, F] -> C[B_X, F]", "X=64", "v5p:4x4x4", "B_X > 850; here (*) when B_X > 837"),
    # Data parallelism: an all-reduce goes over the links twice, with the flops of one of its two products.
    ("H[B_X, F] @ G[B_X, D] -> dW[F, D]", "X=4,Y=16", "v5p:4x4x4", "B_X > 5100"),
    ("A[B, F_X] @ W[F_X, D] -> C[B, D]{U_X} -> RS over X -> C[B, D_X]", "X=4,Y=16", "v5p:4x4x4", "F_X > 2550"),
    # GPUs: 989 / 0.45, of which 7/8 in a node of eight.
    ("A[I_X, J] @ B[J, K_X] -> C[I_X, K]", "X=8", "h100:8", "I_X > 2198; here (node: 8 units) when I_X > 1923"),
    # Two collectives, one after the other.
    ("A[B_X, D_Y] @ W[D_X, F_Y] -> C[B_X, F_Y]", "X=4,Y=4,Z=4", "v5p:4x4x4", "2550/F_Y + 2550/B_X < 1"),
    # No collective: against memory, 459e12 / 2.8e12 = 164 flops a byte.
    ("A[I_X, J] @ B[J, K] -> C[I_X, K]", "X=4,Y=16", "v5p:4x4x4", "164/K + 164/I_X + 164/J < 1 (memory)"),
    # No sum: one flop an element, a quarter of them here, for the two bytes of each: no dim is left to turn it.
    ("A[I_X] @ B[J] -> C[I_X, J] -> AG over X -> C[I, J]", "X=4,Y=16", "v5p:4x4x4", "0.125 > 2550"),
]


@pytest.mark.parametrize(("text", "mesh", "on", "expected"), THRESHOLDS)
def test_the_threshold_in_words_of_the_dims(text, mesh, on, expected):
    chosen = priced(text, mesh, "B=65536,D=8192,F=32768,I=65536,J=8192,K=32768", on).chosen
    assert re.sub(r"ICI [^)]*", "*", sentence(chosen)) == f"compute bound when {expected}"


def test_several_products_have_the_two_sides_in_full():
    text = "In[B_X, D_Y] @ Win[D_X, F_Y] @ Wout[F_Y, E_X] -> Out[B_X, E_Y]"
    chosen = priced(text, "X=4,Y=4,Z=4", "B=1048576,D=8192,F=32768,E=8192", "v5p:4x4x4").chosen
    assert sentence(chosen) == (
        "compute bound when 2·B_X·D·F_Y + 2·B_X·F_Y·E > 5100·B_X·D + 5100·D·F_Y + 5100·F_Y·E + 5100·B_X·E"
    )


TURNING = [
    ("A[B_X, D] @ W[D_X, F] -> C[B_X, F]", "X=4,Y=16", "B={},D=8192,F=32768", "v5p:4x4x4"),
    ("A[I, J_X] @ B[J_X, K] -> C[I, K]{U_X} -> RS over X -> C[I, K_X]", "X=16,Y=16", "I=8192,J={},K=8192", "v6e:16x16"),
    ("A[I_X, J] @ B[J, K_X] -> C[I_X, K]", "X=8", "I={},J=32768,K=32768", "h100:8"),
    ("A[I_X, J] @ B[J, K_X] -> C[I_X, K]", "X=2,Y=256", "I={},J=32768,K=4096", "2*v5e:16x16"),
]


@pytest.mark.parametrize(("text", "mesh", "dims", "on"), TURNING)
def test_the_figure_of_the_threshold_put_back_as_a_size_turns_the_verdict(text, mesh, dims, on):
    degree = parse_numbers(mesh)["X"]
    product = priced(text, mesh, dims.format(8192 * degree), on)
    figure = float(re.findall(r"> (\d+)", sentence(product.chosen))[-1])
    steps = [step.kind for step in product.chosen.implementation.communications]
    bounds = []
    for factor in (0.98, 1.02):
        ways = priced(text, mesh, dims.format(round(factor * figure) * degree), on).implementations
        bounds += [way.bound for way in ways if [step.kind for step in way.implementation.communications] == steps]
    assert bounds == ["communication", "compute"]


def test_ways_are_sorted_by_time_and_not_by_bytes():
    """Gather A, or slice B and all-reduce C: scaling book, sharding, problem 9, the second where D > 2 B."""
    for inner, kinds in ((512, ["all-gather"]), (8192, ["all-reduce"])):
        product = priced("A[B, D] @ W[D_X, F] -> C[B, F]", "X=4,Y=16", f"B=1024,D={inner},F=4096", "v5p:4x4x4")
        assert [c.kind for c in product.chosen.collectives] == kinds
        seconds = [way.seconds for way in (product.chosen, *product.alternatives)]
        assert seconds == sorted(seconds)


def test_a_way_that_is_written_is_chosen_even_where_another_is_cheaper():
    product = priced("B M_x @ M_x E = B E -> AR over x -> B E -> B E_x", "x=4", "B=64,M=64,E=64", "v6e:4x4")
    assert [c.kind for c in product.chosen.collectives] == ["all-reduce"]
    assert product.alternatives[0].seconds < product.chosen.seconds
    assert len(product.alternatives) == len(product.implementations) - 1


def test_a_resharding_has_a_time_and_no_intensity():
    chosen = priced("A[I_X, J] -> A[I, J_X]", "X=4,Y=16", "I=8192,J=8192", "v5p:4x4x4").chosen
    assert chosen.seconds == pytest.approx(8192 * 8192 * 2 / 1.8e11 / 4)
    assert (chosen.bound, chosen.network, chosen.memory) == ("communication", None, None)
    assert chosen.threshold is None


def test_a_free_slice_takes_no_time_and_nothing_binds():
    product = priced("A[I, J] -> A[I_X, J]", "X=4,Y=16", "I=8192,J=8192", "v5p:4x4x4")
    assert (product.chosen.seconds, product.chosen.bound) == (0, None)
    assert product.to_json()["case"] is None


def test_a_thin_product_is_memory_bound():
    chosen = priced("A[B, D] @ W[D, F_X] -> C[B, F_X]", "X=8", "B=16,D=8192,F=32768", "h100:8").chosen
    assert chosen.bound == "memory"
    assert chosen.memory
    assert chosen.memory.value == pytest.approx(16, rel=0.01)
    assert sentence(chosen) == "compute bound when 295/F_X + 295/B + 295/D < 1 (memory)"


def test_a_thin_product_with_a_small_collective_has_its_threshold_against_memory():
    chosen = priced("A[B, D_X] @ W[D_X, F] -> C[B, F]", "X=8", "B=16,D=32768,F=8192", "h100:8").chosen
    assert (chosen.bound, len(chosen.collectives)) == ("memory", 1)
    assert sentence(chosen).endswith("< 1 (memory)")


def test_devices_that_the_mesh_leaves_idle_are_named():
    assert priced(TENSOR_PARALLEL, "x=4", "B=64,M=64,E=64", "v6e:4x4").layout.notes == ("12 of 16 devices are idle",)


def test_a_dtype_of_another_size_than_inferred_for_is_refused():
    with pytest.raises(MeshwrightError, match="elements of 2 bytes; int8 has 1"):
        priced(TENSOR_PARALLEL, "x=4", "B=64,M=64,E=64", "v6e:4x4", dtype="int8")
    chosen = priced(TENSOR_PARALLEL, "x=4", "B=64,M=64,E=64", "v6e:4x4", dtype="int8", element_bytes=1).chosen
    assert chosen.network
    assert chosen.network.dims == "2·M_x"

"""The case of a product, its collectives, its work, and the ways to it, as tables."""

import pytest

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.array_parser import parse_array
from meshwright.description.notation.inference import infer
from meshwright.description.notation.legality import Sizes, check
from meshwright.description.notation.parser import parse
from meshwright.errors import MeshwrightError

MESH = {"X": 4, "Y": 2, "Z": 2}
SIZES = Sizes(degrees=MESH, dims=dict.fromkeys("BDEFIJKM", 64))


def first_steps(text, sizes=SIZES):
    return [str(step) for step in infer(parse(text, axes=sizes.degrees), sizes).implementation.steps]


CASES = [
    ("A[I, J] @ B[J, K]", 1, []),
    ("A[I_X, J] @ B[J, K_Y]", 1, [("X", 1), ("Y", 1)]),
    ("A[N_X, I] @ B[N_X, I] -> C[N_X]", 1, [("X", 1)]),
    ("A[I, J_X] @ B[J, K]", 2, [("X", 2)]),
    ("A[I, J_X] @ B[J_Y, K]", 2, [("X", 2), ("Y", 2)]),
    ("A[B_X, D] @ W[D_X, F]", 2, [("X", 2)]),
    ("A[I, J_X] @ B[J_X, K]", 3, [("X", 3)]),
    ("A[I, J_XY] @ B[J_X, K]", 3, [("X", 3), ("Y", 2)]),
    ("A[I_X, J] @ B[J, K_X]", 4, [("X", 4)]),
    ("A[I_X, J_Y] @ B[J_Y, K_X]", 4, [("X", 4), ("Y", 3)]),
]


@pytest.mark.parametrize(("text", "case", "by_axis"), CASES)
def test_the_case_is_the_highest_of_any_axis(text, case, by_axis):
    inference = infer(parse(text), Sizes(degrees=MESH, dims=dict.fromkeys("ABCDEFIJKNW", 64)))
    assert inference.case == case
    assert [(item.axis, item.case) for item in inference.cases] == by_axis


def test_the_reason_of_a_case_names_axis_dim_and_array():
    (case,) = infer(parse("A[I, J_X] @ B[J, K]"), SIZES).cases
    assert case.reason == "X splits the summed J in A only"


WAYS = [
    ("A[I_X, J] @ B[J, K_Y] -> C[I_X, K_Y]", ["A[I_X, J] @ B[J, K_Y] -> C[I_X, K_Y]"]),
    (
        "A[I, J_X] @ B[J, K] -> C[I, K]",
        [
            "AllGather_X(A[I, J_X]) -> A[I, J]; A[I, J] @ B[J, K] -> C[I, K]",
            "B[J, K] -> B[J_X, K]; A[I, J_X] @ B[J_X, K] -> C[I, K]{U_X}; AllReduce_X(C[I, K]{U_X}) -> C[I, K]",
            "B[J, K] -> B[J_X, K]; A[I, J_X] @ B[J_X, K] -> C[I, K]{U_X};"
            " ReduceScatter_{X,I}(C[I, K]{U_X}) -> C[I_X, K]; AllGather_X(C[I_X, K]) -> C[I, K]",
        ],
    ),
    (
        "A[I, J_X] @ B[J_X, K] -> C[I, K_X]",
        [
            "A[I, J_X] @ B[J_X, K] -> C[I, K]{U_X}; ReduceScatter_{X,K}(C[I, K]{U_X}) -> C[I, K_X]",
            "AllGather_X(A[I, J_X]) -> A[I, J]; AllToAll_{X,J->K}(B[J_X, K]) -> B[J, K_X];"
            " A[I, J] @ B[J, K_X] -> C[I, K_X]",
            "A[I, J_X] @ B[J_X, K] -> C[I, K]{U_X}; AllReduce_X(C[I, K]{U_X}) -> C[I, K]; C[I, K] -> C[I, K_X]",
            "AllGather_X(A[I, J_X]) -> A[I, J]; AllGather_X(B[J_X, K]) -> B[J, K]; A[I, J] @ B[J, K] -> C[I, K];"
            " C[I, K] -> C[I, K_X]",
        ],
    ),
    (
        "A[I_X, J] @ B[J, K_X] -> C[I_X, K]",
        [
            "AllGather_X(B[J, K_X]) -> B[J, K]; A[I_X, J] @ B[J, K] -> C[I_X, K]",
            "AllGather_X(A[I_X, J]) -> A[I, J]; A[I, J] @ B[J, K_X] -> C[I, K_X];"
            " AllToAll_{X,K->I}(C[I, K_X]) -> C[I_X, K]",
            "AllGather_X(A[I_X, J]) -> A[I, J]; A[I, J] @ B[J, K_X] -> C[I, K_X];"
            " AllGather_X(C[I, K_X]) -> C[I, K]; C[I, K] -> C[I_X, K]",
        ],
    ),
    (
        "A[I_X, J] @ B[J, K] -> C[I, K]",
        [
            "A[I_X, J] @ B[J, K] -> C[I_X, K]; AllGather_X(C[I_X, K]) -> C[I, K]",
            "AllGather_X(A[I_X, J]) -> A[I, J]; A[I, J] @ B[J, K] -> C[I, K]",
        ],
    ),
    (
        "A[I_X, J] -> A[I, J_X]",
        ["AllToAll_{X,I->J}(A[I_X, J]) -> A[I, J_X]", "AllGather_X(A[I_X, J]) -> A[I, J]; A[I, J] -> A[I, J_X]"],
    ),
    ("A[I, J] -> A[I_X, J]", ["A[I, J] -> A[I_X, J]"]),
    ("A[I_XY, J] -> A[I, J]", ["AllGather_XY(A[I_XY, J]) -> A[I, J]"]),
    ("A[I_XY, J] -> A[I_Y, J]", ["AllGather_XY(A[I_XY, J]) -> A[I, J]; A[I, J] -> A[I_Y, J]"]),
    ("A[I_X, J] -> A[I_X, J]", ["A[I_X, J] as it is"]),
    (
        "A[I, J]{U_X} -> A[I, J]",
        [
            "AllReduce_X(A[I, J]{U_X}) -> A[I, J]",
            "ReduceScatter_{X,I}(A[I, J]{U_X}) -> A[I_X, J]; AllGather_X(A[I_X, J]) -> A[I, J]",
        ],
    ),
]


@pytest.mark.parametrize(("text", "ways"), WAYS)
def test_every_way_is_listed_fewest_bytes_first(text, ways):
    assert [str(way) for way in infer(parse(text), SIZES).implementations] == ways


def test_the_operand_that_is_smaller_is_gathered_before_or_after():
    wide = Sizes(degrees={"X": 4}, dims={"I": 64, "J": 8, "K": 512})
    assert first_steps("A[I_X, J] @ B[J, K] -> C[I, K]", wide)[0] == "AllGather_X(A[I_X, J]) -> A[I, J]"


def test_without_a_result_the_natural_one_keeps_the_axes_that_dims_came_with():
    assert str(infer(parse("A[B_X, D_Y] @ W[D_Y, F_Z]"), SIZES).result) == "C[B_X, F_Z]"
    assert str(infer(parse("A[I_X, J] @ B[J, K_X]"), SIZES).result) == "C[I_X, K]"
    assert str(infer(parse("B_X E @ E M"), SIZES).result) == "B_X M"


def test_bytes_are_the_gathered_result_and_the_unreduced_operand():
    inference = infer(parse("A[I_Y, J_X] @ B[J, K] -> C[I_Y, K]"), SIZES)
    gather, reduce = (way.collectives[0] for way in inference.implementations[:2])
    assert (gather.kind, gather.axes, gather.array, gather.bytes) == ("all-gather", ("X",), "A", 32 * 64 * 2)
    assert (reduce.kind, reduce.axes, reduce.array, reduce.bytes) == ("all-reduce", ("X",), "C", 32 * 64 * 2)


def test_work_repeated_on_unused_axes_is_counted_and_named():
    way = infer(parse("A[B_X, D_Y] @ W[D_Y, F]"), SIZES).implementation
    assert way.flops == 2 * 16 * 32 * 64
    assert way.repeated_axes == ("Z",)
    assert way.flops * 16 == 2 * (2 * 64 * 64 * 64)


def test_a_product_without_a_sum_is_one_flop_an_element():
    assert infer(parse("A[I] @ B[K] -> C[I, K]"), SIZES).implementation.flops == 64 * 64


def test_the_way_that_a_chain_writes_is_kept_beside_the_others():
    inference = infer(parse("B M_X @ M_X E = B E -> AR over X -> B E -> B E_X"), SIZES)
    assert inference.prescribed in inference.implementations
    assert [str(step) for step in inference.implementation.steps] == [
        "B M_X @ M_X E = B E{U_X}",
        "B E{U_X} -> AR over X -> B E",
        "B E -> B E_X",
    ]
    assert str(inference.implementations[0].steps[1]) == "B E{U_X} -> RS over X -> B E_X"


def test_three_operands_are_multiplied_in_pairs_from_the_left():
    dims = {"B": 512, "D": 64, "F": 64, "E": 64}
    text = "In[B_X, D_Y] @ Win[D_X, F_Y] @ Wout[F_Y, E_X] -> Out[B_X, E_Y]"
    assert first_steps(text, Sizes(degrees={"X": 4, "Y": 2}, dims=dims)) == [
        "AllGather_Y(In[B_X, D_Y]) -> In[B_X, D]",
        "AllGather_X(Win[D_X, F_Y]) -> Win[D, F_Y]",
        "In[B_X, D] @ Win[D, F_Y] -> InWin[B_X, F_Y]",
        "AllGather_X(Wout[F_Y, E_X]) -> Wout[F_Y, E]",
        "InWin[B_X, F_Y] @ Wout[F_Y, E] -> Out[B_X, E]{U_Y}",
        "ReduceScatter_{Y,E}(Out[B_X, E]{U_Y}) -> Out[B_X, E_Y]",
    ]


def test_three_operands_that_need_nothing_are_two_local_products():
    assert first_steps("A[B_X, I] @ B[I, J] @ C[J, K_Y] -> D[B_X, K_Y]") == [
        "A[B_X, I] @ B[I, J] -> AB[B_X, J]",
        "AB[B_X, J] @ C[J, K_Y] -> D[B_X, K_Y]",
    ]


def test_the_same_array_twice_gets_a_second_label():
    assert first_steps("A[I_X, J] @ A[K, J] -> C[I_X, K]") == ["A[I_X, J] @ A2[K, J] -> C[I_X, K]"]
    assert first_steps("B E @ B E") == ["B E @ BE2[B, E] -> C[]"]


def test_an_axis_of_degree_one_needs_no_collective():
    sizes = Sizes(degrees={"X": 1, "Y": 2}, dims=dict.fromkeys("IJK", 8))
    assert first_steps("A[I, J_X] @ B[J_X, K] -> C[I, K] -> RS over X -> C[I_X, K]", sizes) == [
        "A[I, J] @ B[J, K] -> C[I, K]"
    ]


def test_a_sum_that_is_asked_for_is_left_to_take():
    assert first_steps("A[I, J_X] @ B[J_X, K] -> C[I, K]{U_X}") == ["A[I, J_X] @ B[J_X, K] -> C[I, K]{U_X}"]


ILLEGAL = [
    ("A[I_Q, J] @ B[J, K]", "the mesh does not have; its axes are X, Y, Z"),
    ("A[I, Q] @ B[Q, K]", "dim Q of A[I, Q] has no size"),
    ("A[I_X, S] @ B[S, K_X]", None),
    (
        "A[I, S_X] @ B[S, K]",
        "X=4 cannot split S=10 of A[I, S_X]: 10 % 4 = 2; use S=8 or S=12, or a degree in 1, 2, 5, 10",
    ),
    ("A[S_YX, J] @ B[J, K]", "Y=2*X=4 = 8 cannot split S=10"),
    ("A[T_X, J] @ B[J, K]", "use T=4, or a degree in 1, 3"),
    ("A[I, S] @ B[S, K] -> C[I, K]{U_X}", "cannot stay a sum over X"),
    ("A[I_X]", "is one array"),
]


@pytest.mark.parametrize(("text", "words"), ILLEGAL)
def test_what_cannot_lie_on_the_mesh_is_refused_with_what_would(text, words):
    sizes = Sizes(degrees=MESH, dims={"I": 64, "J": 64, "K": 64, "S": 10, "T": 3})
    if words is None:
        assert infer(parse(text), sizes).implementations
        return
    with pytest.raises(MeshwrightError) as caught:
        infer(parse(text), sizes)
    assert words in str(caught.value)


def test_local_shape_and_bytes_follow_from_the_axes():
    array = parse_array("A[I_XY, J]")
    sizes = Sizes(degrees={"X": 8, "Y": 2}, dims={"I": 1024, "J": 4096}, element_bytes=4)
    check(array, sizes)
    assert sizes.local_shape(array) == (64, 4096)
    assert sizes.local_bytes(array) == 2**20
    assert Sizes(degrees={"X": 2}, dims={"I": 3}, element_bytes=0.5).local_bytes(ShardedArray("A", ("I",), ((),))) == 2


def test_an_illegal_layout_on_the_way_is_passed_over():
    sizes = Sizes(degrees={"X": 4, "Y": 4}, dims={"I": 8, "J": 4, "K": 8})
    ways = infer(parse("A[I, J_X] @ B[J_Y, K] -> C[I, K]"), sizes).implementations
    assert not any("J_XY" in str(way) for way in ways)
    assert any("J_X]" in str(way) for way in ways)

"""Text to expressions and back; mistakes that point at their character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.array_parser import parse_array
from meshwright.description.notation.expression import Chain, Einsum, Stage
from meshwright.description.notation.parser import parse, parse_numbers
from meshwright.errors import MeshwrightError, NotationError

CANONICAL = [
    "A[I_X, J]",
    "A[I_XY, J]",
    "A[I_{dp,fsdp}, J_tp]",
    "W_in[D_X, F]",
    "C[]",
    "C[I, K]{U_X}",
    "C[I, K]{U_{dp,tp}}",
    "B_x E",
    "A[I_X, J] @ B[J, K_Y]",
    "A[I_X, J] @ B[J, K_Y] -> C[I_X, K_Y]",
    "A[N_X, I, J] @ B[N_X, J, K] -> C[N_X, I, K]",
    "A[I, J_X] @ B[J_X, K] -> C[I, K]{U_X}",
    "In[B_X, D_Y] @ Win[D_X, F_Y] @ Wout[F_Y, E_X] -> Out[B_X, E_Y]",
    "B_x E @ E M = B_x M",
    "B M_x @ M_x E = B E{U_x} -> RS over x -> B E_x",
    "E_x M -> AG over x -> E M",
    "A[I_X, J] -> A[I, J_X]",
    "A[I] @ B[I] -> C[]",
    "AllGather_X(A[I_X, J]) -> A[I, J]",
    "AllGather_XY(A[I_X, J_Y]) -> A[I, J]",
    "ReduceScatter_{X,K}(C[I, K]{U_X}) -> C[I, K_X]",
    "ReduceScatter_{dp,tp,K}(C[I, K]{U_{dp,tp}}) -> C[I, K_{dp,tp}]",
    "AllReduce_X(C[I, K]{U_X}) -> C[I, K]",
    "AllToAll_{X,I->J}(A[I_X, J]) -> A[I, J_X]",
    "A[I_XY, J] -> AG over Y -> A[I_X, J] -> A2A over X -> A[I, J_X]",
    "A[I, J_X] @ B[J_X, K] -> C[I, K]{U_X} -> AR over X -> C[I, K] -> C[I, K_X]",
    "AllGather_X(A[self_X, axes]) -> A[self, axes]",
]


@pytest.mark.parametrize("text", CANONICAL)
def test_a_canonical_text_is_printed_as_it_was_read(text):
    assert str(parse(text)) == text


SAME = [
    ("A[I_X,J]·B[J,K]->C[I_X,K]", "A[I_X, J] @ B[J, K] -> C[I_X, K]"),
    ("A[I_X, J] . B[J, K]", "A[I_X, J] @ B[J, K]"),
    ("A[I_X, J] × B[J, K] → C[I_X, K]", "A[I_X, J] @ B[J, K] -> C[I_X, K]"),
    ("A[I_X, J] @ B[J, K] = C[I_X, K]", "A[I_X, J] @ B[J, K] -> C[I_X, K]"),
    ("A[I_{X,Y}, J]", "A[I_XY, J]"),
    ("A[I_{XY}, J]", "A[I_XY, J]"),
    ("B_x E @ E M -> B_x M", "B_x E @ E M = B_x M"),
    ("B M_x @ M_x E = B E (partial result) -> RS over x -> B E_x", "B M_x @ M_x E = B E{U_x} -> RS over x -> B E_x"),
    ("B M_x @ M_x E = B E -> RS over x -> B E_x", "B M_x @ M_x E = B E{U_x} -> RS over x -> B E_x"),
    ("B M_x @ M_x E = B E (local partial result)", "B M_x @ M_x E = B E{U_x}"),
    ("E_x M -> AG x -> E M", "E_x M -> AG over x -> E M"),
    ("E_x M -> AllGather over x", "E_x M -> AG over x -> E M"),
    ("AllGather_X(A[I_X, J])", "AllGather_X(A[I_X, J]) -> A[I, J]"),
    ("AllReduce_X(C[I, K])", "AllReduce_X(C[I, K]{U_X}) -> C[I, K]"),
    ("ReduceScatter_{X,K}(C[I, K]{U_X})", "ReduceScatter_{X,K}(C[I, K]{U_X}) -> C[I, K_X]"),
    ("ReduceScatter_X(C[I, K]{U_X}) -> C[I, K_X]", "ReduceScatter_{X,K}(C[I, K]{U_X}) -> C[I, K_X]"),
    ("AllToAll_X(A[I_X, J]) -> A[I, J_X]", "AllToAll_{X,I->J}(A[I_X, J]) -> A[I, J_X]"),
    ("AllGather_X(AllGather_Y(A[I_XY]))", "A[I_XY] -> AG over Y -> A[I_X] -> AG over X -> A[I]"),
]


@pytest.mark.parametrize(("text", "canonical"), SAME)
def test_other_spellings_mean_the_same(text, canonical):
    assert parse(text) == parse(canonical)
    assert str(parse(text)) == canonical


SUBSCRIPTS = [
    ("I_XY", None, ("X", "Y")),
    ("I_dp", None, ("dp",)),
    ("I_X1", None, ("X1",)),
    ("I_xy", None, ("xy",)),
    ("I_xy", ("x", "y"), ("x", "y")),
    ("I_XY", ("X", "Y", "XY"), ("XY",)),
    ("I_{X,Y}", ("X", "Y", "XY"), ("X", "Y")),
    ("I_dpfsdp", ("dp", "fsdp"), ("dp", "fsdp")),
    ("I_aab", ("a", "aa", "ab"), ("a", "ab")),
    ("I_{dp,fsdp}", ("dp", "fsdp"), ("dp", "fsdp")),
    ("I_data_parallel", ("data_parallel",), ("data_parallel",)),
]


@pytest.mark.parametrize(("dim", "mesh", "axes"), SUBSCRIPTS)
def test_a_subscript_is_whole_axis_names_first_and_split_second(dim, mesh, axes):
    assert parse_array(f"A[{dim}]", axes=mesh).axes == (axes,)


MISTAKES = [
    ("", 0, "an array"),
    ("A[I_X", 5, "] after a dim"),
    ("A[I_X, J_X]", 7, "both I and J"),
    ("A[I, I]", 5, "dim I twice"),
    ("A[I_XX]", 2, "I twice"),
    ("A[I J]", 4, "] after a dim"),
    ("A[I_]", 4, "mesh axis expected"),
    ("A[I_{}]", 5, "mesh axis expected"),
    ("A[I_X] $", 7, "'$'"),
    ("A[I_X]{X}", 7, "{U_X}"),
    ("A[I_X]{U_X}", 6, "both I and U"),
    ("A B[I]", 3, "its dims"),
    ("A[I] B", 5, "-> or the end"),
    ("[I]", 0, "an array"),
    ("A[AG]", 2, "own word"),
    ("A @", 3, "an array"),
    ("A[I] @ B[J] -> C[K]", 15, "dim K"),
    ("A[I] @ B[I] -> C[] (partial result)", 20, "not partial"),
    ("A[I_X] @ B[I_X] -> C[] (sum)", 24, "(partial result)"),
    ("A[I] -> RS over x", 8, "write the result"),
    ("A[I_X] -> A2A -> A[I]", 14, "a mesh axis"),
    ("B M_x @ M_x E -> RS over x -> B E_x", 17, "own result comes first"),
    ("AllGather(A[I_X])", 9, "mesh axes of AllGather"),
    ("AllGather_X(A[I])", 0, "needs a dim split over X"),
    ("AllGather_{X->Y}(A[I_X])", 0, "AllToAll_{X,I->J}"),
    ("AllGather_X(A[I_X]", 18, ") expected"),
    ("AllGather_X(A[I_X]) -> A[I_X]", 0, "is A[I], not A[I_X]"),
    ("ReduceScatter_{X,K}(C[I, K]{U_X}) -> C[I_X, K]", 0, "not C[I_X, K]"),
    ("AllToAll_X(A[I_X, J])", 0, "write the result"),
    ("A[I_XY] -> AG over X -> A[I_Y]", 11, "before the axes inside it"),
    ("A[I, J] -> A[J, I]", 11, "keeps the dims"),
    ("A[I] -> A[I]{U_X}", 8, "cannot leave"),
    ("AllGather_XX(A[I_X])", 0, "each axis once"),
    ("AllReduce_XX(A[I]{U_X})", 0, "each axis once"),
    ("A[I_XY, J] -> A2A over YX -> A[I, J_XY]", 14, "cannot go from I to J"),
    ("AllToAll_{X,I->Q}(A[I_X])", 0, "no dim Q"),
]


@pytest.mark.parametrize(("text", "position", "words"), MISTAKES)
def test_a_mistake_points_at_its_character(text, position, words):
    with pytest.raises(NotationError) as caught:
        parse(text)
    assert words in caught.value.reason
    assert (caught.value.text, caught.value.position) == (text, position)


def test_an_axis_that_the_mesh_has_not_is_named_with_those_it_has():
    with pytest.raises(NotationError, match="no axis Q; its axes are X, Y") as caught:
        parse("A[I_X, J_Q]", axes=("X", "Y"))
    assert caught.value.position == 9


def test_numbers_are_read_by_name():
    assert parse_numbers("X=4, Y=2") == {"X": 4, "Y": 2}


@pytest.mark.parametrize(
    ("text", "position"),
    [("", 0), ("X", 1), ("X=", 2), ("X=0", 2), ("X=-1", 2), ("X=4,X=2", 4), ("X=4 Y=2", 4), ("X=4,", 4), ("X=1e3", 2)],
)
def test_a_mistake_in_numbers_points_at_its_character(text, position):
    with pytest.raises(NotationError) as caught:
        parse_numbers(text)
    assert caught.value.position == position


WORDS = st.sampled_from(
    ["A", "B", "W_in", "I", "J_X", "J_XY", "AllGather_X", "ReduceScatter_", "AG", "over", "U_X", "{U_X}"]
)
SIGNS = st.sampled_from([*"@·×.[]{}(),=_ ", "->", "→", " = ", "(partial result)"])


@settings(max_examples=400)
@given(st.lists(WORDS | SIGNS, max_size=14).map("".join) | st.text(max_size=30), st.none() | st.just(("X", "Y", "dp")))
def test_no_text_raises_anything_but_a_notation_error_inside_it(text, axes):
    for mistake in mistakes(text, axes):
        assert 0 <= mistake.position <= len(text)
        assert len(mistake.text) == len(text)


def mistakes(text, axes):
    """The notation errors that reading a text as anything raises; another error goes through and fails the test."""
    for read in (lambda: parse(text, axes=axes), lambda: parse_array(text, axes=axes), lambda: parse_numbers(text)):
        try:
            read()
        except NotationError as mistake:
            yield mistake


NAMES = st.sampled_from(["A", "B", "C", "W_in", "dW", "X"])
DIMS = st.lists(st.sampled_from(["I", "J", "K", "B", "heads", "S1"]), unique=True, max_size=4)
LETTERS, WORDY = ("X", "Y", "Z"), ("dp", "fsdp", "tp", "data_parallel")


@st.composite
def arrays(draw, dims=None):
    """Any array, with a name or without, split and unreduced over axes of one kind of mesh."""
    dims = draw(DIMS) if dims is None else dims
    axes = list(draw(st.permutations(draw(st.sampled_from([LETTERS, WORDY])))))
    cuts = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=len(dims) + 1, max_size=len(dims) + 1)))
    parts = [tuple(axes[start:end]) for start, end in zip([0, *cuts], cuts, strict=False)]
    name = draw(NAMES | st.just("")) if dims else draw(NAMES)
    return ShardedArray(name, tuple(dims), tuple(parts[: len(dims)]), parts[-1])


@st.composite
def expressions(draw):
    """An array, a product with or without result, or a resharding of an array or of a product's result."""
    operands = tuple(draw(st.lists(arrays(), min_size=1, max_size=3)))
    dims = list(dict.fromkeys(dim for operand in operands for dim in operand.dims))
    if len(operands) == 1:
        start = operands[0]
    else:
        start = Einsum(operands, draw(st.none() | arrays(dims=draw(st.permutations(dims)))))
    if isinstance(start, Einsum) and start.result is None:
        return start
    last = start.result if isinstance(start, Einsum) else start
    assert last
    target = draw(arrays(dims=list(last.dims)))
    try:
        return Chain(start, (Stage(None, (), target),)) if draw(st.booleans()) else start
    except MeshwrightError:
        return start


@settings(max_examples=300)
@given(expressions())
def test_print_and_parse_are_inverses(expression):
    assert parse(str(expression)) == expression


@st.composite
def collectives(draw):
    """A collective of any kind that can be done, as the end of a chain."""
    kind = draw(st.sampled_from(["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]))
    array = draw(arrays(dims=["I", "J"]))
    axes = tuple(draw(st.permutations(array.unreduced if kind in ("reduce-scatter", "all-reduce") else array.axes[0])))
    axes = axes if kind == "reduce-scatter" else array.unreduced if kind == "all-reduce" else array.axes[0]
    kept = () if kind in ("reduce-scatter", "all-reduce") else array.unreduced
    split = {
        "all-gather": ((), array.axes[1]),
        "all-reduce": array.axes,
        "reduce-scatter": (array.axes[0], array.axes[1] + axes),
        "all-to-all": ((), array.axes[1] + axes),
    }[kind]
    result = ShardedArray(array.name, array.dims, split, kept)
    return Chain(array, (Stage(kind, axes, result),)) if axes else array


@settings(max_examples=200)
@given(collectives())
def test_print_and_parse_of_collectives_are_inverses(chain):
    assert parse(str(chain)) == chain


BUILT_WRONG = [
    lambda: ShardedArray("A", ("I", "I"), ((), ())),
    lambda: ShardedArray("A", ("I",), (("X", "X"),)),
    lambda: ShardedArray("A", ("I",), (("X",),), ("X",)),
    lambda: ShardedArray("A", ("I-J",), ((),)),
    lambda: ShardedArray("A", ("over",), ((),)),
    lambda: ShardedArray("A", ("I",), ()),
    lambda: ShardedArray("", (), ()),
    lambda: ShardedArray("A B", ("I",), ((),)),
    lambda: Einsum((parse_array("A[I]"),)),
    lambda: Einsum((parse_array("A[I]"), parse_array("B[I]")), parse_array("C[J]")),
    lambda: Chain(parse_array("A[I]"), ()),
    lambda: Chain(parse_array("A[I_X]"), (Stage("collective-permute", ("X",), parse_array("A[I_X]")),)),
    lambda: Chain(parse_array("A[I_X]"), (Stage("all-gather", (), parse_array("A[I_X]")),)),
    lambda: Chain(parse_array("A[I_X]"), (Stage("all-gather", ("X",), parse_array("A[I_X]")),)),
]


@pytest.mark.parametrize("build", BUILT_WRONG)
def test_what_is_built_by_hand_is_checked_as_what_is_read(build):
    with pytest.raises(MeshwrightError):
        build()


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("B_xE @ EM = B_xM", "B_x E @ E M = B_x M"),
        (
            "BM<sub>x</sub> @ M<sub>x</sub>E = BE (partial result) -> Reduce-Scatter (RS) over x -> BE<sub>x</sub>",
            "B M_x @ M_x E = B E{U_x} -> RS over x -> B E_x",
        ),
        ("B_x E @ E M = B_x M -> All-Gather over x -> B M", "B_x E @ E M = B_x M -> AG over x -> B M"),
        ("BX_x Y", "BX_x Y"),
    ],
)
def test_the_spelling_of_maxtexts_guide_is_read(text, means):
    assert str(parse(text, axes=("x", "y"))) == means


def test_long_names_of_dims_that_stand_together_want_spaces():
    with pytest.raises(NotationError, match="no axis xEmbed; its axes are x; put spaces between dims: _x Embed"):
        parse("B_xEmbed", axes=("x",))

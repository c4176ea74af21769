import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.mesh import AXES, LAYOUT, MeshShape, check_batch, check_divides, divisors, local_shape, parse_mesh

MEANINGS = [
    ("1,-1,4,1", 8, {"fsdp": 2, "tp": 4}),
    ("1,2,4,1", 8, {"fsdp": 2, "tp": 4}),
    ("-1,1,1,1", 8, {"dp": 8}),
    ("2,2,2,-1", 8, {"dp": 2, "fsdp": 2, "tp": 2}),
    ("fsdp=-1,tp=4,pp=2", 64, {"fsdp": 8, "tp": 4, "pp": 2}),
    ("tp=4,fsdp=-1", 8, {"fsdp": 2, "tp": 4}),
    ("ep=8", 8, {"ep": 8}),
]

MISTAKES = [
    ("1,3,2,1", "needs 6 devices; there are 8; -1 in one place fills the rest"),
    ("1,-1,3,1", "has 3 devices without fsdp=-1, which does not divide the 8"),
    ("-1,-1,1,1", "-1 at dp and fsdp; only one"),
    ("1,2,4", "has 3 entries; it takes 4"),
    ("1,2,x,1", "has 'x' for a degree"),
    ("1,0,8,1", "has '0' for a degree"),
    ("1,-2,4,1", "has '-2' for a degree"),
    ("", "has 1 entries"),
    ("model=8", "names axis 'model'; here that is tp; the axes are dp, fsdp, tp, sp, ep or pp"),
    ("cp=8", "names axis 'cp'; here that is sp; the axes are"),
    ("fsdp_transpose=8", "here that is fsdp, the product of both degrees; the axes are"),
    ("autoregressive=8", "here that is tp of plan --serve decode; the axes are"),
    ("ici_pipeline_parallelism=8", "here that is pp; the axes are"),
    ("dcn_fsdp_parallelism=2", "here that is fsdp of a system of several slices, as --on 2*v5p:4x4x4, whose outermost"),
    ("ici_diloco_parallelism=2", "names axis 'ici_diloco_parallelism'; the axes are"),
    ("tensor_sequence=8", "here that is tp, which splits the stream's tokens too; the axes are"),
    ("nope=8", "names axis 'nope'; the axes are dp, fsdp, tp, sp, ep or pp"),
    ("tp=2,tp=4", "names tp twice"),
    ("tp=", "has '' for a degree"),
]


@pytest.mark.parametrize(("text", "num_devices", "degrees"), MEANINGS)
def test_mesh_dim_means_these_degrees(text, num_devices, degrees):
    assert parse_mesh(text, num_devices=num_devices) == MeshShape(**degrees)


@pytest.mark.parametrize(("text", "said"), MISTAKES)
def test_a_mesh_dim_that_cannot_be_is_told_in_one_line_with_its_numbers(text, said):
    with pytest.raises(MeshwrightError) as error:
        parse_mesh(text, num_devices=8)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@given(st.permutations(AXES), st.lists(st.integers(1, 4), min_size=6, max_size=6), st.integers(0, 5))
def test_the_named_form_is_read_in_any_order_and_fills_one_degree(order, sizes, inferred):
    degrees = dict(zip(order, sizes, strict=True))
    words = [f"{axis}={-1 if place == inferred else degree}" for place, (axis, degree) in enumerate(degrees.items())]
    assert parse_mesh(",".join(words), num_devices=math.prod(sizes)) == MeshShape(**degrees)


@given(st.text(max_size=20))
def test_no_text_makes_anything_but_a_mesh_or_a_clear_error(text):
    try:
        mesh = parse_mesh(text, num_devices=8)
    except MeshwrightError:
        return
    assert mesh.num_devices == 8


def test_a_mesh_prints_as_people_type_it():
    assert str(MeshShape(fsdp=2, tp=4)) == "fsdp=2,tp=4"
    assert str(MeshShape()) == "dp=1"
    assert parse_mesh(str(MeshShape(dp=2, pp=4)), num_devices=8) == MeshShape(dp=2, pp=4)


def test_the_layout_has_every_axis_with_tp_innermost_and_pp_outermost():
    layout = MeshShape(tp=4, fsdp=2).layout
    assert tuple(layout) == LAYOUT
    assert (LAYOUT[0], LAYOUT[-1]) == ("pp", "tp")
    assert set(layout) == set(AXES)


def test_a_batch_is_a_multiple_of_dp_times_fsdp_and_a_sequence_of_sp():
    check_batch(MeshShape(dp=2, fsdp=4, sp=2), batch=16, seq_len=256)
    with pytest.raises(MeshwrightError, match=r"batch 12 is not a multiple of dp\*fsdp = 2\*4 = 8; use 8 or 16"):
        check_batch(MeshShape(dp=2, fsdp=4), batch=12, seq_len=256)
    with pytest.raises(MeshwrightError, match=r"sequence length 255 is not a multiple of sp = 2; use 254 or 256"):
        check_batch(MeshShape(sp=2), batch=12, seq_len=255)
    with pytest.raises(MeshwrightError, match=r"batch 0 is not a multiple"):
        check_batch(MeshShape(), batch=0, seq_len=255)


def test_a_dim_that_a_degree_does_not_divide_is_told_with_the_nearest_that_do():
    check_divides("kv_heads", 8, MeshShape(tp=4), ("tp",))
    with pytest.raises(MeshwrightError, match=r"tp=3 cannot split kv_heads=8: 8 % 3 = 2; use tp=2 or tp=4"):
        check_divides("kv_heads", 8, MeshShape(tp=3, dp=4), ("tp",))
    # Of 3 devices neither 2 nor 4 can be tp.
    with pytest.raises(MeshwrightError, match=r"tp=3 cannot split kv_heads=8: 8 % 3 = 2; use tp=1$"):
        check_divides("kv_heads", 8, MeshShape(tp=3), ("tp",))


@given(st.integers(1, 3000))
def test_divisors_are_all_there_and_ascend(size):
    assert divisors(size) == [d for d in range(1, size + 1) if size % d == 0]


def test_a_local_shape_is_the_shape_over_the_axes_of_each_dim():
    assert local_shape((16, 6), (("dp", "fsdp"), ()), {"dp": 2, "fsdp": 4}) == (2, 6)

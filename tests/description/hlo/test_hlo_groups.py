import numpy as np
import pytest

from meshwright.description.hlo.groups import axes_of_groups, axes_of_pairs, parse_groups, parse_pairs
from meshwright.errors import MeshwrightError

MESH = {"pp": 1, "dp": 1, "fsdp": 2, "ep": 1, "sp": 1, "tp": 4}
ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))

# Each row: the spellings of the same groups of 8 devices.
SPELLINGS = [
    (ROWS, ["{{0,1,2,3},{4,5,6,7}}", "[2,4]<=[8]", "mesh['axis_0'=2,'axis_1'=4] {'axis_1'}"]),
    (COLUMNS, ["{{0,4},{1,5},{2,6},{3,7}}", "[4,2]<=[2,4]T(1,0)", "mesh['axis_0'=2,'axis_1'=4] {'axis_0'}"]),
    (COLUMNS, ["mesh[a=1,b=4,c=2], device_ids=([2,4]T(1,0)) {c}"]),
    (COLUMNS, ["mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}"]),
    (((0, 1, 2, 3, 4, 5, 6, 7),), ["{}", "[1,8]<=[8]", "mesh['a'=2,'b'=4] {'a','b'}", "{{0,1,2,3,4,5,6,7}}"]),
    (((0, 2), (1, 3), (4, 6), (5, 7)), ["mesh['a'=8] {'a':(2)2}", "{{0,2},{1,3},{4,6},{5,7}}"]),
    (((0, 1, 4, 5), (2, 3, 6, 7)), ["mesh['a'=8] {'a':(1)2,'a':(4)2}"]),
    (((0, 4, 1, 5, 2, 6, 3, 7),), ["mesh['a'=2,'b'=4] {'b','a'}"]),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "spellings"), SPELLINGS)
def test_every_spelling_of_a_group_means_the_same_devices(groups, spellings):
    for spelling in spellings:
        assert parse_groups(spelling, num_devices=8) == groups, spelling


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (ROWS, ("tp",)),
        (COLUMNS, ("fsdp",)),
        ((tuple(range(8)),), ("fsdp", "tp")),
        ((tuple(reversed(range(8))),), ("fsdp", "tp")),
        (tuple((device,) for device in range(8)), ()),
        (((0, 1), (2, 3), (4, 5), (6, 7)), None),  # half of tp
        (((0, 1, 2, 3), (4, 5), (6, 7)), None),  # groups unlike each other
        (((0, 5), (1, 4), (2, 7), (3, 6)), None),  # a diagonal
        (((0, 8), (1, 9)), None),  # devices the mesh has not
    ],
)
def test_groups_lie_along_mesh_axes_or_are_said_to_be_no_product_of_them(groups, axes):
    assert axes_of_groups(groups, MESH) == axes


@pytest.mark.parametrize("axes", [("dp",), ("dp", "tp"), ("sp", "dp"), ("dp", "sp", "tp")])
def test_axes_are_found_again_from_the_groups_they_make(axes):
    mesh = {"dp": 2, "sp": 3, "tp": 4}
    devices = np.arange(24).reshape(2, 3, 4)
    along = [list(mesh).index(axis) for axis in axes]
    groups = np.moveaxis(devices, along, range(-len(along), 0)).reshape(-1, np.prod([mesh[axis] for axis in axes]))
    assert axes_of_groups(tuple(map(tuple, groups.tolist())), mesh) == tuple(axis for axis in mesh if axis in axes)


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("tp",)),
        ("{{0,4},{4,0}}", ("fsdp",)),
        ("{{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}", ("fsdp", "tp")),
        ("{{0,0},{1,1}}", ()),
        ("{}", ()),
    ],
)
def test_a_permute_goes_along_the_axes_in_which_any_source_differs_from_its_target(pairs, axes):
    assert axes_of_pairs(parse_pairs(pairs), MESH) == axes


@pytest.mark.parametrize(
    "text",
    ["[3,3]<=[8]", "[2,4]<=[8", "mesh['a'=2] {'b'}", "mesh['a'=0] {'a'}", "[99999999999]<=[99999999999]", "groups", "",
     "mesh['a'=99999999] {'a'}", "{{" + "9" * 5000 + "}}"],
)  # fmt: skip
def test_groups_that_mean_nothing_are_an_error(text):
    with pytest.raises(MeshwrightError, match="replica_groups"):
        parse_groups(text, num_devices=8)


@pytest.mark.parametrize("text", ["{{0,1,2}}", "{{0}}", "{{" + "9" * 5000 + ",1}}"])
def test_pairs_that_are_no_pairs_are_an_error(text):
    with pytest.raises(MeshwrightError, match="source_target_pairs"):
        parse_pairs(text)

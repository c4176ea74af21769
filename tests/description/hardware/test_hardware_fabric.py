import math

import pytest

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape

# system, mesh (outermost first), axes of the collective, how they lie
PLACEMENTS = [
    ("v5p:4x4x4", {"fsdp": 16, "tp": 4}, "tp", "ICI x: ring of 4"),
    ("v5p:4x4x4", {"fsdp": 16, "tp": 4}, "fsdp", "ICI y: ring of 4; ICI z: ring of 4"),
    ("v5p:4x4x4", {"fsdp": 16, "tp": 4}, ("fsdp", "tp"), "ICI x: ring of 4; ICI y: ring of 4; ICI z: ring of 4"),
    ("v5p:2x2x4", {"fsdp": 16}, "fsdp", "ICI x: line of 2; ICI y: line of 2; ICI z: line of 4"),
    ("v5e:8x16", {"fsdp": 16, "tp": 8}, "fsdp", "ICI y: ring of 16"),
    ("v5e:8x16", {"fsdp": 16, "tp": 8}, "tp", "ICI x: line of 8"),
    # a split axis: tp is a line of neighbours, fsdp what is left of the ring
    ("v5p:4x4x4", {"fsdp": 32, "tp": 2}, "tp", "ICI x: line of 2"),
    (
        "v5p:4x4x4",
        {"fsdp": 32, "tp": 2},
        "fsdp",
        "ICI x: ring of 2, every 2nd chip; ICI y: ring of 4; ICI z: ring of 4",
    ),
    ("v5p:4x4x4", {"fsdp": 32, "tp": 2}, ("fsdp", "tp"), "ICI x: ring of 4; ICI y: ring of 4; ICI z: ring of 4"),
    # tpu7x: the two devices of a chip
    ("tpu7x:4x4x4", {"fsdp": 64, "tp": 2}, "tp", "chip: 2 units"),
    ("tpu7x:4x4x4", {"fsdp": 64, "tp": 2}, "fsdp", "ICI x: ring of 4; ICI y: ring of 4; ICI z: ring of 4"),
    ("tpu7x:4x4x4", {"fsdp": 16, "tp": 8}, "tp", "ICI x: ring of 4; chip: 2 units"),
    # small slices, which JAX lays along a ring of neighbours
    ("v5e:4x4", {"fsdp": 16, "tp": 1}, "fsdp", "ICI xy: ring of 16"),
    ("v5e:4x4", {"fsdp": 4, "tp": 4}, "fsdp", "ICI y: line of 4"),
    ("v5e:2x4", {"fsdp": 4, "tp": 2}, "tp", "ICI xy: line of 2"),
    ("v5e:2x4", {"fsdp": 4, "tp": 2}, "fsdp", "ICI xy: ring of 4, every 2nd chip"),
    ("v6e:2x2", {"fsdp": 4}, "fsdp", "ICI xy: ring of 4"),
    ("v5p:2x2x2", {"fsdp": 2, "tp": 4}, ("fsdp", "tp"), "ICI xyz: ring of 8"),
    ("tpu7x:2x2x1", {"fsdp": 4, "tp": 2}, "fsdp", "ICI xy: ring of 4"),
    ("tpu7x:2x2x1", {"fsdp": 2, "tp": 4}, "tp", "ICI xy: line of 2; chip: 2 units"),
    ("tpu7x:2x2x2", {"dp": 2, "fsdp": 8}, "dp", "ICI z: line of 2"),
    ("v3:4x4", {"fsdp": 4, "tp": 8}, "tp", "ICI x: line of 4; chip: 2 units"),
    ("2*v5e:2x4", {"dp": 2, "fsdp": 8}, "fsdp", "ICI xy: ring of 8"),
    # slices: the outermost axis crosses between them
    ("2*v5e:16x16", {"dp": 2, "fsdp": 16, "tp": 16}, "dp", "DCN: 2 units, 256 groups share each link"),
    ("4*v5e:16x16", {"dp": 2, "fsdp": 512}, "fsdp", "ICI x: ring of 16; ICI y: ring of 16; DCN: 2 units"),
    # GPUs: the innermost axes fill a node
    ("h100:64", {"dp": 2, "fsdp": 4, "tp": 8}, "tp", "node: 8 units"),
    ("h100:64", {"dp": 2, "fsdp": 4, "tp": 8}, "fsdp", "leaf: 4 units, 8 groups share each link"),
    ("h100:64", {"fsdp": 32, "tp": 2}, "fsdp", "node: 4 units; leaf: 8 units, 2 groups share each link"),
    ("h100:64", {"fsdp": 4, "tp": 16}, "tp", "node: 8 units; leaf: 2 units"),
    ("h100:1024", {"dp": 4, "fsdp": 256}, "dp", "spine: 4 units, 256 groups share each link"),
    ("h100:1024", {"fsdp": 1024}, "fsdp", "node: 8 units; leaf: 32 units; spine: 4 units"),
    ("h100:4096", {"fsdp": 4096}, "fsdp", "node: 8 units; leaf: 32 units; spine: 16 units"),
    ("gb200:128", {"dp": 2, "fsdp": 64}, "fsdp", "node: 64 units"),
    ("h100:4", {"dp": 2, "tp": 2}, ("dp", "tp"), "node: 4 units"),
    ("cpu:8", {"fsdp": 4, "tp": 2}, "fsdp", "memory: 4 units"),
    ("cpu:8", {"fsdp": 8, "tp": 1}, "tp", "inside one device"),
]


@pytest.mark.parametrize(("system", "mesh", "axes", "lies"), PLACEMENTS)
def test_an_axis_lies_on_the_fabric(system, mesh, axes, lies):
    assert str(lay_mesh(parse_system(system), mesh).placement(axes)) == lies


@pytest.mark.parametrize(("system", "mesh", "axes", "lies"), PLACEMENTS)
def test_a_placement_holds_as_many_devices_as_its_axes(system, mesh, axes, lies):
    placement = lay_mesh(parse_system(system), mesh).placement(axes)
    names = (axes,) if isinstance(axes, str) else axes
    assert placement.axes == names
    assert placement.degree == math.prod(mesh[name] for name in names)
    levels = [crossing.degree for crossing in placement.crossings] + [ring.size for ring in placement.rings]
    assert math.prod(levels) == placement.degree


def test_groups_that_interleave_share_the_links_of_a_split_axis():
    layout = lay_mesh(parse_system("v5p:4x4x4"), {"fsdp": 32, "tp": 2})
    assert layout.is_split
    assert [ring.link_bytes_per_second for ring in layout.placement("fsdp").rings] == [4.5e10, 9e10, 9e10]
    assert layout.placement("tp").is_split
    assert not layout.placement(("fsdp", "tp")).is_split


def test_a_split_mesh_says_so_and_whether_jax_takes_it():
    (refused,) = lay_mesh(parse_system("v6e:16x16"), {"fsdp": 64, "tp": 4}).notes
    assert refused.startswith("fsdp=64,tp=4 does not take whole physical axes of v6e:16x16")
    assert "jax.make_mesh refuses it" in refused
    (taken,) = lay_mesh(parse_system("v5e:16x16"), {"fsdp": 64, "tp": 4}).notes
    assert "refuses" not in taken


def test_a_mesh_smaller_than_the_system_leaves_the_rest_idle():
    layout = lay_mesh(parse_system("v5e:4x4"), {"X": 4})
    assert layout.notes == ("12 of 16 devices are idle",)
    assert str(layout.placement("X")) == "ICI x: line of 4"


def test_the_devices_of_a_chip_share_its_links():
    system = parse_system("tpu7x:4x4x4")
    apart = lay_mesh(system, {"fsdp": 64, "tp": 2}).placement("fsdp")
    together = lay_mesh(system, {"fsdp": 128}).placement("fsdp")
    assert {ring.link_bytes_per_second for ring in apart.rings} == {4.5e10}
    assert {ring.link_bytes_per_second for ring in together.rings} == {9e10}


def test_a_slice_sends_with_all_its_chips_over_the_data_centre_network():
    """Scaling book, training, scaling across pods: bandwidth out of a pod grows with its chips."""
    (crossing,) = lay_mesh(parse_system("2*v5p:4x4x4"), {"dp": 2, "fsdp": 64}).placement("dp").crossings
    assert crossing.link_bytes_per_second == 64 * 6.25e9
    assert (crossing.degree, crossing.members, crossing.sharers) == (2, 1, 64)


def test_an_axis_that_crosses_slices_is_named():
    assert lay_mesh(parse_system("2*v5e:4x4"), {"dp": 2, "tp": 16}).notes == (
        "dp runs over 2 slices, on the data-centre network",
    )
    (note, *_) = lay_mesh(parse_system("2*v5e:4x4"), {"dp": 1, "tp": 32}).notes
    assert note.startswith("tp runs over 2 slices")


def test_a_node_used_in_part_sends_with_part_of_its_network_cards():
    (_, leaf) = lay_mesh(parse_system("gb200:128"), {"fsdp": 128}).placement("fsdp").crossings
    assert leaf.link_bytes_per_second == 3.6e12 * 64 / 72


def test_groups_that_straddle_nodes_are_split():
    layout = lay_mesh(parse_system("h100:24"), {"fsdp": 8, "tp": 3})
    tensor = layout.placement("tp")
    assert tensor.is_split
    assert str(tensor) == "leaf: 3 units, 8 groups share each link"


def test_the_axes_of_a_mesh_shape_lie_in_its_layout_order():
    mesh = MeshShape(pp=2, dp=2, fsdp=4, tp=8)
    layout = lay_mesh(parse_system("h100:128"), mesh.layout)
    assert str(layout.placement("tp")) == "node: 8 units"
    assert str(layout.placement("ep")) == "inside one device"
    assert str(layout.placement("pp")) == "leaf: 2 units, 8 groups share each link"


@pytest.mark.parametrize(
    ("system", "mesh", "error"),
    [
        ("v5e:4x4", {"dp": 3}, "mesh dp=3 has 3 devices, v5e:4x4 16; the mesh must use all of them or an even share"),
        ("h100:8", {"fsdp": 16}, "mesh fsdp=16 has 16 devices, h100:8 8"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(system, mesh, error):
    with pytest.raises(MeshwrightError, match=error):
        lay_mesh(parse_system(system), mesh)


def test_an_axis_that_is_not_on_the_mesh_is_refused():
    with pytest.raises(MeshwrightError, match="axis 'tp' is not on the mesh; its axes are X, Y"):
        lay_mesh(parse_system("v5e:4x4"), {"X": 4, "Y": 4}).placement("tp")


def test_a_ring_laid_by_hand_is_no_slower_than_the_lines_it_winds_through():
    """The whole slice over both links of a ring: as fast as a line each way, but for its first and last hop."""
    system = parse_system("v5e:4x4")
    (ring,) = lay_mesh(system, {"fsdp": 16}).placement("fsdp").rings
    lines = lay_mesh(system, {"fsdp": 4, "tp": 4}).placement(("fsdp", "tp")).rings
    assert ring.is_wrapped
    assert 2 * ring.link_bytes_per_second == sum(line.link_bytes_per_second for line in lines)


def test_a_mesh_that_jax_refuses_is_laid_in_parts_and_said_to_be_refused():
    """v4, v5p, v6e and 7x take whole physical axes alone; v5e takes parts; small slices take any mesh."""
    for name, is_refused in (("v6e:4x4", True), ("v5e:4x4", False), ("v6e:2x4", False), ("v5p:2x2x2", False)):
        system = parse_system(name)
        layout = lay_mesh(system, {"fsdp": system.num_devices // 2, "tp": 2})
        assert layout.is_refused is is_refused, name
        assert any("jax.make_mesh refuses it" in note for note in layout.notes) is is_refused

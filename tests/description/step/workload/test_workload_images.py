"""The ResNet family: what its declarations come to, against the published counts."""

import itertools
from dataclasses import replace

import pytest

from meshwright.description.step.images import (
    RESNETS,
    ImageWorkload,
    check_image_mesh,
    convolutions,
    image_parameters,
    num_image_parameters,
)
from meshwright.description.step.parameter_tree import leaves
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.cost.images import image_step_flops

RESNET50 = RESNETS["resnet50"]

# Parameters and GFLOPS (multiply-adds at 224 x 224) as pytorch.org/vision/stable/models lists them for each model.
PUBLISHED = [
    ("resnet18", 11_689_512, 1.81),
    ("resnet34", 21_797_672, 3.66),
    ("resnet50", 25_557_032, 4.09),
    ("resnet101", 44_549_160, 7.80),
    ("resnet152", 60_192_808, 11.51),
]


def image_flops_forward(model):
    """The flops of one image forward."""
    return image_step_flops(ImageWorkload(model=model, batch=1), MeshShape()).forward


@pytest.mark.parametrize(("name", "parameters", "gmacs"), PUBLISHED)
def test_parameters_and_products_are_the_published_ones(name, parameters, gmacs):
    assert num_image_parameters(RESNETS[name]) == parameters
    assert round(image_flops_forward(RESNETS[name]) / 2e9, 2) == gmacs


@pytest.mark.parametrize(("name", "depth"), [(name, int(name.removeprefix("resnet"))) for name in RESNETS])
def test_a_model_is_as_deep_as_it_is_called(name, depth):
    """Layers with weights on the way through: shortcuts stand beside it."""
    assert sum(made.place != "shortcut" for made in convolutions(RESNETS[name])) == depth


def test_where_a_bottleneck_takes_its_stride_changes_the_products_not_the_parameters():
    """The paper's own counts 3.8 x 10^9 multiply-adds (arXiv:1512.03385, table 1)."""
    paper = replace(RESNET50, strides_late=False)
    assert num_image_parameters(paper) == num_image_parameters(RESNET50)
    assert image_flops_forward(paper) / 2e9 == pytest.approx(3.8, rel=0.02)


def test_images_halve_five_times_and_blocks_follow_each_other():
    made = convolutions(RESNET50)
    assert {c.out_size for c in made} == {112, 56, 28, 14, 7, 1}
    inside = [c for c in made if c.place in ("first", "inner", "last")]
    for before, after in itertools.pairwise(inside):
        assert (before.out_channels, before.out_size) == (after.in_channels, after.in_size)


def test_every_convolution_is_declared_once_with_its_norm():
    tree = image_parameters(RESNET50)
    assert list(tree) == [made.path for made in convolutions(RESNET50)]
    sizes = {path: parameter.size for path, parameter in leaves(tree)}
    assert all(
        sizes[f"{made.path}.kernel"] == made.kernel**2 * made.in_channels * made.out_channels
        for made in convolutions(RESNET50)
    )
    assert sum("norm_bias" in path for path in sizes) == 53


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (MeshShape(tp=8), "has tp=8, which would split nothing of resnet50; use tp=1 .*dp.*fsdp"),
        (MeshShape(sp=2), "has sp=2"),
        (MeshShape(pp=2), "has pp=2"),
        (MeshShape(dp=3), "batch 256 is not a multiple"),
        (MeshShape(fsdp=128), "fsdp=128 cannot split channels_out=64 of stem.kernel"),
    ],
)
def test_a_mesh_that_cannot_split_images_is_told(mesh, message):
    with pytest.raises(MeshwrightError, match=message):
        check_image_mesh(ImageWorkload(model=RESNET50, batch=256), mesh)


def test_meshes_of_dp_and_fsdp_are_legal():
    for mesh in (MeshShape(), MeshShape(dp=256), MeshShape(fsdp=64), MeshShape(dp=2, fsdp=4)):
        check_image_mesh(ImageWorkload(model=RESNET50, batch=256), mesh)


def test_a_batch_has_images():
    with pytest.raises(MeshwrightError, match="batch is 0; it takes a whole number of images from 1"):
        ImageWorkload(model=RESNET50, batch=0)

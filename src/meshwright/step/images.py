"""Image models: the ResNet family (arXiv:1512.03385, table 1), its parameters declared once, and a step of one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape, check_batch
from meshwright.step.parameter_tree import Parameter, Tree, leaves
from meshwright.step.rules import Rules, local_parameter_shape
from meshwright.step.workload import Dtype

Place = Literal["stem", "first", "inner", "last", "shortcut", "classes"]

IMAGE_RULES: Rules = {
    # A filter's results are what fsdp stores in shards: all but the stem's three colours divide alike.
    "kernel": (),
    "channels_in": (),
    "channels_out": ("fsdp",),
    "features": ("fsdp",),
    "classes": (),
    "norm": (),
    "batch": ("dp", "fsdp"),
}
"""Where the dims of an image model lie: kernels stored over fsdp, images split over dp and fsdp."""


@dataclass(frozen=True, kw_only=True)
class ConvNet:
    """A ResNet: a stem, stages of residual blocks, the mean over what is left of the image, a product to the classes.

    blocks: of each stage; a stage is twice as wide and half as large as the one before. width: of the first. A
    bottleneck is three convolutions, the last of them four times as wide; a basic block two. strides_late: a bottleneck
    halves the image in its 3x3 convolution, as torchvision and NVIDIA do (v1.5), not in its first 1x1 as in the paper.
    """

    name: str
    blocks: tuple[int, ...]
    is_bottleneck: bool
    width: int = 64
    image_size: int = 224
    num_classes: int = 1000
    strides_late: bool = True

    @property
    def num_blocks(self) -> int:
        """The residual blocks of all stages."""
        return sum(self.blocks)


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """One convolution on a square image of `in_size`, padded so that only the stride makes it smaller.

    place: in a residual block, whose `last` is summed with the block's input or with what `shortcut` makes of it.
    The product to the classes is one on a single pixel; all others are followed by a batch norm.
    """

    path: str
    place: Place
    in_channels: int
    out_channels: int
    in_size: int
    kernel: int = 1
    stride: int = 1

    @property
    def out_size(self) -> int:
        """The side of the image that comes out."""
        return math.ceil(self.in_size / self.stride)

    @property
    def in_elements(self) -> int:
        """The elements of an image that goes in."""
        return self.in_size**2 * self.in_channels

    @property
    def out_elements(self) -> int:
        """The elements of an image that comes out."""
        return self.out_size**2 * self.out_channels

    @property
    def weight_elements(self) -> int:
        """The elements of its kernel."""
        return self.kernel**2 * self.in_channels * self.out_channels

    @property
    def flops(self) -> int:
        """The operations for one image, forward: 2 for each element of the kernel and each pixel that comes out."""
        return 2 * self.out_size**2 * self.weight_elements

    @property
    def has_norm(self) -> bool:
        """Whether a batch norm follows."""
        return self.place != "classes"


@dataclass(frozen=True, kw_only=True)
class ImageWorkload:
    """A training step of an image model: `batch` images over all devices, every activation kept for backward.

    Parameters and SGD's momentum are kept in `param_dtype`; convolutions, activations and the gradients that are summed
    are in `compute_dtype`. syncs_norms: batch norms take their statistics from the images of all devices. fuses: norms,
    relus and sums are compiled into few passes over memory, as XLA does, or run one by one, as eager frameworks do.
    """

    model: ConvNet
    batch: int
    compute_dtype: Dtype = "bf16"
    param_dtype: Dtype = "f32"
    syncs_norms: bool = False
    fuses: bool = True

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise MeshwrightError(f"batch is {self.batch}; it takes a whole number of images from 1")


RESNETS: Mapping[str, ConvNet] = {
    f"resnet{depth}": ConvNet(name=f"resnet{depth}", blocks=blocks, is_bottleneck=depth >= 50)
    for depth, blocks in (
        (18, (2, 2, 2, 2)),
        (34, (3, 4, 6, 3)),
        (50, (3, 4, 6, 3)),
        (101, (3, 4, 23, 3)),
        (152, (3, 8, 36, 3)),
    )
}
"""The image models by name: arXiv:1512.03385, table 1."""


@cache
def convolutions(model: ConvNet) -> tuple[Convolution, ...]:
    """Every convolution of a model in the order of the forward pass, a block's shortcut before its own."""
    stem = Convolution(
        path="stem",
        place="stem",
        in_channels=3,
        out_channels=model.width,
        in_size=model.image_size,
        kernel=7,
        stride=2,
    )
    found = [stem]
    channels, size = model.width, pooled_size(model)
    for stage, count in enumerate(model.blocks):
        width = model.width * 2**stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            found += _block(model, f"stage{stage + 1}.block{block + 1}", channels, width, size, stride)
            channels, size = found[-1].out_channels, found[-1].out_size
    classes = Convolution(
        path="classes", place="classes", in_channels=channels, out_channels=model.num_classes, in_size=1
    )
    return (*found, classes)


def pooled_size(model: ConvNet) -> int:
    """The side of the image after the stem and the maximum over 3x3 pixels, of which every second is kept."""
    return math.ceil(math.ceil(model.image_size / 2) / 2)


def _block(model: ConvNet, path: str, channels: int, width: int, size: int, stride: int) -> Iterator[Convolution]:
    """The convolutions of one residual block, its shortcut first where the sum wants other channels or another size."""
    if model.is_bottleneck:
        first, middle = (1, stride) if model.strides_late else (stride, 1)
        shape = ((1, width, first), (3, width, middle), (1, 4 * width, 1))
    else:
        shape = ((3, width, stride), (3, width, 1))
    if stride > 1 or channels != shape[-1][1]:
        yield Convolution(
            path=f"{path}.shortcut",
            place="shortcut",
            in_channels=channels,
            out_channels=shape[-1][1],
            in_size=size,
            stride=stride,
        )
    for index, (kernel, out_channels, step) in enumerate(shape, start=1):
        place: Place = "first" if index == 1 else "last" if index == len(shape) else "inner"
        made = Convolution(
            path=f"{path}.conv{index}",
            place=place,
            in_channels=channels,
            out_channels=out_channels,
            in_size=size,
            kernel=kernel,
            stride=step,
        )
        yield made
        channels, size = made.out_channels, made.out_size


@cache
def image_parameters(model: ConvNet) -> Tree[Parameter]:
    """The declaration of every parameter of an image model: kernels, the two vectors of each norm, a bias."""
    tree: dict[str, dict[str, Parameter]] = {}
    for made in convolutions(model):
        fan_in = made.kernel**2 * made.in_channels
        if made.has_norm:
            axes = ("kernel", "kernel", "channels_in", "channels_out")
            shape = (made.kernel, made.kernel, made.in_channels, made.out_channels)
            vectors = {
                "norm": Parameter(shape=(made.out_channels,), axes=("norm",), init="ones", role="vector"),
                "norm_bias": Parameter(shape=(made.out_channels,), axes=("norm",), scale=0.0, role="vector"),
            }
        else:
            axes, shape = ("features", "classes"), (made.in_channels, made.out_channels)
            vectors = {"bias": Parameter(shape=(made.out_channels,), axes=("norm",), scale=0.0, role="vector")}
        # Twice the variance, as half of what comes in is cut off by the relu (arXiv:1502.01852).
        tree[made.path] = {"kernel": Parameter(shape=shape, axes=axes, scale=math.sqrt(2 / fan_in))} | vectors
    return tree


def num_image_parameters(model: ConvNet) -> int:
    """The number of parameters of an image model; the running statistics of batch norms are none."""
    return sum(parameter.size for _, parameter in leaves(image_parameters(model)))


def check_image_mesh(workload: ImageWorkload, mesh: MeshShape) -> None:
    """Raise where the mesh cannot split the images or the kernels, or has an axis that would split nothing."""
    for axis, degree in mesh.degrees.items():
        if degree > 1 and axis not in IMAGE_RULES["batch"]:
            raise MeshwrightError(
                f"mesh {mesh} has {axis}={degree}, which would split nothing of {workload.model.name};"
                f" use {axis}=1 (an image model is split over dp, its images, and fsdp, its images and kernels)"
            )
    check_batch(mesh, batch=workload.batch, seq_len=1)
    for path, parameter in leaves(image_parameters(workload.model)):
        local_parameter_shape(parameter, mesh=mesh, rules=IMAGE_RULES, what=path)

"""Image models: the ResNet family (arXiv:1512.03385, table 1), its parameters, and the ops of a train step.

A convolution is a matmul with a row for each output pixel: the inputs that its filter covers (implicit GEMM,
arXiv:1410.0759). Differentiation and collectives come from the same passes as in a decoder's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal

from meshwright.description.step.ir import Array, Block, Dim, Extents, Matmul, Op, Ops, Pass, Region, Repeat, Step
from meshwright.description.step.parameter_tree import Parameter, leaves
from meshwright.description.step.passes.differentiate import backward_ops, forward_ops, gathers, scatters, sums
from meshwright.description.step.passes.nodes import Move, Node, PassOver, Product, Vector, Weight, Work
from meshwright.description.step.rules import Rules, local_parameter_shape
from meshwright.description.step.workload import Dtype
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape, check_batch

Place = Literal["stem", "first", "inner", "last", "shortcut", "classes"]

IMAGE_RULES: Rules = {
    # fsdp shards output channels, which are divisible in all layers; the stem has only three input channels.
    "kernel": (),
    "channels_in": (),
    "channels_out": ("fsdp",),
    "features": ("fsdp",),
    "classes": (),
    "norm": (),
    "batch": ("dp", "fsdp"),
}
"""Sharding rules of image models: kernels are stored over fsdp, images are split over dp and fsdp."""

NORMS: Mapping[Place, Pass] = {"last": "batch_norm_add", "shortcut": "batch_norm_shortcut"}
"""The elementwise pass of a batch norm, by its convolution's place in a residual block.

At these places the residual sum comes after the norm; at others a relu does.
"""

STATISTICS = "statistics of batch norms"
"""Name of the all-reduce of batch norm statistics."""


@dataclass(frozen=True, kw_only=True)
class ConvNet:
    """A ResNet: a stem, stages of residual blocks, mean pooling, and a matmul to the classes."""

    name: str
    # Number of blocks in each stage. Each stage has twice the width of the previous one, and half its image size.
    blocks: tuple[int, ...]
    is_bottleneck: bool
    width: int = 64  # Channels of the first stage.
    image_size: int = 224
    num_classes: int = 1000
    # Whether a bottleneck has its stride in the 3x3 convolution, as torchvision's and NVIDIA's (v1.5), and not in its
    # first 1x1 convolution, as in the paper.
    strides_late: bool = True

    @property
    def num_blocks(self) -> int:
        """Number of residual blocks in all stages."""
        return sum(self.blocks)


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """One convolution on a square image of `in_size` pixels per side, padded so that only the stride shrinks the image.

    The matmul to the classes is a convolution on a single pixel; all others are followed by a batch norm.
    """

    path: str
    # Position in a residual block. The output of `last` is added to the block's input or to the output of `shortcut`.
    place: Place
    in_channels: int
    out_channels: int
    in_size: int
    kernel: int = 1
    stride: int = 1

    @property
    def out_size(self) -> int:
        """Side of the output image, in pixels."""
        return math.ceil(self.in_size / self.stride)

    @property
    def block(self) -> str:
        """Name of the residual block that contains it; the stem and the classes count as blocks too."""
        return self.path.rpartition(".")[0] or self.path

    @property
    def has_norm(self) -> bool:
        """Whether a batch norm follows the convolution."""
        return self.place != "classes"


@dataclass(frozen=True, kw_only=True)
class ImageWorkload:
    """A training step of an image model: `batch` images over all devices, every activation kept for backward.

    Parameters and SGD's momentum are stored in `param_dtype`; convolutions, activations and gradients that are summed
    over devices are in `compute_dtype`.

    Attributes:
        syncs_norms: whether batch norms use statistics of the images of all devices.
        fuses: whether norms, relus and sums are fused into few passes over memory, as by XLA. If False, each is a pass,
            as in eager frameworks.
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
"""The ResNets by name (arXiv:1512.03385, table 1)."""


@cache
def convolutions(model: ConvNet) -> tuple[Convolution, ...]:
    """Return every convolution of a model in forward order. A block's shortcut precedes its other convolutions."""
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
    """Return the image's side, in pixels, after the stem and its 3x3 max pooling of stride 2."""
    return math.ceil(math.ceil(model.image_size / 2) / 2)


def _block(model: ConvNet, path: str, channels: int, width: int, size: int, stride: int) -> Iterator[Convolution]:
    """Yield the convolutions of one residual block: the shortcut first, if channels or image size change."""
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
def image_parameters(model: ConvNet) -> Mapping[str, Mapping[str, Parameter]]:
    """Return the declaration of each parameter of an image model, by the convolution's path and the parameter's name.

    A convolution has a kernel, and the scale and bias of its norm; the matmul to the classes has a kernel and a bias.
    """
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
        # Twice the variance, because relu zeroes half of the input (arXiv:1502.01852).
        tree[made.path] = {"kernel": Parameter(shape=shape, axes=axes, scale=math.sqrt(2 / fan_in))} | vectors
    return tree


def num_image_parameters(model: ConvNet) -> int:
    """Return the number of parameters of an image model, without the running statistics of batch norms."""
    return sum(parameter.size for _, parameter in leaves(image_parameters(model)))


def check_image_mesh(workload: ImageWorkload, mesh: MeshShape) -> None:
    """Raise if the mesh cannot split the images or the kernels, or if one of its axes splits neither."""
    for axis, degree in mesh.degrees.items():
        if degree > 1 and axis not in IMAGE_RULES["batch"]:
            raise MeshwrightError(
                f"mesh {mesh} has {axis}={degree}, which would split nothing of {workload.model.name};"
                f" use {axis}=1 (an image model is split over dp, its images, and fsdp, its images and kernels)"
            )
    check_batch(mesh, batch=workload.batch, seq_len=1)
    for path, parameter in leaves(image_parameters(workload.model)):
        local_parameter_shape(parameter, mesh=mesh, rules=IMAGE_RULES, what=path)


def image_step(workload: ImageWorkload, mesh: MeshShape) -> Step:
    """Return a train step of an image model. Its symbol `B` is the number of images of all devices.

    Each residual block is a region.
    """
    live = tuple(axis for axis in IMAGE_RULES["batch"] if mesh.degree(axis) > 1)
    ops = _image_ops(workload.model, live, workload.syncs_norms)
    once = Repeat(useful=1, executed=1, static=1, mean=1.0)
    repeats = {op.region.name: once for op in ops.ops}
    return Step(ops=ops, repeats=repeats, extents=Extents(sizes={"B": workload.batch}, mesh=mesh))


@lru_cache(maxsize=256)
def _image_ops(model: ConvNet, live: tuple[str, ...], syncs_norms: bool) -> Ops:
    """Return the ops of a step. Forward and backward both gather the kernels. live: the axes larger than 1."""
    ops: list[Op] = []
    for node in _Sharder(model, live, syncs_norms).nodes():
        ops += forward_ops(node)
        for op in backward_ops(node):
            is_of_images = isinstance(op, Matmul) and op.role == "input_gradient" and op.source == "images"
            if not is_of_images:  # The gradient of the images is not needed.
                ops.append(op)
        for work in node.work:
            if isinstance(work, Weight):
                ops += gathers(work, node.region, "forward")
                ops += gathers(work, node.region, "backward")
                ops += scatters(work, node.region)
            elif isinstance(work, Vector):
                ops += sums(work, node.region)
    return Ops(tuple(ops))


@dataclass(frozen=True)
class _Sharder:
    """Builder of the nodes of an image model whose images are split over the axes `live`."""

    model: ConvNet
    live: tuple[str, ...]
    syncs_norms: bool

    def nodes(self) -> Iterator[Node]:
        """Yield a node for each convolution with its norm, relu and sum, and for each pool."""
        stream = self._pixels("images", self.model.image_size, 3)
        parameters = image_parameters(self.model)
        source = stream
        for made in convolutions(self.model):
            if made.place in ("shortcut", "first"):
                source = stream
            if made.place == "classes":
                source = self._pixels("mean", 1, made.in_channels)
                yield _node("classes", PassOver(kind="pool", arrays=(stream,)))
            output = self._pixels(made.path, made.out_size, made.out_channels, "PQK")
            yield _node(made.block, *self._convolution(made, source, output, parameters[made.path]))
            if made.place == "first":
                # The gradient of the block's input has two terms: from this convolution and from the shortcut.
                yield _node(made.block, PassOver(kind="gradients", arrays=(source,)))
            source = self._pixels(f"{made.path}.relu", made.out_size, made.out_channels)
            if made.place == "last":
                stream = source
            if made.place == "stem":
                stream = self._pixels("maximum", pooled_size(self.model), made.out_channels)
                yield _node("stem", PassOver(kind="pool", arrays=(source, stream)))

    def _convolution(
        self, convolution: Convolution, source: Array, output: Array, declared: Mapping[str, Parameter]
    ) -> Iterator[Work]:
        """Yield the work of a convolution and its batch norm.

        Args:
            convolution: the convolution.
            source: its input.
            output: its output.
            declared: its parameters by name.
        """
        kernel = declared["kernel"]
        stored = Array("kernel", self._stored(kernel))
        used = Array("kernel", tuple(dim._replace(axes=()) for dim in stored.dims))
        weight = Weight(name=f"{convolution.path}.kernel", stored=stored, used=used, pending=self.live)
        *inner, columns = used.dims
        yield weight
        yield Product(
            name=convolution.path,
            rows=output.dims[:-1],
            inner=tuple(inner),
            columns=(columns,),
            source=source.name,
            weight=weight,
            image=source,
        )
        for name, parameter in declared.items():
            if parameter.role == "vector":
                array = Array(name, self._stored(parameter), width="float32")
                yield Vector(name=f"{convolution.path}.{name}", array=array, pending=(self.live,))
        if convolution.has_norm:
            yield PassOver(kind=NORMS.get(convolution.place, "batch_norm"), arrays=(output,))
            if self.syncs_norms:
                # A sum and a sum of squares for each channel. In backward there are two sums of gradients.
                whole = Array(STATISTICS, (Dim("T", 2), columns), width="float32")
                yield Move(name=STATISTICS, before=replace(whole, unreduced=self.live), after=whole, pending=self.live)

    def _pixels(self, name: str, size: int, channels: int, letters: str = "HWC") -> Array:
        """Return an array of square images with `size` rows, split like the batch. letters: of its last three dims."""
        return Array(name, (Dim("B", None, self.live), *map(Dim, letters, (size, size, channels))))

    def _stored(self, parameter: Parameter) -> tuple[Dim, ...]:
        """Return the dims of a parameter in storage. A kernel has R rows, S columns, C input and K output channels."""
        axes = [tuple(axis for axis in IMAGE_RULES[name] if axis in self.live) for name in parameter.axes]
        letters = "RSCK"[-len(axes) :]
        return tuple(map(Dim, letters, parameter.shape, axes))


def _node(region: str, *work: Work) -> Node:
    """Return a node of an image model."""
    return Node(region=Region(region), block=Block.MLP, work=work)

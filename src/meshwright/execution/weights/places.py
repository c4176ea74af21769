"""Where each parameter is in the tensors of a Hugging Face directory, for loading and for saving.

A declared parameter is stacked over layers and experts. A tensor mostly holds one layer and one expert, and may hold
several parameters (`qkv_proj`). `Place.view` returns the part of a tensor that is one parameter, with the parameter's
dims, without a copy. To load, views of memory maps are read slice by slice; to save, views of an empty array are
filled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshwright.description.families.family import Published, PublishedFamily
from meshwright.description.families.registry import PUBLISHED, published_of
from meshwright.description.step.blocks import program
from meshwright.description.step.layer import Linear, Lookup, alternating
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import Parameter, leaves, parameters
from meshwright.errors import MeshwrightError


@dataclass(frozen=True)
class Place:
    """Where a parameter is: in one tensor for each layer and expert that it is stacked over.

    Args:
        parameter: the declaration, of shape [layers, experts, *inputs, *outputs], possibly without some of these dims.
        published: the tensor's name with {layer} and {expert}, and how the tensor holds the parameter.
        num_inputs: number of dims that the parameter's matmul sums over; 0 for a vector.
        first_layer, every: in the model's numbering, the parameter's first layer and the distance to its next layer.
        before: number of outputs of other parameters that come before this one in a tensor.
        width: number of outputs of all parameters in a tensor. Both are per head if parameters alternate by head.
    """

    parameter: Parameter
    published: Published
    num_inputs: int
    first_layer: int
    every: int
    before: int
    width: int

    @property
    def stacked(self) -> tuple[int, ...]:
        """The sizes of the dims that are split into separate tensors: layers, then experts."""
        return self.parameter.shape[: self.parameter.is_stacked + ("{expert}" in self.published.name)]

    @property
    def experts(self) -> tuple[int, ...]:
        """The number of experts in a tensor, its first dim; () if each expert has its own tensor."""
        is_together = "expert" in self.parameter.axes and "{expert}" not in self.published.name
        return self.parameter.shape[len(self.stacked) :][:is_together]

    @property
    def inputs(self) -> tuple[int, ...]:
        """The sizes of the dims that the parameter's matmul sums over."""
        return self.parameter.shape[len(self.stacked) + len(self.experts) :][: self.num_inputs]

    @property
    def outputs(self) -> tuple[int, ...]:
        """The sizes of the parameter's output dims."""
        return self.parameter.shape[len(self.stacked) + len(self.experts) + self.num_inputs :]

    @property
    def heads(self) -> int:
        """The number of heads, if the parameters in a tensor alternate by head; else 1."""
        return math.prod(self.outputs[: self.published.by_head])

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor that holds the parameter."""
        columns = self.heads * self.width
        if not self.inputs:
            return *self.experts, columns
        rows = math.prod(self.inputs)
        if self.published.is_convolution:
            return columns, 1, rows
        return *self.experts, *((columns, rows) if self.published.is_transposed else (rows, columns))

    def name(self, *numbers: int) -> str:
        """Return the tensor's name, given the indices in the parameter of the layer and of the expert (`stacked`)."""
        layer = numbers[0] * self.every + self.first_layer if numbers else 0
        return self.published.name.format(layer=layer, expert=numbers[-1] if numbers else 0)

    def names(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield the indices of each layer and expert in the parameter (`stacked`), and the name of their tensor."""
        for numbers in np.ndindex(*self.stacked):
            yield numbers, self.name(*numbers)

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """View a checkpoint's tensor (`tensor_shape`) as the parameter [*experts, *inputs, *outputs], not copied."""
        if self.published.is_convolution:
            tensor = tensor[:, 0]
        outputs_last = np.swapaxes(tensor, -1, -2) if self.published.is_transposed and self.inputs else tensor
        columns = math.prod(self.outputs) // self.heads
        if self.published.by_head:
            outputs_last = outputs_last.reshape(*outputs_last.shape[:-1], self.heads, self.width, copy=False)
        if self.published.is_interleaved:
            index, count = self.published.part
            part = outputs_last[..., index::count]
        else:
            part = outputs_last[..., self.before : self.before + columns]
        return part.reshape(*self.experts, *self.inputs, *self.outputs, copy=False)


def places(model: ModelConfig) -> dict[str, Place]:
    """Return the `Place` of each parameter of a model, by the parameter's path.

    Raises:
        MeshwrightError: the tensor names of the model's family are not known.
    """
    names = published_family(model).names
    ops = program(model)
    every = (
        *ops.embedding,
        *ops.layer_inputs,
        *ops.widening,
        *ops.narrowing,
        *(op for stack in ops.stacks for op in stack.ops),
        *ops.logits,
    )
    # The number of dims that a parameter's matmul sums over, by the parameter's name; vectors have none.
    num_inputs = {op.name: len(op.inputs) for op in every if isinstance(op, Linear) and not op.is_tied}
    num_inputs |= {op.name: 1 for op in every if isinstance(op, Lookup)}
    first_layer, start = dict[str, tuple[int, int]](), 0
    for group in alternating(ops.stacks):
        first_layer |= {stack.name: (start + place, len(group)) for place, stack in enumerate(group)}
        start += sum(stack.num_layers for stack in group)
    found: dict[str, Place] = {}
    for path, parameter in leaves(parameters(model)):
        stack, _, name = path.rpartition(".")
        published = names[f"layers.{name}" if stack else name]
        inputs = num_inputs.get(name, parameter.num_inputs)
        found[path] = Place(parameter, published, inputs, *first_layer.get(stack, (0, 1)), 0, 0)
    return {path: _within_tensor(path, place, found) for path, place in found.items()}


def _within_tensor(path: str, place: Place, found: Mapping[str, Place]) -> Place:
    """Return a place with `before` and `width`, from the other parameters that are in the same tensors.

    found: the places of all parameters, by path.
    """
    stack = path.rpartition(".")[0]

    def columns(other: Place) -> int:
        return math.prod(other.outputs) // place.heads

    together = [
        other
        for name, other in found.items()
        if name.rpartition(".")[0] == stack and other.published.name == place.published.name
    ]
    before = sum(columns(other) for other in together if other.published.part < place.published.part)
    return replace(place, before=before, width=sum(map(columns, together)))


def published_family(model: ModelConfig) -> PublishedFamily:
    """Return a model's family with the names of its tensors in Hugging Face directories.

    Raises:
        MeshwrightError: the tensor names of the family are not known.
    """
    if (known := published_of(model)) is not None:
        return known
    raise MeshwrightError(
        f"model {model.name} is of the family {model.family.name!r}, whose published names are not known;"
        f" those known are {', '.join(known.family.name for known in PUBLISHED)}"
    )

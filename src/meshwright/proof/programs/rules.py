"""For each JAX primitive, which dims of an equation's operands and results are equal.

A rule takes the equation, the dims of its operands and a `Dims` to unite them in, and returns the dims of its
results. Primitives that call other programs (`scan`, `jit`, …) are handled in `trace`. For a primitive without a rule,
all dims of the results are new: nothing is known about them, so no table splits them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshwright.proof.programs.dims import Dim, Dims

Shape = tuple[Dim, ...]
"""The dims of an array."""

Rule = Callable[[Any, Sequence[Shape], Dims], list[Shape]]


def fresh(shape: Sequence[int], dims: Dims) -> Shape:
    """Return new dims for an array."""
    return tuple(dims.new(size) for size in shape)


def new_results(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    """Return new dims for all results of an equation."""
    return [fresh(getattr(out.aval, "shape", ()), dims) for out in equation.outvars]


def _elementwise(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    """Give the result the dims of the operands that have its sizes; scalars and dims of size 1 are broadcast."""
    found = []
    for out in equation.outvars:
        shape = out.aval.shape
        alike = [one for one in operands if len(one) == len(shape)]
        whole = [one for one in alike if tuple(map(dims.size, one)) == shape]
        result = whole[0] if whole else fresh(shape, dims)
        for one in alike:
            for first, second in zip(result, one, strict=True):
                if second:
                    dims.unite(first, second)
        found.append(result)
    return found


def _one_by_one(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    return list(operands)


def _broadcast(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    shape, places = equation.params["shape"], equation.params["broadcast_dimensions"]
    before = equation.invars[0].aval.shape
    found = list(fresh(shape, dims))
    for dim, (place, size) in zip(operands[0], zip(places, before, strict=True), strict=True):
        if size == shape[place]:
            found[place] = dim
    return [tuple(found)]


def _reshape(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    found = fresh(equation.outvars[0].aval.shape, dims)
    flat = tuple(atom for dim in operands[0] for atom in dim)
    dims.unite(flat, tuple(atom for dim in found for atom in dim))
    return [found]


def _transpose(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    return [tuple(operands[0][place] for place in equation.params["permutation"])]


def _squeeze(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    gone = equation.params["dimensions"]
    return [tuple(dim for place, dim in enumerate(operands[0]) if place not in gone)]


def _matmul(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    (left_sum, right_sum), (left_batch, right_batch) = equation.params["dimension_numbers"]
    left, right = operands
    for one, other in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        dims.unite(left[one], right[other])
    rest_left = [dim for place, dim in enumerate(left) if place not in (*left_sum, *left_batch)]
    rest_right = [dim for place, dim in enumerate(right) if place not in (*right_sum, *right_batch)]
    return [(*(left[place] for place in left_batch), *rest_left, *rest_right)]


def _ragged_matmul(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    """Handle [M, K] · [G, K, N] -> [M, N], where the rows M are sorted by group G, and the gradient of its weights."""
    rows, weights = operands[0], operands[1]
    numbers, groups = equation.params["ragged_dot_dimension_numbers"], operands[2]
    (left_sum, right_sum), (left_batch, _) = numbers.dot_dimension_numbers
    if left_batch or len(rows) != 2 or len(groups) != 1:
        return new_results(equation, operands, dims)
    for dim in (rows[numbers.lhs_ragged_dimensions[0]], groups[0]):
        dims.bar(dim, "its rows are sorted by group")
    if len(weights) == 2 and tuple(left_sum) == tuple(right_sum) == (0,):
        # The gradient of the weights: [M, K] · [M, N] -> [G, K, N].
        dims.unite(rows[0], weights[0])
        return [(groups[0], rows[1], weights[1])]
    if tuple(left_sum) != (1,) or len(weights) != 3:
        return new_results(equation, operands, dims)
    dims.unite(groups[0], weights[0])
    dims.unite(rows[1], weights[right_sum[0]])
    last = next(place for place in (2, 1) if place not in right_sum)
    return [(rows[0], weights[last])]


def _reduce(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    axes = equation.params["dimensions" if equation.primitive.name == "reduce" else "axes"]
    left = [tuple(dim for place, dim in enumerate(one) if place not in axes) for one in operands]
    return left[: len(equation.outvars)]


def _along_one(parameter: str) -> Rule:
    """Return the rule of a primitive that mixes all elements along one dim (sort, cumsum): it becomes a new dim."""

    def rule(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
        found = _elementwise(equation, operands, dims)
        place = equation.params[parameter]
        new = dims.new(equation.outvars[0].aval.shape[place])
        return [(*one[:place], new, *one[place + 1 :]) for one in found]

    return rule


def _concatenate(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    joined = equation.params["dimension"]
    found = list(operands[0])
    for place in range(len(found)):
        if place != joined:
            dims.unite_all(one[place] for one in operands)
    found[joined] = dims.new(equation.outvars[0].aval.shape[joined])
    return [tuple(found)]


def _stack(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    for together in zip(*operands, strict=True):
        dims.unite_all(together)
    axis, found = equation.params["axis"], operands[0]
    return [(*found[:axis], dims.new(len(operands)), *found[axis:])]


def _unstack(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    axis, whole = equation.params["axis"], operands[0]
    return [(*whole[:axis], *whole[axis + 1 :]) for _ in equation.outvars]


def _tile(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    """Handle `tile`: in a repeated dim, the old dim is the minor part."""
    return [tuple((*dims.new(count), *dim) for count, dim in zip(equation.params["reps"], operands[0], strict=True))]


def _split(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    axis, sizes = equation.params["axis"], equation.params["sizes"]
    whole = operands[0]
    if len(set(sizes)) > 1:
        return [(*whole[:axis], dims.new(size), *whole[axis + 1 :]) for size in sizes]
    # Equal parts, as of fused weights: the dim is [parts, size], and each result has the second atom.
    part = dims.new(sizes[0])
    dims.unite(whole[axis], (*dims.new(len(sizes)), *part))
    return [(*whole[:axis], part, *whole[axis + 1 :]) for _ in sizes]


def _of_equal_size(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    """Keep dims whose size is unchanged; a dim that is cut or padded is new."""
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    pairs = zip(operands[0], before, after, strict=True)
    found = tuple(dim if old == new else dims.new(new) for dim, old, new in pairs)
    return [found for _ in equation.outvars]


def _of_same_shape(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    """Give each result the dims of the last operand of the same shape, e.g. in the gradient of pooling."""
    alike = {var.aval.shape: one for var, one in zip(equation.invars, operands, strict=True)}
    return [
        alike[out.aval.shape] if out.aval.shape in alike else fresh(out.aval.shape, dims) for out in equation.outvars
    ]


def _of_each_matrix(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    """Keep all dims before the last two: batches of matrices that are decomposed or solved separately."""
    batch = operands[0][:-2]
    for one in operands[1:]:
        for first, second in zip(batch, one[:-2], strict=False):
            dims.unite(first, second)
    return [(*batch, *fresh(out.aval.shape[len(batch) :], dims)) for out in equation.outvars]


def _fourier(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    kept = operands[0][: -len(equation.params["fft_lengths"])]
    return [(*kept, *fresh(equation.outvars[0].aval.shape[len(kept) :], dims))]


def _update_slice(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    whole, part = equation.invars[0].aval.shape, equation.invars[1].aval.shape
    for one, other, old, new in zip(operands[0], operands[1], whole, part, strict=True):
        if old == new:
            dims.unite(one, other)
    return [operands[0]]


def _gather(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    table, indices = operands[0], operands[1]
    shape = equation.invars[0].aval.shape
    out: list[Dim | None] = [None] * len(equation.outvars[0].aval.shape)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [place for place in range(len(table)) if place not in gone]
    for place, source in zip(numbers.offset_dims, kept, strict=True):
        whole = sizes[source] == shape[source]
        out[place] = table[source] if whole else dims.new(sizes[source])
    rows = iter(indices[:-1])
    found = tuple(next(rows) if dim is None else dim for dim in out)
    for source, place in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        dims.unite(table[source], indices[place])
    return [found]


def _scatter(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    numbers = equation.params["dimension_numbers"]
    table, indices, updates = operands[0], operands[1], operands[2]
    shape, new = equation.invars[0].aval.shape, equation.invars[2].aval.shape
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [place for place in range(len(table)) if place not in gone]
    for place, source in zip(numbers.update_window_dims, kept, strict=True):
        if new[place] == shape[source]:
            dims.unite(table[source], updates[place])
    rows = [dim for place, dim in enumerate(updates) if place not in numbers.update_window_dims]
    for row, index in zip(rows, indices[:-1], strict=True):
        dims.unite(row, index)
    return [table]


def _convolution(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    numbers = equation.params["dimension_numbers"]
    images, kernel = operands
    batch, features, *_ = numbers.lhs_spec
    outputs, inputs, *_ = numbers.rhs_spec
    found: list[Dim] = list(fresh(equation.outvars[0].aval.shape, dims))
    _slide(equation, images, kernel, found, dims)
    groups = equation.params["feature_group_count"], equation.params["batch_group_count"]
    if groups == (1, 1):
        dims.unite(images[features], kernel[inputs])
    if groups[1] == 1:
        found[numbers.out_spec[0]] = images[batch]
    found[numbers.out_spec[1]] = kernel[outputs]
    return [tuple(found)]


def _slide(equation: Any, images: Shape, kernel: Shape, found: list[Dim], dims: Dims) -> None:
    """Give a convolution's result (`found`) the image's dims along which the filter is one pixel; bar the others."""
    numbers, parameters = equation.params["dimension_numbers"], equation.params
    sizes = equation.invars[1].aval.shape
    strides = zip(parameters["window_strides"], parameters["lhs_dilation"], parameters["padding"], strict=True)
    places = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    for (image, window, out), (stride, dilation, padding) in zip(places, strides, strict=True):
        if sizes[window] == 1 and (stride, dilation, tuple(padding)) == (1, 1, (0, 0)):
            found[out] = images[image]
        else:
            for dim in (images[image], kernel[window], found[out]):
                dims.bar(dim, "a filter slides along it")


def _top_k(equation: Any, operands: Sequence[Shape], dims: Dims) -> list[Shape]:
    last = len(operands[0]) - 1
    one, place = operands[0], equation.params.get("axis", equation.params.get("reduction_dimension", last))
    size = equation.outvars[0].aval.shape[place]
    best = dims.new(size)
    return [(*one[:place], best, *one[place + 1 :]) for _ in equation.outvars]


_MATH = [
    "abs",
    "acos",
    "acosh",
    "add",
    "add_any",
    "and",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bessel_i0e",
    "bessel_i1e",
    "cbrt",
    "ceil",
    "clamp",
    "clz",
    "complex",
    "conj",
    "convert_element_type",
    "copy",
    "cos",
    "cosh",
    "digamma",
    "div",
    "eq",
    "eq_to",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "ge",
    "gt",
    "igamma",
    "igammac",
    "igamma_grad_a",
    "imag",
    "integer_pow",
    "is_finite",
    "le",
    "le_to",
    "lgamma",
    "log",
    "log1p",
    "logistic",
    "lt",
    "lt_to",
    "max",
    "min",
    "mul",
    "mulhi",
    "ne",
    "neg",
    "nextafter",
    "not",
    "or",
    "polygamma",
    "population_count",
    "pow",
    "random_gamma_grad",
    "real",
    "reduce_precision",
    "regularized_incomplete_beta",
    "rem",
    "round",
    "rsqrt",
    "select_n",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "stop_gradient",
    "sub",
    "tan",
    "tanh",
    "xor",
    "zeta",
    "name",
    "copy_p",
    "pvary",
]

_REDUCTIONS = [
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "reduce_xor",
    "reduce",
    "argmax",
    "argmin",
]

_COPIES = [
    "optimization_barrier",
    "rev",
    "sharding_constraint",
    "layout_constraint",
    "reshard",
    "device_put",
    "with_memory_space_constraint",
    "pin",
    "unpin",
]

_DECOMPOSITIONS = ["cholesky", "eigh", "eig", "lu", "qr", "geqrf", "householder_product", "svd", "triangular_solve"]

SCATTERS = frozenset(
    ("scatter", *(f"scatter{mark}{op}" for op in ("add", "sub", "mul", "min", "max") for mark in "-_"))
)
"""Primitives that write rows into an array; JAX versions spell them `scatter-add` or `scatter_add`."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(_MATH, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along_one("axis")),
    **dict.fromkeys(_COPIES, _one_by_one),
    **dict.fromkeys(_DECOMPOSITIONS, _of_each_matrix),
    "bitcast_convert_type": _of_same_shape,
    "fft": _fourier,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "dot_general": _matmul,
    "ragged_dot_general": _ragged_matmul,
    "concatenate": _concatenate,
    "split": _split,
    "slice": _of_equal_size,
    "dynamic_slice": _of_equal_size,
    "pad": _of_equal_size,
    **dict.fromkeys(("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"), _of_equal_size),
    "select_and_scatter_add": _of_same_shape,
    "select_and_gather_add": _of_equal_size,
    "dynamic_update_slice": _update_slice,
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
    "conv_general_dilated": _convolution,
    "sort": _along_one("dimension"),
    "top_k": _top_k,
    "approx_top_k": _top_k,
}
"""The rules by the name of the primitive."""


MATMULS = frozenset(("dot_general", "conv_general_dilated", "ragged_dot_general"))
"""Primitives of matmuls and convolutions."""


def uses(equation: Any) -> list[bool]:
    """Return for each operand whether it is multiplied, looked up or broadcast: parameters are gathered for these."""
    name, result = equation.primitive.name, getattr(equation.outvars[0].aval, "shape", ()) if equation.outvars else ()
    if name in MATMULS or name in ("gather", "broadcast_in_dim"):
        return [True] * len(equation.invars)
    spreads = name in RULES and RULES[name] is _elementwise
    return [spreads and getattr(var.aval, "shape", ()) != result for var in equation.invars]

"""Every inferred way, run on simulated devices in NumPy, computes the einsum and leaves it as asked for."""

import itertools
import math
from dataclasses import replace

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.expression import Chain, Einsum, Stage
from meshwright.description.notation.inference import infer
from meshwright.description.notation.legality import Sizes, check
from meshwright.description.notation.parser import parse
from meshwright.description.notation.steps import Communicate, LocalSlice, Multiply
from meshwright.errors import MeshwrightError

Shards = dict[tuple[int, ...], np.ndarray]


class Devices:
    """Shards of arrays by the coordinates of a device on the mesh."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.axes = list(sizes.degrees)
        self.coordinates = list(itertools.product(*(range(degree) for degree in sizes.degrees.values())))

    def index(self, device, axes):
        """The place of a device in its group over `axes`, the first of them the outermost."""
        place = 0
        for axis in axes:
            place = place * self.sizes.degrees[axis] + device[self.axes.index(axis)]
        return place

    def group(self, device, axes):
        """The devices that differ from one only along `axes`, in the order of their index."""
        free = [axis in axes for axis in self.axes]
        same = [d for d in self.coordinates if all(f or a == b for f, a, b in zip(free, d, device, strict=True))]
        return sorted(same, key=lambda d: self.index(d, axes))

    def part(self, value, device, axes, dim):
        """A device's part of a value cut along a dim."""
        return np.split(value, self.sizes.degree(axes), axis=dim)[self.index(device, axes)]

    def lay(self, value, array: ShardedArray) -> Shards:
        """A value on the devices as an array says; a sum is spread so that no part of it is right by itself."""
        shards = {}
        for device in self.coordinates:
            local = value
            for dim, axes in enumerate(array.axes):
                local = self.part(local, device, axes, dim) if axes else local
            if array.unreduced:
                count = self.sizes.degree(array.unreduced)
                place = self.index(device, array.unreduced)
                local = local * (place + 1) - local * (math.comb(count + 1, 2) - 1) * (place == count - 1)
            shards[device] = local
        return shards

    def run(self, step, values: dict[str, Shards]) -> None:
        """Do one step, in place."""
        if isinstance(step, Multiply):
            left, right = (values.pop(operand.label) for operand in step.operands)
            after = {device: np.einsum(step.formula, left[device], right[device]) for device in self.coordinates}
        elif isinstance(step, LocalSlice):
            before = values.pop(step.operand.label)
            after = {d: self.part(before[d], d, step.axes, step.target) for d in self.coordinates}
        else:
            after = self.communicate(step, values.pop(step.operand.label))
        values[step.result.label] = after

    def communicate(self, step: Communicate, before: Shards) -> Shards:
        groups = {device: self.group(device, step.axes) for device in self.coordinates}
        match step.kind:
            case "all-gather":
                return {d: np.concatenate([before[m] for m in groups[d]], axis=step.source) for d in groups}
            case "all-reduce":
                return {d: np.sum([before[m] for m in groups[d]], axis=0) for d in groups}
            case "reduce-scatter":
                return {
                    d: self.part(np.sum([before[m] for m in groups[d]], axis=0), d, step.axes, step.target)
                    for d in groups
                }
            case "all-to-all":
                parts = {d: [self.part(before[m], d, step.axes, step.target) for m in groups[d]] for d in groups}
                return {d: np.concatenate(parts[d], axis=step.source) for d in groups}
        raise AssertionError(step.kind)


def einsum(operands, result):
    """The formula NumPy wants."""
    letters = dict(zip(dict.fromkeys(dim for dims in operands for dim in dims), "abcdefgh", strict=False))
    return ",".join("".join(letters[d] for d in dims) for dims in operands) + "->" + "".join(letters[d] for d in result)


def assert_way_is_right(way, inference) -> None:
    """Run a way; every step must be legal, hold the bytes it says, and the end be the einsum as asked for."""
    sizes = inference.sizes
    devices = Devices(sizes)
    random = np.random.default_rng(0)
    full = [random.integers(-9, 9, [sizes.dims[dim] for dim in operand.dims]) for operand in inference.operands]
    values = {
        operand.label: devices.lay(value, operand) for operand, value in zip(inference.operands, full, strict=True)
    }
    for step in way.steps:
        check(step.result, sizes)
        devices.run(step, values)
        for shard in values[step.result.label].values():
            assert shard.shape == sizes.local_shape(step.result)
        if isinstance(step, Communicate):
            assert step.bytes == sizes.local_bytes(step.result if step.kind == "all-gather" else step.operand)
    assert way.result == inference.result
    (shards,) = values.values()
    formula = einsum([operand.dims for operand in inference.operands], inference.result.dims)
    expected = np.einsum(formula, *full)
    whole = devices.lay(expected, replace(inference.result, unreduced=()))
    for device, shard in shards.items():
        assert shard.shape == sizes.local_shape(inference.result)
        total = sum(shards[member] for member in devices.group(device, inference.result.unreduced))
        np.testing.assert_array_equal(total, whole[device])


AXES = ("X", "Y", "Z")
SIZES = [
    Sizes(degrees={"X": 2, "Y": 2, "Z": 2}, dims={"I": 8, "J": 8, "K": 16, "L": 8}),
    Sizes(degrees={"X": 4, "Y": 2, "Z": 1}, dims={"I": 8, "J": 16, "K": 8, "L": 8}),
    Sizes(degrees={"X": 2, "Y": 3, "Z": 1}, dims={"I": 12, "J": 6, "K": 4, "L": 6}),
]


@st.composite
def arrays(draw, name, dims, may_be_sum=False):
    """An array whose axes lie anywhere, a few of them unreduced."""
    places = [*range(len(dims)), None, *(["U"] if may_be_sum else [])]
    order = draw(st.permutations(AXES))
    where = {axis: draw(st.sampled_from(places)) for axis in order}
    axes = tuple(tuple(axis for axis in order if where[axis] == position) for position in range(len(dims)))
    return ShardedArray(name, dims, axes, tuple(axis for axis in order if where[axis] == "U"))


def some_dims(least):
    return st.lists(st.sampled_from("IJKL"), unique=True, min_size=least, max_size=3).map(tuple)


@st.composite
def products(draw, count):
    """A product of `count` arrays, with a result of any of their dims or with none."""
    operands = tuple(draw(arrays("ABC"[n], draw(some_dims(1)), may_be_sum=n == 0)) for n in range(count))
    every = list(dict.fromkeys(dim for operand in operands for dim in operand.dims))
    kept = tuple(draw(st.lists(st.sampled_from(every), unique=True, max_size=3)))
    return Einsum(operands, draw(st.none() | arrays("R", kept, may_be_sum=True)))


def infer_or_skip(expression, sizes):
    """The inference, where the random sizes divide and the random sum can be had."""
    try:
        return infer(expression, sizes)
    except MeshwrightError as error:
        assume("cannot split" not in str(error) and "cannot stay a sum" not in str(error))
        raise


@settings(max_examples=150, deadline=None)
@given(products(2), st.sampled_from(SIZES))
def test_every_way_to_a_random_product_computes_it(product, sizes):
    inference = infer_or_skip(product, sizes)
    for way in inference.implementations[:8]:
        assert_way_is_right(way, inference)


@settings(max_examples=50, deadline=None)
@given(products(3), st.sampled_from(SIZES))
def test_every_way_to_a_random_product_of_three_computes_it(product, sizes):
    inference = infer_or_skip(product, sizes)
    for way in inference.implementations[:3]:
        assert_way_is_right(way, inference)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(SIZES))
def test_every_way_to_a_random_resharding_leads_to_it(data, sizes):
    dims = data.draw(some_dims(1))
    source = data.draw(arrays("A", dims, may_be_sum=True))
    target = data.draw(arrays("A", dims))
    inference = infer_or_skip(Chain(source, (Stage(None, (), target),)), sizes)
    for way in inference.implementations:
        assert_way_is_right(way, inference)
        assert not way.products


def test_the_stages_of_a_chain_are_followed_as_written():
    sizes = SIZES[0]
    product = "A[I_X, J_YZ] @ B[J_YZ, K] -> C[I_X, K]{U_YZ}"
    text = f"{product} -> RS over Z -> C[I_X, K_Z]{{U_Y}} -> AR over Y -> C[I_X, K_Z] -> C[I, K_ZX]"
    inference = infer(parse(text), sizes)
    assert inference.prescribed
    assert [step.kind for step in inference.prescribed.communications] == ["reduce-scatter", "all-reduce", "all-to-all"]
    assert_way_is_right(inference.prescribed, inference)


def test_a_gather_over_axes_of_several_dims_is_one_collective_a_dim():
    inference = infer(parse("AllGather_XYZ(A[I_XY, J_Z]) -> A[I, J]"), SIZES[0])
    assert sorted(step.axes for step in inference.implementation.communications) == [("X", "Y"), ("Z",)]
    assert_way_is_right(inference.implementation, inference)

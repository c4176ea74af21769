"""The steps of an implementation: collectives, local slices and local einsums."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from string import ascii_letters

from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.expression import Chain, Einsum, Stage
from meshwright.record import Collective, Kind


@dataclass(frozen=True, kw_only=True)
class Communicate:
    """One collective over `axes`, which turns `operand` into `result`, an array of the same label.

    bytes: the size of the array `counted` on one device, as in `record.Collective`.
    """

    kind: Kind
    axes: tuple[str, ...]
    operand: ShardedArray
    result: ShardedArray
    bytes: int

    @property
    def counted(self) -> ShardedArray:
        """The array whose bytes on one device are `bytes`: the result of an all-gather, the operand of the others."""
        return self.result if self.kind == "all-gather" else self.operand

    @property
    def source(self) -> int | None:
        """The index of the dim that an all-gather or an all-to-all unshards; None for other collectives."""
        return _position(self.operand, self.axes)

    @property
    def target(self) -> int | None:
        """The index of the dim that a reduce-scatter or an all-to-all shards; None for other collectives."""
        return _position(self.result, self.axes)

    def __str__(self) -> str:
        return str(Chain(self.operand, (Stage(self.kind, self.axes, self.result),)))


@dataclass(frozen=True, kw_only=True)
class LocalSlice:
    """A slice without communication: each device keeps its shard over `axes` of the dim with index `target`."""

    axes: tuple[str, ...]
    operand: ShardedArray
    result: ShardedArray

    @property
    def target(self) -> int:
        """The index of the dim that is sliced."""
        position = _position(self.result, self.axes)
        assert position is not None
        return position

    def __str__(self) -> str:
        return f"{self.operand} -> {self.result}"


@dataclass(frozen=True, kw_only=True)
class Multiply:
    """The local einsum of each device's shards. Its result is unreduced over the axes that shard a summed dim.

    flops: per device; 2 for each index of all dims, or 1 if no dim is summed. repeated_axes: the axes of degree above 1
    along which devices repeat the same work.
    """

    operands: tuple[ShardedArray, ShardedArray]
    result: ShardedArray
    flops: int
    repeated_axes: tuple[str, ...]

    @property
    def formula(self) -> str:
        """The subscripts for `jnp.einsum`."""
        return einsum_formula(self.operands, self.result)

    def __str__(self) -> str:
        return str(Einsum(self.operands, self.result))


Step = Communicate | LocalSlice | Multiply


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """The steps that compute a result, in order. A step finds its operands by their labels."""

    steps: tuple[Step, ...]
    result: ShardedArray

    @property
    def communications(self) -> tuple[Communicate, ...]:
        """The steps that communicate."""
        return tuple(step for step in self.steps if isinstance(step, Communicate))

    @property
    def products(self) -> tuple[Multiply, ...]:
        """The local einsums."""
        return tuple(step for step in self.steps if isinstance(step, Multiply))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives as a `Record` has them, in order."""
        return tuple(
            Collective(kind=step.kind, axes=step.axes, phase="forward", bytes=step.bytes, array=step.operand.label)
            for step in self.communications
        )

    @property
    def flops(self) -> int:
        """Flops of one device in all local einsums."""
        return sum(step.flops for step in self.products)

    @property
    def repeated_axes(self) -> tuple[str, ...]:
        """The axes along which devices repeat the work of any local einsum."""
        return tuple(dict.fromkeys(axis for step in self.products for axis in step.repeated_axes))

    def __str__(self) -> str:
        return "; ".join(map(str, self.steps)) or f"{self.result} as it is"


def einsum_formula(operands: Collection[ShardedArray], result: ShardedArray) -> str:
    """Return the subscripts of an einsum as `jnp.einsum` takes them: `ab,bc->ac`."""
    letters = dict(zip(dict.fromkeys(dim for operand in operands for dim in operand.dims), ascii_letters, strict=False))
    *inputs, output = ("".join(letters[dim] for dim in array.dims) for array in (*operands, result))
    return f"{','.join(inputs)}->{output}"


def _position(array: ShardedArray, axes: tuple[str, ...]) -> int | None:
    """Return the index of the dim of an array that `axes` split; None if they split none."""
    dim = array.dim_of(axes[-1])
    return None if dim is None else array.dims.index(dim)

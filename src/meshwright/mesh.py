"""Mesh shapes: axis names and degrees, parsed from text and checked against a batch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from meshwright.errors import MeshwrightError

POSITIONAL = ("dp", "fsdp", "tp", "sp")
"""The axes of a mesh written as four degrees, such as `1,-1,4,1` (`parse_mesh`), in this order."""


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """The degree of each mesh axis.

    dp: data parallel (replicated weights); fsdp: fully sharded data parallel; tp: tensor parallel; sp: sequence
    (context) parallel; ep: expert parallel; pp: pipeline parallel. Calling a shape returns its `jax.sharding.Mesh`.

    >>> shape = MeshShape(fsdp=2, tp=4)
    >>> str(shape), shape.num_devices
    ('fsdp=2,tp=4', 8)
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    sp: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis, degree in vars(self).items():
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise MeshwrightError(f"mesh axis {axis}={degree!r}; a degree is a whole number from 1")

    def __call__(self, devices: Sequence[Any] | None = None, *, types: Literal["explicit", "auto"] = "explicit") -> Any:
        """Return the `jax.sharding.Mesh` of this shape over `devices` (default: all), axes in the order of `layout`.

        types: the axis type of all axes; programs with Flax's `logical_axis_rules` need `auto`.
        """
        from meshwright.execution.runtime.carry import mesh_of

        return mesh_of(self, devices, types)

    @property
    def degrees(self) -> dict[str, int]:
        """Every axis and its degree, including degree 1."""
        return dict(vars(self))

    @property
    def layout(self) -> dict[str, int]:
        """Every axis and its degree, outermost first; adjacent devices differ in the last, which communicates most."""
        degrees = vars(self)
        return {axis: degrees[axis] for axis in LAYOUT}

    @property
    def num_devices(self) -> int:
        """The product of all degrees."""
        return math.prod(self.degrees.values())

    def degree(self, axes: str | tuple[str, ...]) -> int:
        """Return the degree of one axis, or the product of the degrees of several."""
        degrees = vars(self)
        return degrees[axes] if isinstance(axes, str) else math.prod(degrees[axis] for axis in axes)

    def __str__(self) -> str:
        """Format the axes of degree above 1 as users type them: `fsdp=2,tp=4`; `dp=1` if there are none."""
        return ",".join(f"{axis}={degree}" for axis, degree in self.degrees.items() if degree > 1) or "dp=1"


AXES = tuple(field.name for field in fields(MeshShape))
"""Every mesh axis, in the order tables print them."""

OTHERS_AXES: Mapping[str, str] = {
    "data": "dp", "dp_replicate": "dp", "dp_shard": "fsdp", "fsdp_transpose": "fsdp, the product of both degrees",
    "model": "tp", "mp": "tp", "tensor": "tp", "tensor_transpose": "tp", "tensor_kv": "tp",
    "tensor_sequence": "tp, which splits the stream's tokens too", "autoregressive": "tp of plan --serve decode",
    "cp": "sp", "context": "sp", "context_usp_ulysses": "sp with --sp-method ulysses", "sequence": "sp", "seq": "sp",
    "expert": "ep", "stage": "pp", "pipeline": "pp", "pipe": "pp",
}  # fmt: skip
"""An axis of MaxText, torchtitan, Megatron or EasyLM to the meshwright axis that does the same, as text for messages.

MaxText's axes are from `logical_axis_rules` in its src/maxtext/configs/base.yml (commit 000b810). There, fsdp_transpose
splits the batch like fsdp, and weights along mlp; tensor_sequence splits the same dims as tensor, and
`activation_norm_length`; autoregressive splits heads, mlp and vocabulary of weights, and heads of the KV cache.
"""

LAYOUT = ("pp", "dp", "fsdp", "ep", "sp", "tp")
"""The order in which axes are laid over devices, outermost first.

pp and dp communicate least, tp at every matmul.
"""


def parse_mesh(text: str, *, num_devices: int) -> MeshShape:
    """Parse a mesh shape for `num_devices` devices.

    Two forms: `'1,-1,4,1'` is dp,fsdp,tp,sp; `'fsdp=-1,tp=4,pp=2'` names any of dp, fsdp, tp, sp, ep, pp in any order,
    and axes not named have degree 1. One degree may be -1: it takes the remaining devices.

    Raises:
        MeshwrightError: the degrees do not give `num_devices` devices, or several are -1.

    >>> parse_mesh("1,-1,4,1", num_devices=8)
    MeshShape(dp=1, fsdp=2, tp=4, sp=1, ep=1, pp=1)
    """
    degrees = _named(text) if "=" in text else _positional(text)
    inferred = [axis for axis, degree in degrees.items() if degree == -1]
    if len(inferred) > 1:
        raise MeshwrightError(f"mesh {text!r} has -1 at {' and '.join(inferred)}; only one degree may be inferred")
    known = math.prod(degree for degree in degrees.values() if degree != -1)
    if inferred:
        if num_devices % known:
            raise MeshwrightError(
                f"mesh {text!r} has {known} devices without {inferred[0]}=-1, which does not divide the"
                f" {num_devices} there are; use a product out of {_list(divisors(num_devices))}"
            )
        degrees[inferred[0]] = num_devices // known
    elif known != num_devices:
        raise MeshwrightError(
            f"mesh {text!r} needs {known} devices; there are {num_devices}; -1 in one place fills the rest"
        )
    return MeshShape(**degrees)


def parse_axes(text: str) -> dict[str, int]:
    """Parse `dp=2,model=4` into degrees by axis. Axes may have any names, each once; their order is kept.

    Raises:
        MeshwrightError: an axis or a degree is invalid, or an axis occurs twice.

    >>> parse_axes("data=2,model=4")
    {'data': 2, 'model': 4}
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        axis, _, degree = (word.strip() for word in part.partition("="))
        if not axis.isidentifier() or not re.fullmatch("0*[1-9][0-9]{0,17}", degree) or axis in mesh:
            raise MeshwrightError(f"mesh {text!r} is not a list of axes, each once with its degree, as dp=2,fsdp=4")
        mesh[axis] = int(degree)
    return mesh


def _positional(text: str) -> dict[str, int]:
    """Parse the positional form, `'1,-1,4,1'`."""
    parts = text.split(",")
    if len(parts) != len(POSITIONAL):
        raise MeshwrightError(
            f"mesh {text!r} has {len(parts)} entries; it takes 4, {','.join(POSITIONAL)}, or names: 'fsdp=-1,tp=4'"
        )
    return {axis: _degree(part, text) for axis, part in zip(POSITIONAL, parts, strict=True)}


def _named(text: str) -> dict[str, int]:
    """Parse the named form, `'fsdp=-1,tp=4,pp=2'`."""
    degrees: dict[str, int] = {}
    for part in text.split(","):
        axis, _, degree = (word.strip() for word in part.partition("="))
        if axis not in AXES:
            ours = our_axis(axis)
            hint = f"; here that is {ours}" if ours else ""
            raise MeshwrightError(f"mesh {text!r} names axis {axis!r}{hint}; the axes are {_list(AXES)}")
        if axis in degrees:
            raise MeshwrightError(f"mesh {text!r} names {axis} twice")
        degrees[axis] = _degree(degree, text)
    return degrees


def our_axis(name: str) -> str:
    """Return the meshwright axis that does the same as another framework's axis, as text for messages; '' if none does.

    name: the axis, or the framework's option that sets its degree.

    >>> our_axis("tensor_model_parallel_size")
    'tp'
    """
    # MaxText has two degrees of each axis, within a slice (ICI) and across slices (DCN), which are multiplied. Megatron
    # uses tensor_model_parallel_size, torchtitan tensor_parallel_degree.
    found = re.fullmatch(r"(?:(ici|dcn)_)?(\w+?)(?:_parallelism|(?:_model)?_parallel(?:_size|_degree))?", name)
    axis = found[2] if found else name
    ours = OTHERS_AXES.get(axis, axis if axis != name and axis in AXES else "")
    across = " of a system of several slices, as --on 2*v5p:4x4x4, whose outermost axes cross them"
    return ours + across if ours and found and found[1] == "dcn" else ours


def _degree(word: str, text: str) -> int:
    """Parse one degree: a whole number from 1, or -1."""
    degree = int(word) if re.fullmatch(r"\s*(?:-1|[0-9]{1,30})\s*", word) else 0
    if not degree:
        raise MeshwrightError(f"mesh {text!r} has {word.strip()!r} for a degree; it takes whole numbers from 1, or -1")
    return degree


def check_batch(
    mesh: MeshShape, *, batch: int, seq_len: int, batch_axes: tuple[str, ...] = ("dp", "fsdp", "ep")
) -> None:
    """Raise if the degrees of `batch_axes` do not divide `batch` sequences, or sp does not divide `seq_len` tokens."""
    axes = tuple(axis for axis in batch_axes if axis in ("dp", "fsdp") or mesh.degree(axis) > 1)
    shards = mesh.degree(axes)
    if batch < 1 or batch % shards:
        raise MeshwrightError(
            f"batch {batch} is not a multiple of {'*'.join(axes)} = {'*'.join(str(mesh.degree(a)) for a in axes)} ="
            f" {shards}; use {_list(multiples_around(batch, shards))}"
        )
    if seq_len < 1 or seq_len % mesh.sp:
        raise MeshwrightError(
            f"sequence length {seq_len} is not a multiple of sp = {mesh.sp};"
            f" use {_list(multiples_around(seq_len, mesh.sp))}"
        )


def check_divides(what: str, size: int, mesh: MeshShape, axes: tuple[str, ...], *, of: str = "") -> None:
    """Raise if the degrees of `axes` do not divide a dim of length `size`; the message calls it `what`, as `kv_heads`.

    of: the array that the dim belongs to, if known, for the message.
    """
    degree = mesh.degree(axes)
    if size % degree:
        over, where = "*".join(axes), f" of {of}" if of else ""
        nearest = _list([f"{over}={legal}" for legal in nearest_divisors(math.gcd(size, mesh.num_devices), degree)])
        raise MeshwrightError(
            f"{over}={degree} cannot split {what}={size}{where}: {size} % {degree} = {size % degree}; use {nearest}"
        )


def divisors(size: int) -> list[int]:
    """Return every divisor of `size`, ascending."""
    small = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    return small + [size // d for d in reversed(small) if d * d != size]


def nearest_divisors(size: int, degree: int) -> list[int]:
    """Return the largest divisor of `size` below `degree` and the smallest above it, if there are such."""
    legal = divisors(size)
    return [d for d in legal if d < degree][-1:] + [d for d in legal if d > degree][:1]


def local_shape(
    shape: tuple[int, ...], spec: tuple[tuple[str, ...], ...], degrees: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the shape of one device's shard. spec: for each dim of `shape`, the mesh axes that split it."""
    return tuple(size // math.prod(degrees[axis] for axis in axes) for size, axes in zip(shape, spec, strict=True))


def multiples_around(size: int, step: int) -> list[int]:
    """Return the largest multiple of `step` up to `size`, unless it is 0, and the next multiple after it."""
    below = size // step * step
    return [multiple for multiple in (below, below + step) if multiple > 0]


def _list(items: list[int] | list[str] | tuple[str, ...]) -> str:
    """Join items for a message: `1, 2 or 4`."""
    words = [str(item) for item in items]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)

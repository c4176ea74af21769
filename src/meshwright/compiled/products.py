"""A sharded product, run and compiled, beside the unsharded one and the collectives inferred for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from string import ascii_letters

import jax
import numpy as np

from meshwright.compiled.collectives import read_collectives
from meshwright.compiled.parser import parse_hlo
from meshwright.compiled.respelled import meant
from meshwright.notation import Inference
from meshwright.parallel.product import Mode, compile_product, make_product_mesh
from meshwright.record import Collective, merge


@dataclass(frozen=True, kw_only=True)
class ProductCheck:
    """What became of a product in one mode: `error` is its largest difference, as a share of the largest element.

    compiled, inferred: the collectives of each, those of one kind and axes added up, by kind and axes.
    """

    error: float
    compiled: tuple[Collective, ...]
    inferred: tuple[Collective, ...]

    @property
    def is_as_inferred(self) -> bool:
        """Whether both have the same collectives: by kind, mesh axes and bytes."""
        return _amounts(self.compiled) == _amounts(self.inferred)


def check_product(inference: Inference, *, mode: Mode) -> ProductCheck:
    """A product run in a mode of JAX on the devices that are there, in float32, on numbers drawn at random."""
    degrees = inference.sizes.degrees
    program = compile_product(inference, make_product_mesh(degrees), mode=mode, dtype=np.float32)
    arrays = _draw(inference)
    found = np.asarray(jax.device_get(program.run(*arrays)))
    wanted = _unsharded(inference, arrays)
    traffic = read_collectives(parse_hlo(program.hlo), degrees)
    return ProductCheck(
        error=float(np.abs(found - wanted).max() / np.abs(wanted).max()),
        compiled=_sorted(part for move in traffic.collectives for part in meant(move, degrees)),
        inferred=_sorted(inference.way.collectives),
    )


def _draw(inference: Inference) -> list[np.ndarray]:
    """The global operands."""
    draws = np.random.default_rng(0)
    dims = inference.sizes.dims
    return [draws.normal(size=[dims[d] for d in a.dims]).astype(np.float32) for a in inference.operands]


def _unsharded(inference: Inference, arrays: list[np.ndarray]) -> np.ndarray:
    """The same on one device, in float64."""
    names = dict.fromkeys(dim for operand in inference.operands for dim in operand.dims)
    letters = dict(zip(names, ascii_letters, strict=False))
    *operands, result = ("".join(letters[d] for d in a.dims) for a in (*inference.operands, inference.result))
    return np.einsum(f"{','.join(operands)}->{result}", *(array.astype(np.float64) for array in arrays))


def _sorted(moves: Iterable[Collective]) -> tuple[Collective, ...]:
    """The collectives with those of one kind and axes added up, their arrays and notes left out."""
    plain = (Collective(kind=m.kind, axes=m.axes, phase="forward", bytes=m.bytes, count=m.count) for m in moves)
    return merge(plain)


def _amounts(moves: tuple[Collective, ...]) -> dict[tuple[str, frozenset[str]], int]:
    """Bytes by kind and axes, in whatever order a program names the axes."""
    return {(move.kind, frozenset(move.axes)): move.bytes for move in moves}

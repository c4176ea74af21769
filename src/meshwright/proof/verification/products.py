"""Check a sharded matmul: run and compile it, compare with the unsharded matmul and the inferred collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np

from meshwright.description.hlo.canonical import canonicalize_collective
from meshwright.description.hlo.collectives import read_collectives
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.text import hlo_text
from meshwright.description.notation.inference import Inference
from meshwright.description.notation.steps import Implementation, einsum_formula
from meshwright.execution.runtime.fuse_matmuls import overlapped_collectives
from meshwright.execution.runtime.modes import Mode
from meshwright.execution.runtime.product import compile_product, make_product_mesh
from meshwright.record import Collective, merge


@dataclass(frozen=True, kw_only=True)
class ProductCheck:
    """The result of checking a matmul in one mode of JAX (`check_product`).

    error: largest difference from the unsharded matmul, relative to its largest element. compiled, inferred:
    collectives, merged by kind and axes. notes: transfers in the program that `compiled` leaves out.
    """

    error: float
    compiled: tuple[Collective, ...]
    inferred: tuple[Collective, ...]
    notes: tuple[str, ...]

    @property
    def is_as_inferred(self) -> bool:
        """Whether the compiled and the inferred collectives are equal in kind, mesh axes and bytes."""
        return not self.notes and set(map(_amount, self.compiled)) == set(map(_amount, self.inferred))


def check_product(inference: Inference, *, mode: Mode, implementation: Implementation | None = None) -> ProductCheck:
    """Run an implementation of a matmul in a mode of JAX; compare result and collectives with the expected ones.

    It runs on the devices of this process, in float32 on small random integers: float32 sums of integers below 2^24 are
    exact in any order. In overlapped mode a collective matmul runs its collective as a ring of permutes.

    Args:
      inference: the matmul with its shardings.
      mode: auto, explicit, manual or overlapped.
      implementation: one of the inference's; default `inference.implementation`.
    """
    degrees, implementation = inference.sizes.degrees, implementation or inference.implementation
    program = compile_product(
        inference, make_product_mesh(degrees), mode=mode, implementation=implementation, dtype=np.float32
    )
    draws, dims = np.random.default_rng(0), inference.sizes.dims
    arrays = [draws.integers(-4, 5, size=[dims[d] for d in a.dims]).astype(np.float32) for a in inference.operands]
    found = np.asarray(jax.device_get(program.run(*arrays)))
    formula = einsum_formula(inference.operands, inference.result)
    wanted = np.einsum(formula, *(array.astype(np.float64) for array in arrays))  # on one device
    traffic = read_collectives(parse_hlo(hlo_text(program.program)), degrees)
    moves = (
        overlapped_collectives(implementation, inference.sizes) if mode == "overlapped" else implementation.collectives
    )
    inferred = [_plain(move, degrees) for move in moves]
    # XLA:CPU lowers a reduce-scatter, and an all-reduce followed by a slice, to the same ops. These count as a
    # reduce-scatter unless an all-reduce was inferred.
    left, read = Counter(map(_amount, inferred)), []
    for move in traffic.collectives:
        parts = [_plain(part, degrees) for part in canonicalize_collective(move, degrees)]
        whole = _plain(move, degrees)
        if not Counter(map(_amount, parts)) <= left and left[_amount(whole)] > 0:
            parts = [whole]
        left -= Counter(map(_amount, parts))
        read += parts
    return ProductCheck(
        error=float(np.abs(found - wanted).max() / (np.abs(wanted).max() or 1.0)),
        compiled=merge(read),
        inferred=merge(inferred),
        notes=traffic.notes,
    )


def _plain(move: Collective, degrees: Mapping[str, int]) -> Collective:
    """Return a collective with only its kind, its axes in mesh order, and its bytes."""
    axes = tuple(axis for axis in degrees if axis in move.axes)
    return replace(move, axes=axes, phase="forward", seconds=None, array="", source="", note="")


def _amount(move: Collective) -> tuple[str, tuple[str, ...], int]:
    return move.kind, move.axes, move.bytes

"""Exercises whose answer is a JAX function, compared with an unsharded reference; its compiled program is inspected."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding

from meshwright.description.hlo.canonical import canonicalize_collective
from meshwright.description.notation.array import ShardedArray
from meshwright.description.notation.array_parser import parse_array
from meshwright.description.notation.legality import Sizes
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.terms import spec
from meshwright.lessons.exercise import Verdict, blank, is_blank
from meshwright.pictures.tables import table
from meshwright.proof.inspection.functions import inspect
from meshwright.proof.inspection.inspection import Inspection
from meshwright.record import Collective, Kind, merge
from meshwright.units import show_bytes, show_flops

ERROR = 1e-4
"""The largest accepted difference from the reference, relative to the reference's largest value.

Sharded sums add in another order, in float32.
"""

ROUNDING = 1.05
"""The accepted ratio of memory to the requirement: the compiler pads arrays and keeps a few scalars."""

WIDTH = 96


@dataclass(frozen=True)
class Asked:
    """A collective that the program must have, `count` times.

    array: the result of an all-gather, the operand of other collectives, in the notation (`C[I_X, K]`); the collective
    has the bytes of one device's shard of it.
    """

    kind: Kind
    axes: tuple[str, ...]
    array: str
    count: int = 1


@dataclass(frozen=True)
class Row:
    """A line of the table: the requirement, the answer's value, and the reply if they differ ('' if they agree)."""

    name: str
    asked: str
    yours: str
    reply: str = ""


@dataclass(frozen=True, kw_only=True)
class Program:
    """An exercise whose answer is a function of sharded arrays.

    mesh: the degree of each axis; `jax.set_mesh` is active while the function is traced. operands, result: float32
    arrays in the notation. reference: the same function without sharding. collectives: required in the forward pass.
    flops: the most matmul flops that a device may execute. copies: further arrays that a device may hold, in addition
    to operands, result and collectives.
    """

    question: str
    mesh: Mapping[str, int]
    dims: Mapping[str, int]
    operands: tuple[str, ...]
    result: str
    reference: Callable[..., Array]
    collectives: tuple[Asked, ...]
    hints: tuple[str, str, str]
    because: str
    flops: Callable[[], float] = lambda: 0.0
    copies: tuple[str, ...] = ()
    has_gradients: bool = True

    @property
    def sizes(self) -> Sizes:
        """The degrees of the mesh, the sizes of the dims, and elements of 4 bytes."""
        return Sizes(degrees=self.mesh, dims=self.dims, element_bytes=4)

    def grade(self, name: str, answer: Any) -> Verdict:
        """Run the function and the reference, inspect the function, and return a table of requirements and results.

        Raises:
            MeshwrightError: the answer is not a function, or JAX has too few devices.
        """
        if is_blank(answer):
            return blank(name, self.question)
        if not callable(answer):
            raise MeshwrightError(f"{name} takes a function of {' and '.join(self.operands)}, not {answer!r}")
        devices, count = jax.devices(), math.prod(self.mesh.values())
        if len(devices) < count:
            raise MeshwrightError(
                f"{name} needs {count} devices, and JAX has started with {len(devices)}: restart, and begin with"
                f' jax.config.update("jax_num_cpu_devices", {count})'
            )
        mesh = jax.make_mesh(
            tuple(self.mesh.values()), tuple(self.mesh), (AxisType.Auto,) * len(self.mesh), devices=devices[:count]
        )
        with jax.set_mesh(mesh):
            draws = np.random.default_rng(0)
            shapes = [[self.dims[dim] for dim in self._array(text).dims] for text in self.operands]
            plain = [jnp.asarray(draws.standard_normal(shape, np.float32)) for shape in shapes]
            placed = [
                jax.device_put(value, NamedSharding(mesh, spec(self._array(text))))
                for value, text in zip(plain, self.operands, strict=True)
            ]
            try:
                found = jax.jit(answer)(*placed)
                if found is None:
                    return blank(name, f"The function returns None. {self.question}")
                rows = self._rows(answer, plain, placed, found)
            except MeshwrightError:
                raise
            except Exception as error:  # The reader's own function may raise anything.
                first = str(error).strip().splitlines() or [""]
                return Verdict(name, False, f"{name}: not yet. The function raised {type(error).__name__}: {first[0]}")
        return _verdict(name, self, mesh.size, rows)

    def _rows(self, answer: Callable[..., Any], plain: list[Array], placed: list[Array], found: Any) -> list[Row]:
        """Return the rows of the verdict's table, or the row of the values alone if they are wrong.

        plain, placed: the operands on one device, and sharded. found: what `answer` returned for the sharded ones.
        """
        wanted = self.reference(*plain)
        rows = [_values_row("values", wanted, found)]
        if rows[0].reply:
            return rows
        if self.has_gradients:
            rows.append(self._gradients_row(answer, plain, placed, found))
        rows.append(self._result_row(found))
        inspection = inspect(jax.jit(answer), *placed)
        rows += self._collective_rows(inspection)
        return [*rows, *self._work_rows(inspection)]

    def _gradients_row(self, answer: Callable[..., Any], plain: list[Array], placed: list[Array], found: Array) -> Row:
        """Return the row that compares the gradients of a weighted sum of the result with respect to every operand."""
        weights = np.random.default_rng(1).standard_normal(found.shape, np.float32)
        numbers = tuple(range(len(plain)))

        def gradients(function: Callable[..., Array], arrays: list[Array]) -> tuple[Array, ...]:
            return jax.grad(lambda *given: jnp.sum(function(*given) * weights), numbers)(*arrays)

        wanted = gradients(self.reference, plain)
        own = jax.jit(lambda *given: gradients(answer, list(given)))(*placed)
        for text, right, yours in zip(self.operands, wanted, own, strict=True):
            row = _values_row(f"gradient of {text}", right, yours)
            if row.reply:
                return row
        return Row("gradients", "as on one device", "as on one device")

    def _result_row(self, found: Array) -> Row:
        """Return the row that compares the shape of the result's shard on a device."""
        asked = self.sizes.local_shape(self._array(self.result))
        yours = found.sharding.shard_shape(found.shape)
        reply = ""
        if asked != yours and yours == found.shape:
            reply = "Right, but replicated: every device holds the whole result."
        elif asked != yours:
            reply = "The values are right, but the result is split in another way."
        return Row("result", f"{self.result}: {asked} a device", f"{yours} a device", reply)

    def _collective_rows(self, inspection: Inspection) -> list[Row]:
        """Return a row for each kind and axes of collective, which compares the bytes per device."""
        asked = merge(
            Collective(
                kind=one.kind,
                axes=one.axes,
                phase="forward",
                bytes=one.count * self._bytes(one.array),
                count=one.count,
            )
            for one in self.collectives
        )
        program = inspection.record
        yours = merge(part for move in program.collectives for part in canonicalize_collective(move, program.mesh))
        keys = dict.fromkeys((one.kind, tuple(sorted(one.axes))) for one in (*asked, *yours))
        if not keys:
            return [Row("collectives", "none", "none")]
        rows = []
        for kind, axes in keys:
            most, sent = (
                sum(one.bytes for one in moves if (one.kind, tuple(sorted(one.axes))) == (kind, axes))
                for moves in (asked, yours)
            )
            name, reply = f"{kind} over {'*'.join(axes)}", _traffic_reply(kind, most, sent)
            rows.append(Row(name, _bytes_or_none(most), _bytes_or_none(sent), reply))
        return rows

    def _work_rows(self, inspection: Inspection) -> list[Row]:
        """Return the rows that compare the flops, if they are limited, and the memory per device."""
        rows = []
        if most := self.flops():
            done = inspection.flops
            reply = (
                f"Right, but replicated: each device does {done / most:.3g} times the flops of its share."
                if done > ROUNDING * most
                else ""
            )
            rows.append(Row("flops a device", f"at most {show_flops(most)}", show_flops(done), reply))
        # A collective has an operand and a result at the same time.
        beside = [one.array for one in self.collectives for _ in (0, 1)]
        most = ROUNDING * sum(map(self._bytes, (*self.operands, self.result, *beside, *self.copies))) + 256
        peak = inspection.memory["peak"]
        reply = "The values are right, but a device holds more than it needs to." if peak > most else ""
        return [*rows, Row("memory a device", f"at most {show_bytes(most)}", show_bytes(peak), reply)]

    def _array(self, text: str) -> ShardedArray:
        return parse_array(text, axes=tuple(self.mesh))

    def _bytes(self, text: str) -> int:
        return self.sizes.local_bytes(self._array(text))


def _values_row(name: str, wanted: Array, found: Any) -> Row:
    """Return the row that compares an array of the answer (`found`) with the reference's. name: the row's name."""
    asked = "as on one device"
    if not hasattr(found, "shape") or found.shape != wanted.shape:
        yours = str(list(found.shape)) if hasattr(found, "shape") else type(found).__name__
        return Row(name, f"{asked}, {list(wanted.shape)}", yours, f"The {name} have another shape.")
    error = float(np.abs(np.asarray(found) - np.asarray(wanted)).max() / (np.abs(np.asarray(wanted)).max() or 1.0))
    if error <= ERROR:
        return Row(name, asked, asked)
    return Row(name, asked, f"off by {error:.2g}", f"The {name} differ from those on one device.")


def _traffic_reply(kind: str, asked: int, yours: int) -> str:
    """Return how the bytes of one kind of collective over some axes differ from the requirement; '' if they agree."""
    if asked == yours:
        return ""
    if not yours:
        return f"The values are right, but the {kind} is missing."
    if not asked:
        return f"The values are right, but the {kind} is not needed."
    return f"The values are right, but the {kind} moves {yours / asked:.3g} times the bytes."


def _bytes_or_none(size: int) -> str:
    return show_bytes(size) if size else "none"


def _verdict(name: str, exercise: Program, num_devices: int, rows: list[Row]) -> Verdict:
    """Return the table; below it the first reply, or the explanation if all rows agree."""
    cells = [(row.name, row.asked, row.yours, "differs" if row.reply else "") for row in rows]
    lines = [line for _, line in table(("", "asked", "yours", ""), cells, left=(0, 1, 2, 3)).lines(WIDTH)]
    replies = [row.reply for row in rows if row.reply]
    # Replication explains the other differences, so its reply comes first.
    replies.sort(key=lambda reply: not reply.startswith("Right, but replicated"))
    last = f"{name}: not yet. {replies[0]}" if replies else f"{name}: right. {exercise.because}"
    return Verdict(name, not replies, "\n".join([f"{name} on {num_devices} devices", *lines, last]))

"""Live buffers of a compiled program: the peak of a device's memory, and what it consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.description.hlo.module import Module, contradictions_as_errors
from meshwright.description.hlo.phases import describe
from meshwright.description.hlo.shapes import Shape
from meshwright.proof.simulate.aliasing import Leaf
from meshwright.proof.simulate.liveness import Liveness
from meshwright.record import Phase


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A buffer in a device's main memory.

    name: the instruction that first writes it. shape: with its layout. num_bytes: with padding.
    """

    name: str
    kind: Literal["argument", "output", "temporary"]
    shape: Shape
    num_bytes: int
    phase: Phase
    scope: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The peak of a device's main memory during one execution of a program.

    moment: the instructions that run at the peak, from the entry's to the innermost loop's. live: the buffers in use
    then, largest first; their bytes sum to the peak. argument_bytes: the bytes of all arguments.
    """

    peak_bytes: int
    argument_bytes: int
    moment: tuple[str, ...]
    live: tuple[Buffer, ...]


def read_buffers(module: Module) -> Memory:
    """Return the peak memory of a scheduled program on one device, and its live buffers at that moment.

    A buffer is live from the instruction that computes its array to the last that uses it, in printed order. Arguments
    and results are live to the end, in one buffer where an argument is donated. Tuples, views and in-place updates have
    no buffer of their own. Buffers of a loop iteration add to those live outside the loop. Arrays count with their
    padding; arrays in other memories (VMEM, host) do not count. Not included: constants, the program itself, scratch of
    collectives, and allocator fragmentation.
    """
    with contradictions_as_errors(module):
        liveness = Liveness(module)
        peak, spans = liveness.peak(module.entry), liveness.spans(module.entry)
        live = [_buffer(liveness, span.leaf, span.num_bytes) for span in peak.live]
    return Memory(
        peak_bytes=peak.num_bytes,
        argument_bytes=sum(span.num_bytes for span in spans if liveness.is_argument(span.leaf)),
        moment=peak.moment,
        live=tuple(sorted(live, key=lambda buffer: -buffer.num_bytes)),
    )


def _buffer(liveness: Liveness, leaf: Leaf, num_bytes: int) -> Buffer:
    """Return the buffer of a leaf. Its name, phase, scope and source are those of the instruction that first writes it.

    For a loop's state that instruction may be before the loop.
    """
    made = liveness.origin(leaf)
    instruction = liveness.module.computations[made.computation].instructions[made.instruction]
    said = describe(liveness.module, instruction)[0]
    kind = "output" if liveness.is_returned(made) else "temporary"
    return Buffer(
        name=instruction.name,
        kind="argument" if liveness.is_argument(made) else kind,
        shape=list(instruction.shape.arrays())[made.number],
        num_bytes=num_bytes,
        phase=said.phase,
        scope=said.scope,
        source=said.source,
    )

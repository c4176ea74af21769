"""Which buffers of a compiled program live when: the peak of a device's memory, and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.hlo import Module, Shape, contradictions_as_errors, describe, scope_of
from meshwright.record import Phase
from meshwright.simulate.buffers_lives import Liveness
from meshwright.simulate.buffers_shared import Leaf


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """One buffer in a device's main memory.

    name: the instruction that makes what first lies in it. shape: with its layout. num_bytes: with its padding.
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
    """The peak of a device's main memory in one run of a program.

    moment: the instructions that run then, from that of the entry to the innermost of a loop. live: the buffers in use
    at that moment, the largest first; their bytes add up to the peak. argument_bytes: those of all arguments.
    """

    peak_bytes: int
    argument_bytes: int
    moment: tuple[str, ...]
    live: tuple[Buffer, ...]


def read_buffers(module: Module) -> Memory:
    """The peak of a device's memory when a scheduled program runs, and the buffers that make it up.

    A buffer lives from the instruction that makes its array to the last that uses it, in the printed order; arguments
    and what is returned live to the end, in one buffer where an argument is donated. Tuples, views and updates in place
    take none of their own; what is made in a trip of a loop is added to what waits outside. An array takes its bytes
    with their padding; one in another memory (VMEM, the host's) takes none. What it leaves out: constants, the program
    itself, the scratch that collectives reserve, and what an allocator loses between buffers.
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
    """What there is to say of a buffer, at the instruction that makes it: of a loop's state that may be outside."""
    made = liveness.made(leaf)
    instruction = liveness.module.computations[made.computation].instructions[made.instruction]
    said = describe(liveness.module, instruction)[0]
    kind = "output" if liveness.is_returned(made) else "temporary"
    return Buffer(
        name=instruction.name,
        kind="argument" if liveness.is_argument(made) else kind,
        shape=list(instruction.shape.arrays())[made.number],
        num_bytes=num_bytes,
        phase=said.phase,
        scope=scope_of(said.op_name),
        source=said.source,
    )

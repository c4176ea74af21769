"""The collectives of a program: mesh axes, bytes, executions per step, phase, source."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.description.hlo.canonical import is_padded_gather, promoted_from, slice_lowering
from meshwright.description.hlo.groups import Axes, Groups, axes_of_groups, axes_of_pairs, parse_groups, parse_pairs
from meshwright.description.hlo.loops import ExecutionCounts, count_executions
from meshwright.description.hlo.module import Instruction, Module
from meshwright.description.hlo.phases import describe
from meshwright.description.hlo.shapes import Shape
from meshwright.record import KINDS, Collective, Kind, LoweredAs, Lowering, Phase

_KINDS: Mapping[str, Kind] = {**{kind: kind for kind in KINDS}, "ragged-all-to-all": "all-to-all"}
_MOVES = ("all-gather", "all-to-all", "collective-permute")
_NOT_COUNTED = ("send", "recv", "collective-broadcast")


@dataclass(frozen=True, kw_only=True)
class ProgramCollectives:
    """The collectives of a program.

    uncounted: executions per step of transfers that `collectives` leaves out, by opcode. notes: messages about parts of
    the program that could not be read.
    """

    collectives: tuple[Collective, ...]
    uncounted: Mapping[str, int]
    notes: tuple[str, ...]


def read_collectives(module: Module, mesh: Mapping[str, int]) -> ProgramCollectives:
    """Return the collectives of a program on a mesh, with bytes and executions per device and step.

    A collective in a loop counts once for each iteration. Collectives among groups of one device are left out. A
    combined collective has one entry for each phase and lowering of its arrays. If its groups are not a product of mesh
    axes, `axes` is () and a note says so. An all-reduce that is a lowered reduce-scatter or all-gather stays an
    all-reduce, with `lowerings`; `canonical.canonicalize_collective` undoes them. A collective that the TPU compiler
    spreads over several fusions or inner loops is counted once, where it starts.

    Args:
        mesh: every axis and its degree in device order, outermost first.
    """
    runs = count_executions(module)
    collectives = [one for _, entries in each_collective(module, mesh, runs) for one in entries]
    uncounted: Counter[str] = Counter()
    for instruction in module.instructions():
        opcode, times = instruction.opcode.removesuffix("-start"), runs.times[instruction.computation]
        if opcode in _NOT_COUNTED and times:
            uncounted[opcode] += times
    return ProgramCollectives(collectives=tuple(collectives), uncounted=dict(uncounted), notes=runs.notes)


def each_collective(
    module: Module, mesh: Mapping[str, int], runs: ExecutionCounts
) -> Iterator[tuple[Instruction, tuple[Collective, ...]]]:
    """Yield each instruction that runs a collective, with the entries that `read_collectives` has for it.

    A collective spread over several fusions is yielded once, with its first instruction. Instructions that never run,
    and collectives among groups of one device, are left out.

    runs: how often each computation runs.
    """
    repeated = _repeated_parts(module)
    for instruction in module.instructions():
        times = runs.times[instruction.computation]
        if collective_kind(instruction) is None or not times:
            continue
        if (instruction.computation, instruction.name) in repeated:
            continue
        if entries := tuple(collective_entries(module, instruction, mesh, times)):
            yield instruction, entries


def _repeated_parts(module: Module) -> frozenset[tuple[str, str]]:
    """Return (computation, name) of the instructions that only continue a collective counted at another instruction.

    The TPU compiler splits an asynchronous collective over several fusions, whose instructions have the same kind and
    channel. Of these, the ones that the compiler marked as starts are counted: a peeled iteration of a loop has a start
    of its own on the same channel. If none is marked, only the first one in the outermost computation is counted, since
    a gather may continue through the iterations of an inner loop. All others are returned.
    """
    parts: defaultdict[tuple[str, Kind], list[tuple[str, Instruction]]] = defaultdict(list)
    for instruction in module.instructions():
        kind, channel = collective_kind(instruction), instruction.attributes.get("channel_id")
        # With several slices, all reduce-scatters share one channel, each in a fusion of its own.
        if kind is not None and channel and not _is_hidden_reduce_scatter(module, instruction):
            *_, home = _single_callers(module, instruction.computation, "fusion")
            if home != instruction.computation:
                parts[channel, kind].append((home, instruction))
    further = set()
    for alike in parts.values():
        if any(starts := [_starts(module, instruction) for _, instruction in alike]):
            further.update(
                (one.computation, one.name) for (_, one), begins in zip(alike, starts, strict=True) if not begins
            )
            continue
        homes = [home for home, _ in alike]
        for number, (home, instruction) in enumerate(alike):
            around = _single_callers(module, home, "while")[1:]
            if home in homes[:number] or any(other in around for other in homes):
                further.add((instruction.computation, instruction.name))
    return frozenset(further)


def _starts(module: Module, part: Instruction) -> bool:
    """Whether the TPU compiler marked an instruction of a split collective as its start."""
    return any(user.custom_call_target == "AsyncCollectiveStart" for user in module.users(part))


def _single_callers(module: Module, computation: str, opcode: str) -> list[str]:
    """Return the names of a computation, of its caller's computation, and so on.

    The list ends at a computation that has several callers, none, or one with another opcode than `opcode`.
    """
    found = [computation]
    while len(callers := module.callers[found[-1]]) == 1 and callers[0].opcode == opcode:
        found.append(callers[0].computation)
    return found


def collective_kind(instruction: Instruction) -> Kind | None:
    """Return the kind of collective that an instruction runs or starts; None if it is not a collective."""
    return _KINDS.get(instruction.opcode.removesuffix("-start"))


def collective_entries(
    module: Module, instruction: Instruction, mesh: Mapping[str, int], times: int = 1
) -> Iterator[Collective]:
    """Yield the record entries of a collective: one for each phase and lowering of its arrays.

    There are none if its groups have one device each. times: how often the collective runs per step.
    """
    kind, groups = _KINDS[instruction.opcode.removesuffix("-start")], groups_of(instruction, mesh)
    axes = axes_of_pairs(groups, mesh) if kind == "collective-permute" else axes_of_groups(groups, mesh)
    if axes == ():
        return
    scattered = _is_hidden_reduce_scatter(module, instruction)
    shapes = _shapes(module, instruction)
    lowerings = [
        None if scattered else _lowering(module, instruction, number, len(shapes), axes or (), mesh)
        for number in range(len(shapes))
    ]
    moves = kind in _MOVES or all(one is not None and one.form == LoweredAs.PADDED_ALL_REDUCE for one in lowerings)
    descriptions = describe(module, instruction, number=len(shapes), moves=moves)
    note = "" if axes is not None else f"its groups are not a product of mesh axes: {_shorten(instruction)}"
    phases: list[Phase] = [description.phase for description in descriptions]
    for phase, lowering in dict.fromkeys(zip(phases, lowerings, strict=True)):
        alike = [i for i in range(len(shapes)) if (phases[i], lowerings[i]) == (phase, lowering)]
        yield Collective(
            kind="reduce-scatter" if scattered else kind,
            axes=axes or (),
            phase=phase,
            bytes=times * sum(shapes[i].bytes for i in alike),
            count=times,
            array=_arrays([shapes[i] for i in alike]),
            source=descriptions[alike[0]].place,
            note=note,
            lowerings=() if lowering is None else (lowering,),
        )


def groups_of(instruction: Instruction, mesh: Mapping[str, int]) -> Groups:
    """Return the groups of device ids of a collective; for a collective-permute, its (source, target) pairs."""
    if instruction.opcode.startswith("collective-permute"):
        return parse_pairs(instruction.attributes.get("source_target_pairs", "{}"))
    return parse_groups(instruction.attributes.get("replica_groups", "{}"), num_devices=math.prod(mesh.values()))


def _shapes(module: Module, instruction: Instruction) -> list[Shape]:
    """Return the arrays whose bytes count: results of an all-gather, operands of any other collective."""
    if instruction.opcode == "all-gather":
        return list(instruction.shape.arrays())
    if instruction.opcode == "all-gather-start":
        return list(instruction.shape.elements[1].arrays())
    arrays = [array for operand in module.operands(instruction) for array in operand.shape.arrays() if array.bytes]
    if instruction.opcode.startswith("all-to-all") and len(arrays) > 1:
        # An all-to-all's operands are the shards of one array, one for each device.
        return [Shape(arrays[0].dtype, (len(arrays), *arrays[0].dims))]
    if instruction.opcode.startswith("ragged-all-to-all"):
        # The operands are the input, the output (one of the two is padded), then offsets and sizes.
        return [min(arrays[:2], key=lambda shape: shape.bytes)]
    if instruction.opcode.startswith("collective-permute"):
        started = instruction.opcode == "collective-permute-start" and instruction.shape.elements
        made = instruction.shape.elements[0] if started else instruction.shape
        if made.dtype != "tuple":  # A combined permute has a tuple, and all its operands count.
            return arrays[:1]  # The other operands are its destination and offsets.
    return arrays


def _lowering(
    module: Module, instruction: Instruction, number: int, num_arrays: int, axes: Axes, mesh: Mapping[str, int]
) -> Lowering | None:
    """Return how the compiler changed one array's collective (to another one or another dtype); None if it did not.

    Args:
        module: the program.
        instruction: the collective.
        number: the position of the array among those of the collective.
        num_arrays: how many arrays the collective combines.
        axes: the mesh axes of the collective.
        mesh: the degree of every axis, in device order.
    """
    result = _result(module, instruction, number, num_arrays)
    if result is None:
        return None
    found = None
    operand = module.operands(instruction)[number]
    reducer = next(iter(instruction.called("to_apply")), "")
    if instruction.opcode.startswith("all-reduce"):
        sums = module.root(reducer).opcode in ("add", "or")
        padded = sums and is_padded_gather(module, operand, axes, mesh)
        found = Lowering(form=LoweredAs.PADDED_ALL_REDUCE) if padded else slice_lowering(module, result, axes, mesh)
    if dtype := promoted_from(module, operand, result, reducer, is_combined=num_arrays > 1):
        found = replace(found or Lowering(), promoted_from=dtype)
    return found


def _result(module: Module, instruction: Instruction, number: int, num_results: int) -> Instruction | None:
    """Return the instruction whose value is result number `number` of a collective.

    It is the collective or its `-done` if there is one result, else the get-tuple-element that extracts the result.
    None if there is no such instruction, or more than one. num_results: how many results the collective has.
    """
    while instruction.opcode.endswith("-start"):
        done = [user for user in module.users(instruction) if user.opcode.endswith("-done")]
        if not done:
            return None
        instruction = done[0]
    if instruction.shape.dtype != "tuple":
        return instruction if num_results == 1 else None
    users = module.users(instruction)
    if not all(user.opcode == "get-tuple-element" for user in users):
        return None
    taken = [user for user in users if user.index == number]
    return taken[0] if len(taken) == 1 else None


def _is_hidden_reduce_scatter(module: Module, instruction: Instruction) -> bool:
    """Whether an all-reduce is inside a fusion that the TPU compiler runs as one reduce-scatter."""
    callers = module.callers[instruction.computation]
    return (
        instruction.opcode == "all-reduce"
        and instruction.computation.startswith("all-reduce-scatter")
        and len(callers) == 1
        and callers[0].attributes.get("kind") == "kCustom"
    )


def _arrays(shapes: list[Shape]) -> str:
    """Return the largest shape and the number of others as text: `bf16[512,256] and 2 more`."""
    largest = max(shapes, key=lambda shape: shape.bytes)
    return f"{largest} and {len(shapes) - 1} more" if len(shapes) > 1 else str(largest)


def _shorten(instruction: Instruction) -> str:
    """Return the text of a collective's groups, cut after 60 characters."""
    text = instruction.attributes.get("replica_groups", "")
    return text if len(text) <= 60 else text[:57] + "..."

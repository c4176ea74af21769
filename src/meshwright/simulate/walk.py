"""The walk through a scheduled program that makes the events of a simulated run."""

from __future__ import annotations

from dataclasses import replace

from meshwright.hlo import Instruction, describe, scope_of
from meshwright.hlo.loops import trip_count
from meshwright.simulate.events import COMPUTE, Event, Repeat
from meshwright.simulate.fabric import Fabric, Move
from meshwright.simulate.op_seconds import OpSeconds, op_seconds
from meshwright.simulate.steps import Step, read_steps

_MOST_TRIPS = 4
"""Trips of one loop that are walked: one differs from the one before only as far as links are busy when it begins.

Where they still are after so many, something outside the loop takes very long; the last trip stands for the rest.
"""

_SAME_SECONDS = 1e-12


def walk(fabric: Fabric) -> tuple[tuple[Event, ...], tuple[str, ...]]:
    """The events of one run of a program in the order they begin, and notes on what is not known."""
    walker = _Walker(fabric)
    walker.computation(fabric.module.entry)
    for key in list(walker.on_the_way):
        walker.await_end(key)
    return tuple(sorted(walker.events, key=lambda event: event.start_seconds)), tuple(dict.fromkeys(walker.notes))


class _Walker:
    """The time of the ops, until when each link is busy, and what is on its way: key to number of the event."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.now = 0.0
        self.busy_until: dict[str, float] = {}
        self.on_the_way: dict[str, int] = {}
        self.events: list[Event] = []
        self.notes: list[str] = []
        self.known: dict[tuple[str, str], tuple[OpSeconds, tuple[Step, ...]]] = {}

    def computation(self, name: str) -> None:
        """Run the instructions of a computation in their order."""
        for instruction in self.fabric.module.computations[name].instructions.values():
            if instruction.opcode == "while":
                self.loop(instruction)
            elif instruction.opcode == "call":
                self.computation(instruction.called("to_apply")[0])
            elif instruction.opcode == "conditional":
                self.longest_branch(instruction)
            else:
                self.instruction(instruction)

    def instruction(self, instruction: Instruction) -> None:
        """Await what an instruction awaits, start what it starts, then run its op beside what it makes whole."""
        op, steps = self.costs(instruction)
        whole = []
        for step in steps:
            if step.part == "done":
                self.await_end(step.key)
            elif step.move is not None:
                self.start(step.key, step.move, instruction)
                whole += [step.key] if step.part == "whole" else []
        if op.seconds:
            self.run(instruction, op)
        for key in whole:
            self.await_end(key)

    def costs(self, instruction: Instruction) -> tuple[OpSeconds, tuple[Step, ...]]:
        """The time of an instruction's op, and what it moves; read once, whatever the trips."""
        key = (instruction.computation, instruction.name)
        if key not in self.known:
            steps = read_steps(self.fabric, instruction)
            moves_only = any(step.move is not None or step.part == "done" for step in steps)
            op = op_seconds(self.fabric.module, instruction, self.fabric.system)
            # The memory traffic of a collective is part of its own time; only the compiler tells of an op beside it.
            self.known[key] = (OpSeconds(0.0, op.basis) if moves_only and op.basis != "compiler" else op, steps)
        return self.known[key]

    def run(self, instruction: Instruction, op: OpSeconds) -> None:
        """Run an op: nothing else can while it does."""
        said = describe(self.fabric.module, instruction)[0]
        self.events.append(
            Event(
                name=instruction.name,
                kind="op",
                lane=COMPUTE,
                start_seconds=self.now,
                seconds=op.seconds,
                phase=said.phase,
                scope=scope_of(said.op_name),
                source=said.source,
                basis=op.basis,
            )
        )
        self.now += op.seconds

    def start(self, key: str, move: Move, instruction: Instruction) -> None:
        """Send a move on its way as soon as all its links are free."""
        begin = max([self.now, *(self.busy_until.get(link, 0.0) for link in move.links)])
        for link in move.links:
            self.busy_until[link] = begin + move.seconds
        self.on_the_way[key] = len(self.events)
        self.events.append(
            Event(
                name=instruction.name,
                kind=move.kind,
                lane=move.lane,
                start_seconds=begin,
                seconds=move.seconds,
                phase=move.phase,
                axes=move.axes,
                scope=move.scope,
                source=move.source,
                num_bytes=move.num_bytes,
                note=move.note,
            )
        )
        self.notes += [f"{instruction.name}: {move.note}"] if move.note else []

    def await_end(self, key: str) -> None:
        """Stand still until a move is done; what was never started (in groups of one device) is."""
        number = self.on_the_way.pop(key, None)
        if number is None:
            return
        event = self.events[number]
        waited = max(0.0, event.start_seconds + event.seconds - self.now)
        if waited:
            self.events[number] = replace(event, exposed_seconds=event.exposed_seconds + waited)
            self.now += waited

    def loop(self, loop: Instruction) -> None:
        """Run the trips of a loop, until one leaves the links as it found them: all that follow are like it."""
        trips = trip_count(self.fabric.module, loop)
        if trips is None:
            self.notes.append(f"loop {loop.op_name or loop.name}: its trips depend on data; taken as one")
        left = 1 if trips is None else trips
        body, outer, begin, walked = loop.called("body")[0], len(self.events), self.now, 0
        while left:
            before, first, start = self.waiting_links(), len(self.events), self.now
            self.computation(body)
            walked += 1
            period = self.now - start
            times = left if walked == _MOST_TRIPS or self.is_as(before) else 1
            self.repeat(first, times, period)
            left -= times
        self.note_loop(loop, outer, begin, "1 trip" if trips in (None, 1) else f"{trips} trips")

    def repeat(self, first: int, times: int, period: float) -> None:
        """Let the events from number `first` on, a trip of a loop, come so many times, and time go on."""
        if times == 1:
            return
        for number in range(first, len(self.events)):
            event = self.events[number]
            self.events[number] = replace(event, repeats=(Repeat(times, period), *event.repeats))
        passed = (times - 1) * period
        for link, until in self.busy_until.items():
            if until > self.now:
                self.busy_until[link] = until + passed
        self.now += passed

    def note_loop(self, loop: Instruction, outer: int, begin: float, note: str) -> None:
        """An event for a whole loop, before those in it."""
        if self.now > begin:
            said = describe(self.fabric.module, loop)[0]
            event = Event(
                name=loop.name,
                kind="loop",
                lane=COMPUTE,
                start_seconds=begin,
                seconds=self.now - begin,
                phase=said.phase,
                scope=scope_of(said.op_name),
                source=said.source,
                note=note,
            )
            self.events.insert(outer, event)
            self.on_the_way = {k: n + (n >= outer) for k, n in self.on_the_way.items()}

    def longest_branch(self, conditional: Instruction) -> None:
        """Run the branch of a conditional that takes longest."""
        branches = conditional.called("branch_computations", "true_computation", "false_computation")
        self.notes.append(f"conditional {conditional.op_name or conditional.name}: the longest branch taken")
        before, best = self.state(), None
        for branch in branches:
            self.restore(before)
            self.computation(branch)
            if best is None or self.now > best[0]:
                best = self.state()
        if best is not None:
            self.restore(best)

    def state(self) -> tuple[float, dict[str, float], dict[str, int], list[Event]]:
        """What a branch changes."""
        return self.now, dict(self.busy_until), dict(self.on_the_way), list(self.events)

    def restore(self, state: tuple[float, dict[str, float], dict[str, int], list[Event]]) -> None:
        """Go back to a state."""
        self.now, busy, way, events = state
        self.busy_until, self.on_the_way, self.events = dict(busy), dict(way), list(events)

    def waiting_links(self) -> dict[str, float]:
        """How long each busy link still is."""
        return {link: until - self.now for link, until in self.busy_until.items() if until > self.now}

    def is_as(self, before: dict[str, float]) -> bool:
        """Whether the links are as busy as they were."""
        now = self.waiting_links()
        return now.keys() == before.keys() and all(abs(now[k] - before[k]) < _SAME_SECONDS for k in now)

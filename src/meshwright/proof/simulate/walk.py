"""Walk through a scheduled program and record the events of a simulated step."""

from __future__ import annotations

from dataclasses import replace

from meshwright.description.hlo.loops import trip_count
from meshwright.description.hlo.module import Instruction
from meshwright.description.hlo.phases import describe
from meshwright.proof.simulate.events import COMPUTE, Event, Repeat
from meshwright.proof.simulate.fabric import Fabric, Transfer
from meshwright.proof.simulate.op_seconds import OpSeconds, op_seconds
from meshwright.proof.simulate.steps import TransferPart, transfer_parts

_MOST_TRIPS = 4
"""The most iterations of a loop that are simulated.

Iterations differ only in how long links are busy at their start. If this has not settled, because of a very long
transfer outside the loop, the last simulated iteration stands for all later ones.
"""

_SAME_SECONDS = 1e-12


def walk(fabric: Fabric) -> tuple[tuple[Event, ...], tuple[str, ...]]:
    """Return the events of one execution of a program, in order of start, and notes on what could not be determined."""
    walker = _Walker(fabric)
    walker.computation(fabric.module.entry)
    for key in list(walker.in_flight):
        walker.wait_for(key)
    return tuple(sorted(walker.events, key=lambda event: event.start_seconds)), tuple(dict.fromkeys(walker.notes))


class _Walker:
    """State of the simulation.

    now: the simulated time, in seconds. busy_until: the time when each link becomes free, by its name. in_flight: the
    index in `events` of each running transfer, by `TransferPart.key`. known: the result of `costs`, by computation and
    instruction.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.now = 0.0
        self.busy_until: dict[str, float] = {}
        self.in_flight: dict[str, int] = {}
        self.events: list[Event] = []
        self.notes: list[str] = []
        self.known: dict[tuple[str, str], tuple[OpSeconds, tuple[TransferPart, ...]]] = {}

    def computation(self, name: str) -> None:
        """Run the instructions of a computation in order."""
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
        """Run an instruction: wait for transfers, start transfers, then run its op."""
        op, steps = self.costs(instruction)
        whole = []
        for step in steps:
            if step.part == "done":
                self.wait_for(step.key)
            elif step.transfer is not None:
                self.start(step.key, step.transfer, instruction)
                whole += [step.key] if step.part == "whole" else []
        if op.seconds:
            self.run(instruction, op)
        for key in whole:
            self.wait_for(key)

    def costs(self, instruction: Instruction) -> tuple[OpSeconds, tuple[TransferPart, ...]]:
        """Return the time of an instruction's op, and its transfers; computed once for each instruction."""
        key = (instruction.computation, instruction.name)
        if key not in self.known:
            steps = transfer_parts(self.fabric, instruction)
            moves_only = any(step.transfer is not None or step.part == "done" for step in steps)
            op = op_seconds(self.fabric.module, instruction, self.fabric.system)
            # The memory traffic of a collective is part of its own time. Only the compiler's estimate shows an op that
            # computes at the same time.
            self.known[key] = (OpSeconds(0.0, op.basis) if moves_only and op.basis != "compiler" else op, steps)
        return self.known[key]

    def run(self, instruction: Instruction, op: OpSeconds) -> None:
        """Run an op: record its event and advance the time."""
        said = describe(self.fabric.module, instruction)[0]
        self.events.append(
            Event(
                name=instruction.name,
                kind="op",
                lane=COMPUTE,
                start_seconds=self.now,
                seconds=op.seconds,
                phase=said.phase,
                scope=said.scope,
                source=said.source,
                basis=op.basis,
            )
        )
        self.now += op.seconds

    def start(self, key: str, transfer: Transfer, instruction: Instruction) -> None:
        """Start a transfer as soon as all its links are free."""
        begin = max([self.now, *(self.busy_until.get(link, 0.0) for link in transfer.links)])
        for link in transfer.links:
            self.busy_until[link] = begin + transfer.seconds
        self.in_flight[key] = len(self.events)
        self.events.append(
            Event(
                name=instruction.name,
                kind=transfer.kind,
                lane=transfer.lane,
                start_seconds=begin,
                seconds=transfer.seconds,
                phase=transfer.phase,
                axes=transfer.axes,
                scope=transfer.scope,
                source=transfer.source,
                num_bytes=transfer.num_bytes,
                note=transfer.note,
            )
        )
        self.notes += [f"{instruction.name}: {transfer.note}"] if transfer.note else []

    def wait_for(self, key: str) -> None:
        """Stall until a transfer is done. Transfers that were never started (groups of one device) are done."""
        number = self.in_flight.pop(key, None)
        if number is None:
            return
        event = self.events[number]
        waited = max(0.0, event.start_seconds + event.seconds - self.now)
        if waited:
            self.events[number] = replace(event, exposed_seconds=event.exposed_seconds + waited)
            self.now += waited

    def loop(self, loop: Instruction) -> None:
        """Run iterations of a loop until one leaves the links as busy as it found them: all later ones are equal."""
        trips = trip_count(self.fabric.module, loop)
        if trips is None:
            self.notes.append(f"loop {loop.op_name or loop.name}: its trips depend on data; taken as one")
        left = 1 if trips is None else trips
        body, outer, begin, walked = loop.called("body")[0], len(self.events), self.now, 0
        while left:
            before, first, start = self.remaining_busy_seconds(), len(self.events), self.now
            self.computation(body)
            walked += 1
            period = self.now - start
            times = left if walked == _MOST_TRIPS or self.is_equally_busy(before) else 1
            self.repeat(first, times, period)
            left -= times
        self.add_loop_event(loop, outer, begin, "1 trip" if trips in (None, 1) else f"{trips} trips")

    def repeat(self, first: int, times: int, period: float) -> None:
        """Let one loop iteration, the events from index `first` on, run `times` times in all, and advance the time.

        period: the duration of an iteration, in seconds.
        """
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

    def add_loop_event(self, loop: Instruction, outer: int, begin: float, note: str) -> None:
        """Insert an event for a whole loop, which starts at `begin` seconds, before the events inside it.

        outer: the index in `events` of the first of these.
        """
        if self.now > begin:
            said = describe(self.fabric.module, loop)[0]
            event = Event(
                name=loop.name,
                kind="loop",
                lane=COMPUTE,
                start_seconds=begin,
                seconds=self.now - begin,
                phase=said.phase,
                scope=said.scope,
                source=said.source,
                note=note,
            )
            self.events.insert(outer, event)
            self.in_flight = {k: n + (n >= outer) for k, n in self.in_flight.items()}

    def longest_branch(self, conditional: Instruction) -> None:
        """Run the branch of a conditional that takes longest."""
        self.notes.append(f"conditional {conditional.op_name or conditional.name}: the longest branch taken")
        before, best = self.state(), None
        for branch in conditional.branches:
            self.restore(before)
            self.computation(branch)
            if best is None or self.now > best[0]:
                best = self.state()
        if best is not None:
            self.restore(best)

    def state(self) -> tuple[float, dict[str, float], dict[str, int], list[Event]]:
        """Return copies of what running a branch changes: (now, busy_until, in_flight, events)."""
        return self.now, dict(self.busy_until), dict(self.in_flight), list(self.events)

    def restore(self, state: tuple[float, dict[str, float], dict[str, int], list[Event]]) -> None:
        """Go back to what `state` returned."""
        self.now, busy_until, in_flight, events = state
        self.busy_until, self.in_flight, self.events = dict(busy_until), dict(in_flight), list(events)

    def remaining_busy_seconds(self) -> dict[str, float]:
        """Return how many more seconds each busy link stays busy."""
        return {link: until - self.now for link, until in self.busy_until.items() if until > self.now}

    def is_equally_busy(self, before: dict[str, float]) -> bool:
        """Whether each link stays busy as long as in `before`, an earlier `remaining_busy_seconds()`."""
        now = self.remaining_busy_seconds()
        return now.keys() == before.keys() and all(abs(now[k] - before[k]) < _SAME_SECONDS for k in now)

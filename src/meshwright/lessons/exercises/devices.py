"""Exercises on simulated devices: which results hold on real chips and which do not."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.description.notation.array_parser import parse_array
from meshwright.description.notation.legality import Sizes
from meshwright.lessons.exercise import Choice, Exercise, Mistake, Number

ROWS, COLUMNS = 4096, 512
_SIZES = Sizes(degrees={"X": 8}, dims={"I": ROWS, "J": COLUMNS}, element_bytes=4)


def _held(array: str) -> int:
    return _SIZES.local_bytes(parse_array(array))


EXERCISES: Mapping[str, Exercise] = {
    "simulated-speed": Choice(
        question="A product is not faster on eight simulated devices than on one. Why?",
        options={
            "a": "The array was not split: all devices computed all of it.",
            "b": "Simulated devices are threads that share the cores of this machine.",
            "c": "The collectives between the devices take all the time that was won.",
            "d": "The product is too small; a larger one would be eight times as fast.",
        },
        answer="b",
        replies={
            "a": "The picture above shows a part on each device, and the program has an eighth of the flops on each.",
            "c": "This program has no collective: each device multiplies its rows.",
            "d": "Take a larger one and time it: the ratio stays, because no core was added.",
        },
        hints=(
            "How many cores does this machine have, with one device or with eight?",
            "One device of XLA:CPU already uses several threads.",
            "Nothing was added to the machine when jax_num_cpu_devices was set.",
        ),
        because="Simulation tells values, shardings, collectives and memory; times come from a model or a real chip.",
    ),
    "what-a-timer-measures": Choice(
        question=(
            "start = time.perf_counter(); c = product(a, b); print(time.perf_counter() - start): what does it print,"
            " after a first call?"
        ),
        options={
            "a": "The time of the product.",
            "b": "The time of the product and of compiling it.",
            "c": "The time to hand the work over to the devices.",
        },
        answer="c",
        replies={
            "a": "The call returned an array that is not computed yet. Compare with block_until_ready() inside.",
            "b": "The first call compiled it already; the second one finds the program.",
        },
        hints=(
            "JAX returns before a result is there: dispatch is asynchronous.",
            "What would have to happen before the second perf_counter() for the product to be in between?",
            "c.block_until_ready() waits for the product. Without it only the call itself is timed.",
        ),
        because="Wait inside of the timed part, with block_until_ready(), and leave the first call out.",
    ),
    "bytes-a-device": Number(
        question=f"A float32 array [{ROWS}, {COLUMNS}] is split by rows over 8 devices. How many bytes does each hold?",
        unit="B",
        answer=lambda: _held("A[I_X, J]"),
        mistakes=(
            Mistake(lambda: _held("A[I, J]"), "That is the whole array: each device holds a part of its rows."),
            Mistake(lambda: _held("A[I_X, J]") / 2, "An element of float32 has 4 bytes, not 2."),
            Mistake(
                lambda: _held("A[I_X, J]") / 8, "Only the rows are split; every device has all columns of its rows."
            ),
            Mistake(lambda: _held("A[I_X, J]") / 4, "That is the number of elements. Each has 4 bytes."),
        ),
        hints=(
            "How many rows does a device have?",
            "An eighth of the rows, and all columns, of 4 bytes each.",
            f"{ROWS} / 8 rows times {COLUMNS} columns times 4 bytes.",
        ),
        because="Memory is counted exactly by simulation: the same program on a TPU holds the same parts.",
    ),
}

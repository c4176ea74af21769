"""Exercises on links and on the time of collectives."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.description.hardware.fabric import lay_mesh
from meshwright.description.hardware.system import parse_system
from meshwright.lessons.exercise import Choice, Exercise, Mistake, Number
from meshwright.planning.cost.rates.collective import CollectiveTime, collective_seconds
from meshwright.record import wire_bytes

ON, DEGREE, BYTES = "v5e:8x8", 8, 256_000_000


def _time(nbytes: int) -> CollectiveTime:
    """Return the time of an all-gather over a line of `DEGREE` chips. nbytes: bytes of the gathered array."""
    return collective_seconds("all-gather", nbytes, lay_mesh(parse_system(ON), {"X": DEGREE}).placement(("X",)))


def _rate() -> float:
    """Return the rate at which a device sends, in bytes per second."""
    return wire_bytes("all-gather", BYTES, DEGREE) / _time(BYTES).bandwidth_seconds


def _floor_bytes() -> float:
    """Return the size in bytes at which an all-gather's transfer time equals its latency (hops)."""
    share = wire_bytes("all-gather", 1, DEGREE)
    return _time(BYTES).latency_seconds * _rate() / share


EXERCISES: Mapping[str, Exercise] = {
    "time-of-an-all-gather": Number(
        question=f"An array of 256 MB is gathered over X={DEGREE} on {ON}. How long does it take?",
        unit="s",
        answer=lambda: _time(BYTES).seconds,
        mistakes=(
            Mistake(lambda: BYTES / _rate(), "A device has its own part already: (n - 1) / n of the array travels."),
            Mistake(
                lambda: _time(BYTES).seconds / 2,
                "An 8x8 slice of v5e has no links around: this is a line, used one way, and not a ring.",
            ),
            Mistake(
                lambda: BYTES / DEGREE / _rate(),
                "That is one part over one link. In a ring a device passes on the parts of all others.",
            ),
            Mistake(lambda: _time(BYTES).seconds * 2, "That is an all-reduce: twice as much."),
        ),
        hints=(
            "How many bytes does each device send, and how fast is a link?",
            "Each sends (n - 1) / n of the array, at the rate that the cell above prints for one link.",
            "256 MB times 7 / 8, over 45 GB/s: a line of v5e chips is used one way.",
        ),
        because="(n - 1) / n of the bytes over one link, because the slice has no wraparound.",
    ),
    "more-devices": Choice(
        question="The same large array is gathered over 16 chips of a line instead of 4. How long does it take?",
        options={
            "a": "Four times as long: there are four times as many hops.",
            "b": "A quarter: each device sends a quarter as much.",
            "c": "Somewhat longer, at most a third.",
            "d": "Exactly as long.",
        },
        answer="c",
        replies={
            "a": "There are more hops, but each carries a smaller part.",
            "b": "Each device holds a quarter as much, but passes on the parts of all others.",
            "d": "Nearly. What is (n - 1) / n for 4 and for 16?",
        },
        hints=(
            "Every device has to receive what it does not have.",
            "That is (n - 1) / n of the array.",
            "3/4 becomes 15/16.",
        ),
        because="Large arrays cost (n - 1) / n, which hardly depends on n; only the floor by hops grows with n.",
    ),
    "floor-by-hops": Number(
        question=(
            f"Below which size of the array do the hops of an all-gather over X={DEGREE} on {ON} take longer than its"
            " bytes?"
        ),
        unit="B",
        answer=_floor_bytes,
        mistakes=(
            Mistake(
                lambda: _time(BYTES).latency_seconds * _rate(),
                "That is what a device sends; the array is larger by n / (n - 1).",
            ),
            Mistake(
                lambda: _floor_bytes() / (DEGREE - 1),
                "That is one hop. The farthest part passes n - 1 of them.",
            ),
            Mistake(lambda: _floor_bytes() / DEGREE, "That is one device's part; the question is about the array."),
        ),
        hints=(
            'mw.collective("all-gather", X=8, on="v5e:8x8", bytes="1M") prints the latency.',
            "Bytes that take as long as the latency: latency times the link's rate is what each device sends.",
            "What each device sends is 7 / 8 of the array.",
        ),
        because="Below it the time no longer falls: many small collectives cost more than one of all their bytes.",
    ),
}

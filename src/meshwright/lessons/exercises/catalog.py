"""All exercises by name."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.errors import MeshwrightError, did_you_mean, near_names
from meshwright.lessons.exercise import Exercise
from meshwright.lessons.exercises import products

EXERCISES: Mapping[str, Exercise] = {**products.EXERCISES}
"""Every exercise, in the order of the lessons."""


def find_exercise(name: str) -> Exercise:
    """Return an exercise. Raises an error that names those like it, if there is none of this name."""
    if name not in EXERCISES:
        near = did_you_mean(near_names(name, EXERCISES))
        raise MeshwrightError(f"there is no exercise {name!r}; {near}the exercises are {', '.join(EXERCISES)}")
    return EXERCISES[name]

"""All exercises by name."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.errors import MeshwrightError, did_you_mean, near_names
from meshwright.lessons.exercise import Exercise
from meshwright.lessons.exercises import (
    collectives,
    devices,
    holdings,
    links,
    modes,
    own_model,
    parallelism,
    products,
    rooflines,
    sequences,
    transformers,
)

_LESSONS = (
    devices,
    rooflines,
    links,
    holdings,
    collectives,
    products,
    modes,
    transformers,
    parallelism,
    sequences,
    own_model,
)

EXERCISES: Mapping[str, Exercise] = {
    name: exercise for lesson in _LESSONS for name, exercise in lesson.EXERCISES.items()
}
"""Every exercise, in the order of the lessons."""


def find_exercise(name: str) -> Exercise:
    """Return an exercise by its name. Raises an error that suggests similar names if there is no such exercise."""
    if name not in EXERCISES:
        near = did_you_mean(near_names(name, EXERCISES))
        raise MeshwrightError(f"there is no exercise {name!r}; {near}the exercises are {', '.join(EXERCISES)}")
    return EXERCISES[name]

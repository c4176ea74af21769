"""A mesh shape as a `jax.sharding.Mesh`: on the devices that are there, or abstract where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape


def build_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of `shape` over `devices` (all there are by default), every axis explicit.

    `jax.make_mesh` orders the devices for the topology they are wired in; axes come outermost first, so that the axes
    that communicate most lie on neighbours.
    """
    found = jax.devices() if devices is None else list(devices)
    if len(found) != shape.num_devices:
        raise MeshwrightError(f"mesh {shape} wants {shape.num_devices} devices; {len(found)} are there")
    return jax.make_mesh(tuple(shape.layout.values()), tuple(shape.layout), axis_types=_explicit(shape), devices=found)


def abstract_mesh(shape: MeshShape) -> AbstractMesh:
    """The mesh of `shape` with no devices, for tracing and for the types of values."""
    return AbstractMesh(tuple(shape.layout.values()), tuple(shape.layout), axis_types=_explicit(shape))


def _explicit(shape: MeshShape) -> tuple[AxisType, ...]:
    """Explicit for every axis: the type of each value then says how it lies."""
    return (AxisType.Explicit,) * len(shape.layout)

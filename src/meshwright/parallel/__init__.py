"""A mesh shape on devices, and where values lie on it."""

from meshwright.parallel.arrays import DTYPES, abstract, initialise, shardings
from meshwright.parallel.exchange import build_exchange
from meshwright.parallel.layout import Layout
from meshwright.parallel.mesh import abstract_mesh, build_mesh

__all__ = ["DTYPES", "Layout", "abstract", "abstract_mesh", "build_exchange", "build_mesh", "initialise", "shardings"]

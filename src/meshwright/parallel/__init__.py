"""A mesh shape on devices, where values lie on it, and sharded products run in the modes of JAX."""

from meshwright.parallel.arrays import DTYPES, abstract, initialise, shardings
from meshwright.parallel.exchange import build_exchange
from meshwright.parallel.layout import Layout
from meshwright.parallel.mesh import abstract_mesh, build_mesh
from meshwright.parallel.modes import MODES, Mode
from meshwright.parallel.overlapped import gather_product, product_scatter
from meshwright.parallel.pairing import overlapped_collectives
from meshwright.parallel.product import CompiledProduct, compile_product, make_product_mesh, run_product

__all__ = [
    "DTYPES",
    "MODES",
    "CompiledProduct",
    "Layout",
    "Mode",
    "abstract",
    "abstract_mesh",
    "build_exchange",
    "build_mesh",
    "compile_product",
    "gather_product",
    "initialise",
    "make_product_mesh",
    "overlapped_collectives",
    "product_scatter",
    "run_product",
    "shardings",
]

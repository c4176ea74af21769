"""A mesh shape on devices, where values lie on it, and sharded products run in the modes of JAX."""

from meshwright.parallel.arrays import DTYPES, abstract, initialise, shardings
from meshwright.parallel.exchange import build_exchange
from meshwright.parallel.layout import Layout, cotangent_spec
from meshwright.parallel.mesh import abstract_mesh, build_mesh
from meshwright.parallel.modes import MODES, Mode
from meshwright.parallel.overlapped import gather_product, gather_products, product_scatter
from meshwright.parallel.pairing import overlapped_collectives
from meshwright.parallel.pipeline import Pipeline, held, pipelined_loss
from meshwright.parallel.pipeline_1f1b import alternating_loss
from meshwright.parallel.product import CompiledProduct, compile_product, make_product_mesh, run_product
from meshwright.parallel.sequence import attend, order

__all__ = [
    "DTYPES",
    "MODES",
    "CompiledProduct",
    "Layout",
    "Mode",
    "Pipeline",
    "abstract",
    "abstract_mesh",
    "alternating_loss",
    "attend",
    "build_exchange",
    "build_mesh",
    "compile_product",
    "cotangent_spec",
    "gather_product",
    "gather_products",
    "held",
    "initialise",
    "make_product_mesh",
    "order",
    "overlapped_collectives",
    "pipelined_loss",
    "product_scatter",
    "run_product",
    "shardings",
]

"""A mesh shape on devices, where values lie on it, and sharded products run in the modes of JAX."""

from meshwright.runtime.arrays import DTYPES, abstract, initialise, shardings
from meshwright.runtime.devices import Processes, claim_devices
from meshwright.runtime.exchange import build_exchange
from meshwright.runtime.layout import Layout, cotangent_spec
from meshwright.runtime.mesh import abstract_mesh, across_slices, build_mesh, within_slice
from meshwright.runtime.modes import MODES, Mode
from meshwright.runtime.overlapped import gather_product, gather_products, product_scatter
from meshwright.runtime.pairing import overlapped_collectives
from meshwright.runtime.pipeline import Pipeline, held, pipelined_loss
from meshwright.runtime.pipeline_1f1b import alternating_loss
from meshwright.runtime.product import compile_product, make_product_mesh, run_product
from meshwright.runtime.sequence import attend, order

__all__ = [
    "DTYPES",
    "MODES",
    "Layout",
    "Mode",
    "Pipeline",
    "Processes",
    "abstract",
    "abstract_mesh",
    "across_slices",
    "alternating_loss",
    "attend",
    "build_exchange",
    "build_mesh",
    "claim_devices",
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
    "within_slice",
]

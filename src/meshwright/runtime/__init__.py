"""Run sharded computation: meshes, sharding contexts, attention kernels, experts, pipelines, sharded products."""

from meshwright.runtime.arrays import DTYPES, abstract, abstract_for_inference, initialise, shardings
from meshwright.runtime.attention.sequence import attend, token_order
from meshwright.runtime.collective_matmul import all_gather_matmul, all_gather_matmuls, matmul_reduce_scatter
from meshwright.runtime.compile_cache import use_compile_cache
from meshwright.runtime.devices import claim_devices
from meshwright.runtime.fuse_matmuls import overlapped_collectives
from meshwright.runtime.mesh import build_mesh, mesh_platform
from meshwright.runtime.modes import MODES, Mode
from meshwright.runtime.pipeline.gpipe import pipelined_loss, wait_for_input
from meshwright.runtime.pipeline.one_forward_one_backward import pipelined_loss_1f1b
from meshwright.runtime.pipeline.stages import Pipeline
from meshwright.runtime.product import compile_product, make_product_mesh
from meshwright.runtime.sharding_context import ShardingContext, cotangent_spec
from meshwright.runtime.single_collective import build_collective

__all__ = [
    "DTYPES",
    "MODES",
    "Mode",
    "Pipeline",
    "ShardingContext",
    "abstract",
    "abstract_for_inference",
    "all_gather_matmul",
    "all_gather_matmuls",
    "attend",
    "build_collective",
    "build_mesh",
    "claim_devices",
    "compile_product",
    "cotangent_spec",
    "initialise",
    "make_product_mesh",
    "matmul_reduce_scatter",
    "mesh_platform",
    "overlapped_collectives",
    "pipelined_loss",
    "pipelined_loss_1f1b",
    "shardings",
    "token_order",
    "use_compile_cache",
    "wait_for_input",
]

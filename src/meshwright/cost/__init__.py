"""Time of a collective and of an op, on links and chips at their full rate."""

from meshwright.cost.collective import (
    CollectiveTime,
    Term,
    collective_seconds,
    gather_bytes_per_second,
    pipeline_transfer_seconds,
)
from meshwright.cost.flops import StepFlops, model_flops, step_flops
from meshwright.cost.memory import argument_bytes, parameter_elements, step_memory, step_traffic
from meshwright.cost.product import Intensity, PricedProduct, PricedWay, price
from meshwright.cost.roofline import (
    OpTime,
    critical_batch,
    critical_tokens_fsdp_tp,
    critical_tokens_moe,
    hardware_intensity,
    intensity,
    matmul_bytes,
    network_intensity,
    op_seconds,
)
from meshwright.cost.traffic import step_collectives

__all__ = [
    "CollectiveTime",
    "Intensity",
    "OpTime",
    "PricedProduct",
    "PricedWay",
    "StepFlops",
    "Term",
    "argument_bytes",
    "collective_seconds",
    "critical_batch",
    "critical_tokens_fsdp_tp",
    "critical_tokens_moe",
    "gather_bytes_per_second",
    "hardware_intensity",
    "intensity",
    "matmul_bytes",
    "model_flops",
    "network_intensity",
    "op_seconds",
    "parameter_elements",
    "pipeline_transfer_seconds",
    "price",
    "step_collectives",
    "step_flops",
    "step_memory",
    "step_traffic",
]

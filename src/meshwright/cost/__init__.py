"""Time of a collective and of an op, on links and chips at their full rate."""

from meshwright.cost.achieved import contention_seconds, product_seconds, straggling_seconds
from meshwright.cost.collective import (
    CollectiveTime,
    Term,
    collective_seconds,
    gather_bytes_per_second,
    pipeline_transfer_seconds,
)
from meshwright.cost.compute import PassSeconds, microbatch_seconds, update_seconds
from meshwright.cost.efficiency import collective_efficiency, product_efficiency
from meshwright.cost.flops import StepFlops, model_flops, step_flops
from meshwright.cost.inference import (
    DecodeTime,
    decode_seconds,
    decode_tokens_per_second,
    evicted_tokens,
    free_bytes,
    kv_cache_bytes,
    largest_batch,
    prefill_seconds,
    prefill_servers,
    smallest_system,
)
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
from meshwright.cost.strategy import (
    best_fsdp_degree,
    critical_ffw_dim_experts,
    critical_tensor_degree,
    critical_tokens_data,
    feedforward_texts,
    power_of_two,
    training_seconds,
    utilisation,
)
from meshwright.cost.traffic import step_collectives

__all__ = [
    "CollectiveTime",
    "DecodeTime",
    "Intensity",
    "OpTime",
    "PassSeconds",
    "PricedProduct",
    "PricedWay",
    "StepFlops",
    "Term",
    "argument_bytes",
    "best_fsdp_degree",
    "collective_efficiency",
    "collective_seconds",
    "contention_seconds",
    "critical_batch",
    "critical_ffw_dim_experts",
    "critical_tensor_degree",
    "critical_tokens_data",
    "critical_tokens_fsdp_tp",
    "critical_tokens_moe",
    "decode_seconds",
    "decode_tokens_per_second",
    "evicted_tokens",
    "feedforward_texts",
    "free_bytes",
    "gather_bytes_per_second",
    "hardware_intensity",
    "intensity",
    "kv_cache_bytes",
    "largest_batch",
    "matmul_bytes",
    "microbatch_seconds",
    "model_flops",
    "network_intensity",
    "op_seconds",
    "parameter_elements",
    "pipeline_transfer_seconds",
    "power_of_two",
    "prefill_seconds",
    "prefill_servers",
    "price",
    "product_efficiency",
    "product_seconds",
    "smallest_system",
    "step_collectives",
    "step_flops",
    "step_memory",
    "step_traffic",
    "straggling_seconds",
    "training_seconds",
    "update_seconds",
    "utilisation",
]

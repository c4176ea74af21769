"""Time of a collective and of an op, on links and chips at their full rate."""

from meshwright.cost.comm_volume import (
    activation_collectives,
    dropless_padding_collectives,
    is_of_weights,
    reference_collectives,
    step_collectives,
    untaken_branch_collectives,
    weight_collectives,
)
from meshwright.cost.flops import (
    attention_flops,
    dropless_padding_flops,
    model_flops,
    single_column_flops,
    step_flops,
    untaken_branch_flops,
)
from meshwright.cost.formulas import collective_formula
from meshwright.cost.images import (
    IMAGE_AXES,
    image_collectives,
    image_flops,
    image_memory,
    image_ops,
    image_step_flops,
    image_update_seconds,
)
from meshwright.cost.kv_cache import (
    device_cache_bytes,
    mean_cache_bytes,
    read_cache_bytes,
    sequence_cache_bytes,
    token_cache_bytes,
    wasted_share,
)
from meshwright.cost.memory import (
    argument_bytes,
    host_bytes,
    in_flight,
    offloaded_bytes,
    peak_within,
    pool_notes,
    step_memory,
)
from meshwright.cost.model_states import states_bytes
from meshwright.cost.rates.achieved import contention_seconds, straggling_seconds
from meshwright.cost.rates.borrowed import borrowed_figures, borrowed_notes
from meshwright.cost.rates.collective import (
    CollectiveTime,
    collective_seconds,
    gather_bytes_per_second,
)
from meshwright.cost.rates.collective_time import achieved_seconds, planned_seconds, reduce_scatter_runs_as_all_reduce
from meshwright.cost.rates.efficiency import product_efficiency
from meshwright.cost.rates.hbm import hbm_bytes
from meshwright.cost.rates.links import collective_efficiency
from meshwright.cost.rates.product import PricedImplementation, PricedProduct, price
from meshwright.cost.rates.ring import RingWork, is_round_ring, ring_work
from meshwright.cost.roofline import (
    critical_batch,
    hardware_intensity,
    intensity,
    matmul_bytes,
    network_intensity,
    op_seconds,
)
from meshwright.cost.seconds import PassSeconds, buffer_seconds, microbatch_seconds, update_seconds
from meshwright.cost.serving_bytes import most_sequences, serving_argument_bytes, serving_memory, weight_bytes
from meshwright.cost.serving_seconds import (
    BOUNDS,
    ServingStep,
    batch_of_equal_reads,
    compute_bound_batch,
    prefill_servers,
    product_time,
    serving_collectives,
    serving_device_flops,
    serving_flops,
    serving_step,
)
from meshwright.cost.threshold import say_threshold

__all__ = [
    "BOUNDS",
    "IMAGE_AXES",
    "CollectiveTime",
    "PassSeconds",
    "PricedImplementation",
    "PricedProduct",
    "RingWork",
    "ServingStep",
    "achieved_seconds",
    "activation_collectives",
    "argument_bytes",
    "attention_flops",
    "batch_of_equal_reads",
    "borrowed_figures",
    "borrowed_notes",
    "buffer_seconds",
    "collective_efficiency",
    "collective_formula",
    "collective_seconds",
    "compute_bound_batch",
    "contention_seconds",
    "critical_batch",
    "device_cache_bytes",
    "dropless_padding_collectives",
    "dropless_padding_flops",
    "gather_bytes_per_second",
    "hardware_intensity",
    "hbm_bytes",
    "host_bytes",
    "image_collectives",
    "image_flops",
    "image_memory",
    "image_ops",
    "image_step_flops",
    "image_update_seconds",
    "in_flight",
    "intensity",
    "is_of_weights",
    "is_round_ring",
    "matmul_bytes",
    "mean_cache_bytes",
    "microbatch_seconds",
    "model_flops",
    "most_sequences",
    "network_intensity",
    "offloaded_bytes",
    "op_seconds",
    "peak_within",
    "planned_seconds",
    "pool_notes",
    "prefill_servers",
    "price",
    "product_efficiency",
    "product_time",
    "read_cache_bytes",
    "reduce_scatter_runs_as_all_reduce",
    "reference_collectives",
    "ring_work",
    "say_threshold",
    "sequence_cache_bytes",
    "serving_argument_bytes",
    "serving_collectives",
    "serving_device_flops",
    "serving_flops",
    "serving_memory",
    "serving_step",
    "single_column_flops",
    "states_bytes",
    "step_collectives",
    "step_flops",
    "step_memory",
    "straggling_seconds",
    "token_cache_bytes",
    "untaken_branch_collectives",
    "untaken_branch_flops",
    "update_seconds",
    "wasted_share",
    "weight_bytes",
    "weight_collectives",
]

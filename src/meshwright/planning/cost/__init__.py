"""Costs of a step, summed over its ops: flops, collectives, memory and seconds. `rates`: what hardware achieves.

Train steps: `flops`, `comm_volume`, `seconds` (with `elementwise`), `memory` (with `activations`, `model_states`).
Servers: `serving_seconds`, `serving_bytes`, `kv_cache`. `roofline` and `threshold` compute the sizes from which an
op is compute bound; `table` lists ops.
"""

"""Sums over the ops of a step: flops, collectives, memory and seconds; `rates` has what hardware achieves.

`flops`, `comm_volume`, `seconds` (with `elementwise`) and `memory` (with `activations` and `model_states`) are of a
train step, `serving_seconds`, `serving_bytes` and `kv_cache` of a server's, `images` of an image model's. `roofline`
and `threshold` say from which sizes an op is compute bound, `table` lists ops.
"""

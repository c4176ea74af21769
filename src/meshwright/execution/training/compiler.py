"""XLA options of a train step, by device."""

from __future__ import annotations

import jax

SCOPED_VMEM_KIB = {"TPU v5 lite": 98_304, "TPU v6 lite": 98_304}
"""{device kind that JAX reports: KiB of the chip's 128 MiB of vector memory that one op may use}.

With three quarters of the chip's vector memory instead of libtpu's default, large matmuls reach 97% of the peak on v5e
instead of 82%, and 94% on v6e instead of 61%, by the compiler's own estimates ([12288, 5120] @ [5120, 22016] and
[32768, 4096] @ [4096, 14336] in bf16, libtpu 0.0.42.1). MaxText's recipes for Llama 3.1 8B on both chips set the same
value (github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py, DENSE_VMEM_LIMIT_FLAG).
"""


def compiler_options() -> dict[str, str]:
    """Return the XLA options of a train step, {name: value}, for the devices of the mesh set by `jax.set_mesh`."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kib = SCOPED_VMEM_KIB.get(device.device_kind) if device is not None else None
    return {"xla_tpu_scoped_vmem_limit_kib": str(kib)} if kib else {}

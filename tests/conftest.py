"""Every test sees 8 simulated CPU devices; no test may find a real accelerator."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
# Two test processes may each load the TPU compiler.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

"""The time in which GPUs convert narrow weights, keys and values to a matmul's dtype (`data_files.GpuDecode`)."""

from __future__ import annotations

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.system import System
from meshwright.planning.cost.rates.achieved import HBM_SHARE
from meshwright.planning.cost.rates.data_files import gpu_products
from meshwright.planning.cost.rates.triton_rows import MOST_ROWS


def weight_conversion_seconds(dtype: str, values: float, rows: float) -> float:
    """Return the seconds in which a GPU converts a weight's values in a matmul; 0 for dtypes that need no conversion.

    rows: the number of rows that each value is multiplied with. For more than `MOST_ROWS`, values are converted once
    for all of them.
    """
    decode = gpu_products()["decode"]
    each = decode["value_seconds"].get(dtype, 0.0) + min(rows, MOST_ROWS) * decode["value_row_seconds"].get(dtype, 0.0)
    return values * each


def cached_seconds(dtype: str, elements: float, system: System) -> float:
    """Return the seconds in which a GPU's attention kernel reads elements of a KV cache, or converts them if longer.

    elements: their number, including those with which heads are padded to a power of 2.
    """
    reading = dtype_bytes(dtype) / (HBM_SHARE * system.hbm_bytes_per_second)
    return elements * max(reading, gpu_products()["decode"]["cached_value_seconds"].get(dtype, 0.0))

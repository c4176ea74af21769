"""Weights that follow from the name and shape of a tensor alone, so that a model of any config.json can have some."""

from zlib import crc32

import numpy as np


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A float32 tensor: matrices as large as keeps a product's size, scales around 1, other vectors around 0."""
    noise = np.random.default_rng(crc32(name.encode())).standard_normal(shape, np.float32)
    if len(shape) > 1:
        return noise * np.float32(shape[-1] ** -0.5)
    is_scale = name.endswith(("weight", "scale", "scalar"))
    return is_scale + np.float32(0.3) * noise

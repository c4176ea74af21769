"""The colour of each shard, the same in the terminal and in SVG."""

from __future__ import annotations

import colorsys

INK = "#1a1a1a"
"""The colour of text."""

_GOLDEN = 0.618034
"""The golden ratio's fraction: steps of it around the circle of hues never come close to each other early."""


def fill(index: int) -> str:
    """The background of the shard with a number, light enough for dark text: `#b4cfee`."""
    red, green, blue = colorsys.hls_to_rgb((0.58 + index * _GOLDEN) % 1, 0.82, 0.62)
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))

"""One colour code for all pictures, pages and charts.

A device has the same colour in every picture, determined by its mesh coordinates: the hue by the coordinate along the
first axis, the lightness by the coordinates along the others. Fixed colours by name are for phases of a step, idle time
in a step (reds and greys), memory of a device (teal for terms that stay from step to step, sand for temporary ones),
and accounts of a run's time. All are light enough for dark text.
"""

from __future__ import annotations

import colorsys
import zlib
from collections.abc import Mapping

INK = "#1a1a1a"
"""The colour of text."""

RULE = "#777777"
"""The colour of rules, links and edges, visible on white and on black."""

WRONG = "#c0392b"
"""The colour of what costs time or does not fit in memory."""

NAMED = {
    "forward": "#8fb8de",
    "recompute": "#d9c46c",
    "backward": "#9ccb9a",
    "update": "#c3a6d8",
    "exposed communication": "#e07a6c",
    "exposed copies": "#ec9f94",
    "exposed calls": "#f2bdb5",
    "host copies": "#f7d6d1",
    "MFU": "#c4cad0",
    "pipeline bubble": "#d5d5d5",
    "contention": "#b9b9b9",
    "stragglers": "#9f9f9f",
    "parameters": "#4fa3a0",
    "master weights": "#6fb8b4",
    "optimizer": "#93cdc9",
    "batch": "#bfe0dd",
    "arguments": "#7fc1bd",
    "cache": "#5fb0c0",
    "gradients": "#b98a5e",
    "activations": "#d9ae7f",
    "logits": "#e8c9a3",
    "logits gradient": "#c9a27a",
    "working": "#efdcc3",
    "gathered": "#a9927a",
    "temporaries": "#d8bd8a",
    "steps": "#86bf94",
    "input": "#ee8a74",
    "compiling": "#cdb4e2",
    "saving": "#e3d07e",
    "evaluation": "#a3c4ea",
    "starting": "#ccd2d8",
    "lost steps": "#f3a89c",
    "down": "#a8a8a8",
    "other": "#dedede",
    "ops": "#8cc79a",
    "collectives": "#e8b07a",
    "idle": "#bcc2c8",
}


def device_fill(coordinates: Mapping[str, int], degrees: Mapping[str, int]) -> str:
    """Return the colour of a device, or of a shard that several devices hold, such as `#b4cfee`.

    Args:
        coordinates: the device's mesh coordinates by axis; for a shard, those that all its devices share. If the first
            axis larger than 1 is missing, the colour is grey; of any other missing axis, the middle coordinate is used.
        degrees: the degree of each mesh axis, outermost first.
    """
    first, *others = [axis for axis, degree in degrees.items() if degree > 1] or [""]
    hue = _FIRST_HUE + coordinates.get(first, 0) / degrees.get(first, 1)
    saturation = 0.62 if first in coordinates else 0.0
    position, last = 0.0, 0
    for axis in others:
        position = position * degrees[axis] + coordinates.get(axis, (degrees[axis] - 1) / 2)
        last = last * degrees[axis] + degrees[axis] - 1
    share = position / last if last else 0.5
    return _hex(*colorsys.hls_to_rgb(hue % 1, _LIGHTEST - share * (_LIGHTEST - _DARKEST), saturation))


_FIRST_HUE = 0.58  # blue
_LIGHTEST, _DARKEST = 0.91, 0.73


def named(name: str) -> str:
    """Return the colour of a name in `NAMED`; for any other name, a colour that depends only on the name."""
    return NAMED.get(name) or _hex(*colorsys.hls_to_rgb(zlib.crc32(name.encode()) % 360 / 360, 0.72, 0.3))


def lighter(colour: str, share: float) -> str:
    """Return a colour mixed with white. share: the fraction of white, 0 to 1."""
    parts = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return _hex(*(part + (1 - part) * share for part in parts))


def _hex(*parts: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)

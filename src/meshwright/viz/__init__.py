"""Pictures of shardings, collectives and pipelines in a terminal, a notebook or SVG.

Charts; HTML pages in `pages`.
"""

from meshwright.viz.arrays import every_sharding
from meshwright.viz.charts import Bar, Limits, write_charts
from meshwright.viz.collectives import DIGITS, run_collective
from meshwright.viz.holdings import holdings_of
from meshwright.viz.pipeline import pipeline_data
from meshwright.viz.rings import run_ring
from meshwright.viz.showing import (
    Picture,
    read_text,
    show,
    show_collective,
    show_data,
    show_pipeline,
    show_ring,
)
from meshwright.viz.torus import device_coordinates

__all__ = [
    "DIGITS",
    "Bar",
    "Limits",
    "Picture",
    "device_coordinates",
    "every_sharding",
    "holdings_of",
    "pipeline_data",
    "read_text",
    "run_collective",
    "run_ring",
    "show",
    "show_collective",
    "show_data",
    "show_pipeline",
    "show_ring",
    "write_charts",
]

"""Pictures of shardings, collectives and pipelines in a terminal, a notebook or SVG.

Charts; HTML pages in `verify_page` and `inspection_page`.
"""

from meshwright.viz.charts import Bar, Limits, write_charts
from meshwright.viz.collectives import DIGITS, run_collective
from meshwright.viz.gallery import every_sharding
from meshwright.viz.holdings import holdings_of
from meshwright.viz.picture import Picture
from meshwright.viz.positions import device_coordinates
from meshwright.viz.rings import run_ring
from meshwright.viz.showing import read_text, show, show_collective, show_pipeline, show_ring
from meshwright.viz.table import tree_rows

__all__ = [
    "DIGITS",
    "Bar",
    "Limits",
    "Picture",
    "device_coordinates",
    "every_sharding",
    "holdings_of",
    "read_text",
    "run_collective",
    "run_ring",
    "show",
    "show_collective",
    "show_pipeline",
    "show_ring",
    "tree_rows",
    "write_charts",
]

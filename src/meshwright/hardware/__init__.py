"""Chips and fabrics as data, and the links that each mesh axis runs over."""

from meshwright.hardware.chip import MEMORY_HEADROOM, Chip
from meshwright.hardware.dtypes import canonical_dtype, dtype_bytes
from meshwright.hardware.fabric import IDLE, Crossing, MeshPlacement, Placement, Ring, lay_mesh
from meshwright.hardware.load import chip_names, chips, load_chip, load_hardware
from meshwright.hardware.slices import across_slices, within_slice
from meshwright.hardware.system import System, cloud_note, make_system, parse_system

__all__ = [
    "IDLE",
    "MEMORY_HEADROOM",
    "Chip",
    "Crossing",
    "MeshPlacement",
    "Placement",
    "Ring",
    "System",
    "across_slices",
    "canonical_dtype",
    "chip_names",
    "chips",
    "cloud_note",
    "dtype_bytes",
    "lay_mesh",
    "load_chip",
    "load_hardware",
    "make_system",
    "parse_system",
    "within_slice",
]

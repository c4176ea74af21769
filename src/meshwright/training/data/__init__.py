"""The data of a run: sources that are open, their rows, and the batch of any step."""

from meshwright.training.data.batches import Batches, HeldOut
from meshwright.training.data.config import DataConfig, RowKind
from meshwright.training.data.run_data import RunData, check_templates, default_rows, open_data
from meshwright.training.data.stores import tokenize_sources
from meshwright.training.data.texts import read_texts

BYTES = 256
"""The vocabulary of text read as bytes."""

__all__ = [
    "BYTES",
    "Batches",
    "DataConfig",
    "HeldOut",
    "RowKind",
    "RunData",
    "check_templates",
    "default_rows",
    "open_data",
    "read_texts",
    "tokenize_sources",
]

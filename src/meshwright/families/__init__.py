"""Model families: one file each, with its config.json, weight names and presets.

A new family is a file and a line. Its layers follow from the features of its models (`step.blocks`), or from a `Family`
of its own.
"""

from meshwright.families.load import load_model, trained_seq_len, usual_seq_len
from meshwright.families.registry import (
    FAMILIES,
    PRESETS,
    PUBLISHED,
    hugging_face_config,
    model_from_data,
    model_from_hugging_face,
    serving_from_data,
    workload_from_data,
)

__all__ = [
    "FAMILIES",
    "PRESETS",
    "PUBLISHED",
    "hugging_face_config",
    "load_model",
    "model_from_data",
    "model_from_hugging_face",
    "serving_from_data",
    "trained_seq_len",
    "usual_seq_len",
    "workload_from_data",
]

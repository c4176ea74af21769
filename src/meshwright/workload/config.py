"""The models of `step.model`, under the name that the rest of the house has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.families import FAMILIES
from meshwright.step.layer import LinearRopeScaling, RopeScaling
from meshwright.step.model import Experts, LatentAttention, ModelConfig
from meshwright.step.model import model_from_data as _model_from_data

__all__ = ["Experts", "LatentAttention", "LinearRopeScaling", "ModelConfig", "RopeScaling", "model_from_data"]


def model_from_data(data: Mapping[str, Any]) -> ModelConfig:
    """The model that `dataclasses.asdict` took apart."""
    return _model_from_data(data, FAMILIES)

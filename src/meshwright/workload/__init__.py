"""What is computed: models, their parameters as declarations, and the rules that shard them."""

from meshwright.workload.config import Experts, LatentAttention, ModelConfig, RopeScaling
from meshwright.workload.declaration import Parameter
from meshwright.workload.hugging_face import model_from_hugging_face
from meshwright.workload.legality import check_mesh, check_runnable
from meshwright.workload.parameters import (
    Tree,
    active_share,
    leaves,
    map_leaves,
    num_active_parameters,
    num_parameters,
    parameters,
)
from meshwright.workload.presets import PRESETS, load_model
from meshwright.workload.rules import IN_USE, RULES, Rules, Spec, local_parameter_shape, spec, token_axes, used_shape
from meshwright.workload.strategy import DEFAULT, Strategy
from meshwright.workload.workload import REMATS, Dtype, Remat, Workload, num_query_chunks, workload_from_data

__all__ = [
    "DEFAULT",
    "IN_USE",
    "PRESETS",
    "REMATS",
    "RULES",
    "Dtype",
    "Experts",
    "LatentAttention",
    "ModelConfig",
    "Parameter",
    "Remat",
    "RopeScaling",
    "Rules",
    "Spec",
    "Strategy",
    "Tree",
    "Workload",
    "active_share",
    "check_mesh",
    "check_runnable",
    "leaves",
    "load_model",
    "local_parameter_shape",
    "map_leaves",
    "model_from_hugging_face",
    "num_active_parameters",
    "num_parameters",
    "num_query_chunks",
    "parameters",
    "spec",
    "token_axes",
    "used_shape",
    "workload_from_data",
]

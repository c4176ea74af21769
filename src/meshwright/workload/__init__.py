"""What is computed: models, their parameters as declarations, and the rules that shard them."""

from meshwright.workload.config import PRESETS, ModelConfig, RopeScaling, load_model, model_from_hugging_face
from meshwright.workload.legality import check_mesh
from meshwright.workload.parameters import Parameter, Tree, leaves, map_leaves, num_parameters, parameters
from meshwright.workload.rules import IN_USE, RULES, Rules, Spec, local_parameter_shape, spec, token_axes
from meshwright.workload.workload import REMATS, Dtype, Remat, Workload, num_query_chunks, workload_from_data

__all__ = [
    "IN_USE",
    "PRESETS",
    "REMATS",
    "RULES",
    "Dtype",
    "ModelConfig",
    "Parameter",
    "Remat",
    "RopeScaling",
    "Rules",
    "Spec",
    "Tree",
    "Workload",
    "check_mesh",
    "leaves",
    "load_model",
    "local_parameter_shape",
    "map_leaves",
    "model_from_hugging_face",
    "num_parameters",
    "num_query_chunks",
    "parameters",
    "spec",
    "token_axes",
    "workload_from_data",
]

"""Whether a workload can be split over a mesh, checked before anything is priced, compiled or run."""

from __future__ import annotations

from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape, check_batch, check_divides
from meshwright.workload.parameters import leaves, parameters
from meshwright.workload.rules import RULES, Rules, local_parameter_shape
from meshwright.workload.workload import Workload


def check_mesh(workload: Workload, mesh: MeshShape, rules: Rules = RULES) -> None:
    """Raise where the mesh cannot split some dim of the workload, or an axis of it would split nothing."""
    used = {axis for axes in rules.values() for axis in axes}
    for axis, degree in mesh.degrees.items():
        if degree > 1 and axis not in used:
            raise MeshwrightError(
                f"mesh {mesh} has {axis}={degree}, which would split nothing of {workload.model.name};"
                f" use {axis}=1 (the axes that split something are {', '.join(sorted(used))})"
            )
    check_batch(mesh, batch=workload.batch, seq_len=workload.seq_len)
    check_divides("sequence length", workload.seq_len, mesh, rules["residual_sequence"])
    for path, parameter in leaves(parameters(workload.model)):
        local_parameter_shape(parameter, mesh=mesh, rules=rules, what=path)

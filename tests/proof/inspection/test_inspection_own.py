"""Programs without a mistake have no finding: the train steps that meshwright plans, on every kind of mesh."""

from dataclasses import asdict

import pytest

from meshwright.description.families.load import load_model
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.workload import Workload
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.training.step import lower_train_step
from meshwright.mesh import MeshShape
from meshwright.proof.compiler.program import LoweredProgram, MeshMethod
from meshwright.proof.compiler.worker import compile_lowered
from meshwright.proof.inspection.inspection import read_inspection

WORKLOAD = Workload(model=load_model("tiny"), batch=16, seq_len=128, compute_dtype="f32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees", [{"dp": 8}, {"fsdp": 8}, {"fsdp": 2, "tp": 4}, {"dp": 2, "fsdp": 2, "tp": 2}], ids=str
)
def test_a_train_step_of_ours_has_no_finding(degrees):
    mesh = MeshShape(**degrees)
    lowered = lower_train_step(build_mesh(mesh), workload=asdict(WORKLOAD))
    program = compile_lowered(LoweredProgram(lowered), options={}, compiler="jaxlib", mesh_method=MeshMethod.MAKE_MESH)
    system = parse_system("cpu:8")
    found = read_inspection("step", program.hlo, mesh.layout, hardware="cpu:8", system=system, program=program)
    assert found.collectives
    assert found.findings == ()

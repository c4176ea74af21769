"""Inputs of layers in the host's memory, by the compilers of hardware that has one beside its own."""

from dataclasses import asdict, replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.proof.compiler.compile import compile_in_child
from meshwright.proof.compiler.program import CompileRequest
from meshwright.proof.verification.plans import TRAIN_STEP

TINY = Workload(model=replace(PRESETS["tiny"], num_layers=4), batch=4, seq_len=256, remat="offload")

HOSTS_MEMORY = "S(5)"
"""How a layout in HLO says that an array lies there."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hardware", "compiler"),
    [("v5e:2x2", "libtpu"), pytest.param("h100:4", "jax_cuda13_plugin", marks=pytest.mark.matrix)],
)
def test_the_inputs_of_all_layers_wait_in_the_hosts_memory(hardware, compiler):
    pytest.importorskip(compiler)
    request = CompileRequest(
        function=TRAIN_STEP,
        hardware=hardware,
        mesh=MeshShape(fsdp=4).layout,
        arguments={"workload": asdict(TINY)},
        effort="fast",
    )
    stacked = f"bf16[4,1,{TINY.seq_len},{TINY.model.embed}]"
    lines = compile_in_child(request).hlo.splitlines()
    assert any(stacked in line and HOSTS_MEMORY in line for line in lines)

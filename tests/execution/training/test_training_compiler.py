"""What a train step's compiler is told, by the devices of the mesh in context."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.training.compiler import compiler_options
from meshwright.mesh import MeshShape

TOLD = {
    "TPU v6 lite": {"xla_tpu_scoped_vmem_limit_kib": "98304"},
    "TPU v5 lite": {"xla_tpu_scoped_vmem_limit_kib": "98304"},
    "TPU v5": {},
    "NVIDIA H100 80GB HBM3": {},
}


@pytest.mark.parametrize(("kind", "told"), TOLD.items())
def test_the_compiler_is_told_what_its_chip_is_faster_with(kind, told):
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="tpu" if "TPU" in kind else "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("fsdp",), abstract_device=device)):
        assert compiler_options() == told


def test_simulated_devices_take_the_defaults():
    with jax.set_mesh(build_mesh(MeshShape(fsdp=8))):
        assert compiler_options() == {}


def test_without_a_mesh_the_defaults_are_taken():
    assert compiler_options() == {}

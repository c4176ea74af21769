import pytest

from meshwright.description.hardware.slices import across_slices
from meshwright.description.hardware.system import parse_system
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.proof.compiler.targets import check_compiler, compiler_name, compiler_options, environment, topology

TOPOLOGIES = [
    ("v5e:4x4", {"platform": "tpu", "topology_name": "v5e:4x4"}),
    ("v5p:4x4x4", {"platform": "tpu", "topology_name": "v5p:4x4x4"}),
    ("tpu7x:2x2x2", {"platform": "tpu", "topology_name": "tpu7x:2x2x2"}),
    ("v4:2x2x2", {"platform": "tpu", "topology_name": "v4:2x2x2", "chip_config_name": "megacore"}),
    ("v5e:1x1", {"platform": "tpu", "topology_name": "v5e:1x1", "chips_per_host_bounds": (1, 1, 1)}),
    ("v5p:1x2x2", {"platform": "tpu", "topology_name": "v5p:1x2x2", "chips_per_host_bounds": (1, 2, 2)}),
    ("2*v6e:4x4", {"platform": "tpu", "topology_name": "v6e:4x4", "num_slices": 2}),
]


@pytest.mark.parametrize(("text", "arguments"), TOPOLOGIES)
def test_a_tpu_slice_is_named_as_libtpu_names_it(text, arguments):
    assert topology(parse_system(text)) == arguments


@pytest.mark.parametrize(("text", "nodes"), [("h100:8", "1x1x8"), ("h100:4", "1x1x4"), ("h200:64", "1x8x8")])
def test_gpus_are_slices_of_hosts_of_devices_with_a_description(text, nodes):
    arguments = topology(parse_system(text))
    assert arguments["topology"] == nodes
    assert f"NVIDIA {text[:4].upper()}" in arguments["target_config"]
    assert "cuda_compute_capability { major: 9 minor: 0 }" in arguments["target_config"]


def test_a_compilers_environment_does_not_depend_on_the_one_it_is_asked_from():
    inherited = {"PATH": "/bin", "XLA_FLAGS": "--xla_x", "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "", "TPU_NAME": "mine"}
    simulated = environment(parse_system("cpu:16"), inherited)
    assert simulated == {"PATH": "/bin", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "16"}
    described = environment(parse_system("v5e:4x4"), inherited)
    assert described["JAX_PLATFORMS"] == "cpu"
    assert described["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert not {"XLA_FLAGS", "TPU_NAME", "JAX_ENABLE_X64"} & set(described)


def test_only_the_tpu_compiler_has_a_fast_effort():
    cpu, tpu, gpu = (parse_system(text) for text in ("cpu:8", "v5e:4x4", "h100:8"))
    assert compiler_options(tpu, "fast") == {"optimization_level": 9}
    assert compiler_options(tpu, "default") == compiler_options(gpu, "fast") == {}
    assert compiler_options(cpu, "fast") == compiler_options(cpu, "default")


@pytest.mark.parametrize(("text", "extra"), [("v5e:4x4", "tpu-compiler"), ("h100:8", "gpu-compiler")])
def test_a_compiler_that_is_not_installed_is_named_with_what_installs_it(monkeypatch, text, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MeshwrightError, match=rf"pip install meshwright\[{extra}\]"):
        check_compiler(parse_system(text))
    check_compiler(parse_system("cpu:8"))


def test_a_gpu_that_xla_has_no_description_of_is_an_error():
    pytest.importorskip("jax_cuda13_plugin")
    with pytest.raises(MeshwrightError, match="no description of gb200-nvl72"):
        check_compiler(parse_system("gb200:8"))


def test_the_compiler_is_named_with_its_version():
    assert compiler_name(parse_system("cpu:8")).startswith("jaxlib 0.")


@pytest.mark.parametrize(
    ("text", "mesh", "across"),
    [
        ("v5e:4x4", MeshShape(fsdp=16), (1, 1, 1, 1, 1, 1)),
        ("2*v5e:4x4", MeshShape(dp=2, fsdp=16), (1, 2, 1, 1, 1, 1)),
        ("4*v5e:4x4", MeshShape(dp=2, fsdp=32), (1, 2, 2, 1, 1, 1)),
        ("4*v5e:4x4", MeshShape(pp=4, tp=16), (4, 1, 1, 1, 1, 1)),
    ],
)
def test_the_outermost_axes_cross_the_slices(text, mesh, across):
    assert tuple(across_slices(mesh.layout, parse_system(text).num_slices).values()) == across


def test_axes_that_slices_do_not_divide_are_an_error():
    with pytest.raises(MeshwrightError, match="do not divide"):
        across_slices(MeshShape(dp=2, fsdp=8).layout, 3)

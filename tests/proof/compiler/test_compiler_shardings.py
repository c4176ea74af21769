"""Where values were asked to lie and where the partitioner laid them, and what it warned of."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import P

from meshwright.description.hlo.specs import Spec, parse_hlo_sharding, parse_shardy_sharding
from meshwright.mesh import MeshShape
from meshwright.proof.compiler.compile import compile_in_child
from meshwright.proof.compiler.full_rematerializations import read_full_rematerializations
from meshwright.proof.compiler.program import CompiledProgram, CompileRequest, MeshMethod
from meshwright.proof.compiler.shardings import read_shardings

XY = {"x": 2, "y": 4}
XYZ = {"x": 2, "y": 2, "z": 2}

BY_DEVICES = [
    ("{replicated}", 2, XY, "P(None, None)"),
    ("{devices=[2,4]<=[8]}", 2, XY, "P('x', 'y')"),
    ("{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}", 2, XY, "P(None, 'y')"),
    ("{devices=[8,1]<=[8]}", 2, XY, "P(('x', 'y'), None)"),
    ("{devices=[8,1]<=[2,4]T(1,0)}", 2, XY, "P(('y', 'x'), None)"),
    ("{devices=[2,1,1,4]<=[8] last_tile_dims={unreduced}}", 3, XY, "P('x', None, None, unreduced={'y'})"),
    ("{devices=[2,1,2,2]<=[8] last_tile_dims={unreduced, replicated}}", 2, XYZ, "P('x', None, unreduced={'y'})"),
    ("{devices=[2,4]0,1,2,3,4,5,6,7}", 2, XY, "P('x', 'y')"),
    ("{devices=[4,2]<=[2,2,2]T(2,0,1)}", 2, XYZ, "P(('z', 'x'), 'y')"),
    # By the axes of a mesh that need not be ours (jaxlib 0.11).
    ("{mesh[], replicated}", 2, XY, "P(None, None)"),
    ("{mesh['x'=2,'y'=4], []}", 0, XY, "P()"),
    ("{mesh['x'=2,'y'=4], [{'y', 'x'}, {?}]}", 2, XY, "P(('y', 'x'), ?)"),
    ("{mesh['x'=2,'y'=4], [{'x', ?}, {}], unreduced={'y'}}", 2, XY, "P(?, None, unreduced={'y'})"),
    ("{mesh['a'=8], [{'a'}]}", 1, XY, "P(('x', 'y'))"),
    ("{mesh['a'=8], [{'a':(2)4}, {'a':(1)2}]}", 2, XY, "P('y', 'x')"),
    ("{mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)), [{'b'}, {'a'}]}", 2, XY, "P('x', 'y')"),
]


@pytest.mark.parametrize(("text", "rank", "mesh", "spec"), BY_DEVICES)
def test_a_sharding_by_devices_is_read_in_mesh_axes(text, rank, mesh, spec):
    assert str(parse_hlo_sharding(text, rank, mesh)) == spec


NO_AXES = [
    "{manual}",
    "{maximal device=0}",
    "",
    "{devices=[4,2]<=[8]}",  # half an axis
    "{devices=[2,2]<=[4]}",  # other devices
    "{devices=[2,4]0,1,2,3,4,5,7,7}",
    "{devices=[2,2,2]<=[8] last_tile_dims={manual}}",
    "{devices=[2,4]<=[2,4]T(1,1)}",
    "{devices=[2,4]<=[999999999,999999999]}",
    "{mesh['x'=2,'y'=4], manual}",
    "{mesh['x'=2,'y'=4], [{}, {'y'}], manual={'x'}}",
    "{mesh['a'=8], [{'a':(1)4}, {}]}",  # half an axis
    "{mesh['x'=4], [{'x'}, {}]}",  # other devices
    "{mesh['x'=2,'y'=4], [{'z'}, {}]}",
    "{mesh['x'=2,'y'=4], [{'x'}]}",
    "{mesh['x'=2,'y'=4], [{'x':(0)2}, {}]}",
    "{mesh['x'=999999999,'y'=999999999], [{'x'}, {}]}",
]


@pytest.mark.parametrize("text", NO_AXES)
def test_a_sharding_that_is_no_product_of_mesh_axes_is_none(text):
    assert parse_hlo_sharding(text, 2, XY) is None


BY_AXES = [
    ('#sdy.sharding<@mesh, [{"x"}, {?}]>', "P('x', ?)"),
    ('#sdy.sharding_per_value<[<@mesh, [{\\"x\\", \\"y\\"}, {}], unreduced={\\"z\\"}>]>', "P(('x', 'y'), None)"),
    ('#sdy.sharding<@mesh, [{}], unreduced={"y"}>', "P(None, unreduced={'y'})"),
    ("#sdy.sharding<@mesh, []>", "P()"),
]


@pytest.mark.parametrize(("text", "spec"), BY_AXES)
def test_a_sharding_by_axes_is_read_without_axes_of_one_device(text, spec):
    assert str(parse_shardy_sharding(text, XY | {"z": 1})) == spec


def test_a_sharding_over_a_part_of_an_axis_is_none():
    assert parse_shardy_sharding('#sdy.sharding<@mesh, [{"x":(1)2}]>', XY) is None


def test_an_open_dim_allows_every_split_of_it():
    assert Spec(dims=(None, ("y",))).allows(Spec(dims=(("x",), ("y",))))
    assert not Spec(dims=(("x",), ("y",))).allows(Spec(dims=((), ("y",))))
    assert Spec(dims=((),)).allows(Spec(dims=((),), unreduced=("x",)))


def constrained(mesh):
    """Inputs annotated or not, a constraint that is kept, one that is open, a product that nothing is said of."""
    auto = mesh.update(axis_types=(jax.sharding.AxisType.Auto,) * len(mesh.axis_names))

    def function(a, w):
        with jax.named_scope("mlp"):
            h = jnp.tanh(jax.lax.with_sharding_constraint(a, jax.NamedSharding(auto, P("fsdp", "tp"))))
            spec = P(P.UNCONSTRAINED, "tp")
            return {"product": h @ w, "kept": jax.lax.with_sharding_constraint(h * 2, jax.NamedSharding(auto, spec))}

    a = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=jax.NamedSharding(auto, P("fsdp")))
    return jax.jit(function).lower(a, jax.ShapeDtypeStruct((32, 16), jnp.float32))


def reshuffled(mesh):
    """A value that goes from one sharding to another, between which the partitioner knows no way."""
    auto = mesh.update(axis_types=(jax.sharding.AxisType.Auto,) * len(mesh.axis_names))

    def function(x):
        with jax.named_scope("shuffle"):
            y = jax.lax.with_sharding_constraint(jnp.sin(x), jax.NamedSharding(auto, P(None, "fsdp", "dp")))
            return jax.lax.with_sharding_constraint(
                jnp.cos(y), jax.NamedSharding(auto, P(None, None, ("dp", "fsdp", "tp")))
            )

    return jax.jit(function).lower(jax.ShapeDtypeStruct((16, 16, 16), jnp.float32))


def compiled(function: str, mesh: MeshShape, hardware: str = "cpu:8", **arguments) -> CompiledProgram:
    request = CompileRequest(function=function, hardware=hardware, mesh=mesh.layout, arguments=arguments, effort="fast")
    return compile_in_child(request)


def test_every_value_has_what_it_was_asked_and_what_it_got(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mesh = MeshShape(fsdp=2, tp=4)
    found = read_shardings(compiled("test_compiler_shardings:constrained", mesh), mesh.layout)
    said = {(one.role, one.name): (str(one.requested), str(one.actual)) for one in found}
    assert said["input", "a"] == ("P('fsdp', None)", "P('fsdp', None)")
    assert said["input", "w"][0] == "None"
    assert said["intermediate", "mlp/sharding_constraint"] == ("P(?, 'tp')", "P('fsdp', 'tp')")
    assert said["intermediate", "mlp/dot_general"][0] == "None"
    assert [one.name for one in found if one.role == "output"] == ["['kept']", "['product']"]
    assert all(one.is_satisfied for one in found)
    assert {one.source.rpartition("/")[2].split(":")[0] for one in found if one.source} == {
        "test_compiler_shardings.py"
    }


ONE_PLACE = """\
HloModule m

ENTRY %main (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8] parameter(0), sharding={{devices=[2,1]<=[2]}}
{}
}}
"""


@pytest.mark.parametrize(("got", "is_as_wanted"), [("{replicated}", True), ("{devices=[1,2]<=[2]}", False)])
def test_of_constraints_in_one_place_those_are_dropped_that_change_nothing(got, is_as_wanted):
    """A shard that is laid as it lies and then gathered, both by one line: one copy is left."""
    said = 'metadata={op_name="jit(step)/reshard"}'
    ask = f'custom_call_target="Sharding", {said}, sharding='
    lines = (
        f"%a = f32[8,8] custom-call(%p), {ask}{{devices=[2,1]<=[2]}}",
        f"ROOT %b = f32[8,8] custom-call(%a), {ask}{{replicated}}",
    )
    program = CompiledProgram(
        hlo="",
        memory_bytes={},
        messages="",
        compile_seconds=0.0,
        compiler="",
        mesh_method=MeshMethod.MAKE_MESH,
        annotated=ONE_PLACE.format("\n".join(lines)),
        propagated=ONE_PLACE.format(f"ROOT %b = f32[8,8] copy(%p), sharding={got}, {said}"),
    )
    found = [one for one in read_shardings(program, {"fsdp": 2}) if one.role == "intermediate"]
    assert len(found) == 2
    assert all(one.is_satisfied for one in found) == is_as_wanted


def test_a_train_step_of_explicit_types_lies_as_it_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mesh = MeshShape(fsdp=2, tp=4)
    program = compiled("toy_programs:train_step", mesh)
    found = read_shardings(program, mesh.layout)
    inputs = {one.name: str(one.actual) for one in found if one.role == "input"}
    assert inputs == {
        "weights[0]": "P(None, 'fsdp', 'tp')",
        "weights[1]": "P(None, 'tp', 'fsdp')",
        "x": "P('fsdp', 'tp', None)",
    }
    assert {one.name for one in found if one.role == "output"} == {"[0]", "[1]"}
    reshards = [one for one in found if one.name == "layers/mlp/reshard" and str(one.array) == "f32[32,64]"]
    # Gathered over fsdp for the product, and the gradient scattered back.
    assert {str(one.requested) for one in reshards} == {"P(None, 'tp')", "P('fsdp', 'tp')"}
    assert [one for one in found if not one.is_satisfied] == []
    assert program.partitioned.startswith("HloModule jit_step")
    assert "all-gather" in program.partitioned
    assert read_full_rematerializations(program, mesh.layout) == ()


def test_a_value_that_is_made_whole_to_be_split_anew_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mesh = MeshShape(dp=2, fsdp=2, tp=2)
    (found,) = read_full_rematerializations(compiled("test_compiler_shardings:reshuffled", mesh), mesh.layout)
    assert (found.op, str(found.array)) == ("shuffle/sharding_constraint", "f32[16,8,8]")
    assert found.source.rpartition("/")[2].startswith("test_compiler_shardings.py:")
    assert str(found.before) == "P(None, 'fsdp', 'dp')"
    assert str(found.after) == "P(None, None, ('dp', 'fsdp', 'tp'))"


def test_a_value_of_a_partitioning_that_was_only_estimated_is_not_named():
    """XLA warns while it estimates ways to partition a scatter, of which it takes another (jaxlib 0.12.0.1)."""
    warning = (
        "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {devices=[2,4]<=[8]} to"
        " {devices=[4,2]<=[8]} efficiently for HLO operation %NAME = f32[4,8]{1,0} parameter(2)"
    )
    program = CompiledProgram(
        hlo="", memory_bytes={}, messages=warning, compile_seconds=0.0, compiler="", mesh_method=MeshMethod.OWN
    )
    (found,) = read_full_rematerializations(replace(program, messages=warning.replace("NAME", "x.2")), XY)
    assert found.op == "x.2"
    estimated = replace(program, messages=warning.replace("NAME", "fake_parameter.2"))
    assert read_full_rematerializations(estimated, XY) == ()


def test_a_program_for_one_device_was_not_partitioned(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = compiled("toy_programs:matmuls", MeshShape(), hardware="cpu:1")
    assert (program.annotated, program.propagated, program.partitioned) == ("", "", "")
    assert read_shardings(program, MeshShape().layout) == ()


@pytest.mark.slow
@pytest.mark.parametrize(("hardware", "package"), [("v5e:4x2", "libtpu"), ("h100:8", "jax_cuda13_plugin")])
def test_every_backend_tells_the_same_shardings(hardware, package):
    pytest.importorskip(package)
    mesh = MeshShape(fsdp=2, tp=4)
    here, there = (
        read_shardings(compiled("toy_programs:train_step", mesh, on), mesh.layout) for on in ("cpu:8", hardware)
    )
    assert {(one.role, one.name, one.array, one.actual) for one in here if one.role != "intermediate"} == {
        (one.role, one.name, one.array, one.actual) for one in there if one.role != "intermediate"
    }

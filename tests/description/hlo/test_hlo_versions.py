"""What a program says of the versions that compiled it, and the shardings that newer ones do not print."""

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import AxisType

import meshwright
from meshwright.description.hlo import versions
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.text import hlo_text, with_argument_shardings
from meshwright.mesh import MeshShape
from meshwright.proof.compiler.program import CompiledProgram, MeshMethod
from meshwright.proof.compiler.records import read_program
from meshwright.proof.inspection.dumps import inspect_text


def install(monkeypatch, **packages):
    monkeypatch.setattr(versions, "version", lambda package: packages[package.replace("-", "_")])


@pytest.mark.parametrize("row", versions.TESTED, ids=lambda row: row["jax"])
def test_a_tested_jax_with_each_of_its_compilers_has_no_note(monkeypatch, row):
    install(monkeypatch, jax=row["jax"], jaxlib=row["jaxlib"])
    assert versions.untested_notes() == ()
    assert [versions.untested_notes(f"{package} {number}") for package, number in row.items() if package != "jax"] == [
        ()
    ] * (len(row) - 1)


def test_a_jax_that_no_test_has_seen_has_one_note_that_names_the_tested(monkeypatch):
    install(monkeypatch, jax="0.13.0", jaxlib="0.13.0")
    (note,) = versions.untested_notes()
    assert note.startswith("meshwright is not tested with JAX 0.13.0, but with JAX 0.10.2, JAX 0.11.2, JAX 0.12.0.1: ")


def test_a_compiler_of_another_jax_is_not_tested_with_this_one(monkeypatch):
    install(monkeypatch, jax="0.12.0.1", jaxlib="0.12.0.1")
    (note,) = versions.untested_notes("libtpu 0.0.42.1")
    assert "not tested with JAX 0.12.0.1 with libtpu 0.0.42.1" in note
    assert "but with JAX 0.10.2 with libtpu 0.0.42.1, JAX 0.12.0.1 with libtpu 0.0.50.1: " in note


def double(x):
    return 2 * x


def sharded():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    return jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=jax.NamedSharding(mesh, P("a", "b")))


def test_an_inspection_has_the_note_and_so_has_the_text_that_a_user_reads(monkeypatch):
    assert not [note for note in meshwright.inspect(double, sharded()).record.notes if "not tested" in note]
    install(monkeypatch, jax="0.13.0", jaxlib="0.13.0")
    found = meshwright.inspect(double, sharded())
    assert sum("not tested with JAX 0.13.0" in note for note in found.record.notes) == 1
    assert "note: meshwright is not tested with JAX 0.13.0" in str(found)


def test_the_arguments_of_a_compiled_program_have_their_shardings():
    """jaxlib 0.12 prints none, and then no check of replicated arrays finds anything."""
    module = parse_hlo(hlo_text(jax.jit(double).lower(sharded()).compile()))
    (parameter,) = module.computations[module.entry].parameters.values()
    assert parameter.attributes["sharding"] == "{devices=[2,4]<=[8]}"


PRINTED = """HloModule jit_f, num_partitions=8

%inner (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}

ENTRY %main (x: f32[4], y: f32[8]) -> f32[4] {
  %y = f32[8]{0} parameter(1), metadata={op_name="y"}
  %x = f32[4]{0} parameter(0)
  ROOT %call = f32[4]{0} call(%x), to_apply=%inner
}
"""


def test_shardings_are_written_by_number_and_at_the_arguments_alone():
    shardings = ("{devices=[8]<=[8]}", "{replicated}")
    written = with_argument_shardings(PRINTED, shardings)
    assert written.splitlines() == [
        f"  %x = f32[4]{{0}} parameter(0), sharding={shardings[0]}" if line.startswith("  %x") else
        line.replace("parameter(1)", "parameter(1), sharding={replicated}")
        for line in PRINTED.splitlines()
    ]  # fmt: skip
    assert with_argument_shardings(written, ("{replicated}",) * 2) == written


@pytest.mark.parametrize("shardings", [(), ("{replicated}",), ("{replicated}",) * 3])
def test_a_text_stays_as_it_is_without_a_sharding_for_each_argument(shardings):
    assert with_argument_shardings(PRINTED, shardings) == PRINTED


def test_a_program_of_one_device_stays_as_it_is():
    text = PRINTED.replace(", num_partitions=8", "")
    assert with_argument_shardings(text, ("{replicated}",) * 2) == text


def test_an_inspection_of_a_text_without_shardings_says_what_it_cannot_find():
    mesh = {"dp": 8}
    assert any(
        "does not say how the arguments are sharded" in note for note in inspect_text(PRINTED, mesh=mesh).record.notes
    )
    written = with_argument_shardings(PRINTED, ("{replicated}",) * 2)
    assert not any("are sharded" in note for note in inspect_text(written, mesh=mesh).record.notes)


def test_the_record_of_a_program_compiled_in_a_child_process_has_its_note():
    note = "meshwright is not tested with JAX 0.13.0"
    program = CompiledProgram(
        hlo=PRINTED,
        memory_bytes={"peak": 0},
        messages="",
        compile_seconds=0.0,
        compiler="jaxlib 0.13.0",
        mesh_method=MeshMethod.MAKE_MESH,
        notes=(note,),
    )
    assert read_program(program, MeshShape(fsdp=8), "cpu:8").notes == (note,)

"""What `serve` and `generate` note of the mesh that they take where none is given."""

from types import SimpleNamespace

import pytest

from meshwright.cli.loading import note_advised_mesh
from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.mesh import MeshShape
from meshwright.planning.serving.search import best_serving_plan


def found(mesh, run=None, model="llama3-8b", **options):
    """A model as `find_model` finds it, as far as the note reads it."""
    kept = {"system": parse_system("h100:8"), "dtype": "bf16", "params_dtype": "bf16", "weight_dtype": None}
    return SimpleNamespace(model=PRESETS[model], mesh=MeshShape(**mesh), run=run, **kept | options)


@pytest.mark.parametrize(("batch", "sequences"), [(1, "1 sequence at once"), (64, "64 sequences at once")])
def test_the_mesh_that_is_taken_is_said_with_the_one_that_the_planner_advises(batch, sequences, capsys):
    note_advised_mesh(found({"fsdp": 8}), batch)
    said = capsys.readouterr().err
    best = best_serving_plan(PRESETS["llama3-8b"], "decode", {"on": "h100:8", "batch": batch})
    assert said.startswith("note: no mesh was given, so that all devices are along fsdp; for ")
    assert sequences in said
    assert f"advises --mesh {best.mesh}: " in said
    assert "and fsdp=8 takes " in said


def test_models_with_few_learned_positions_are_planned_too(capsys):
    system = parse_system("cpu:8")
    note_advised_mesh(found({"fsdp": 8}, model="tiny-gpt2", system=system, dtype="f32", params_dtype="f32"), 1)
    assert "advises --mesh" in capsys.readouterr().err


def test_nothing_is_said_of_the_advised_mesh_itself_nor_of_a_runs_own(capsys):
    best = best_serving_plan(PRESETS["llama3-8b"], "decode", {"on": "h100:8", "batch": 64}).mesh
    note_advised_mesh(found(best.degrees), 64)
    note_advised_mesh(found({"fsdp": 8}, run=SimpleNamespace(mesh=MeshShape(fsdp=8))), 64)
    assert not capsys.readouterr().err

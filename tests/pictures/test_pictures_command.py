"""`meshwright show`, and the mistakes people make with it."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from meshwright.cli.show.command import Args, run
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.pictures.showing import show

MISTAKES = [
    ("A[I_X, J", {}, ", or ] after a dim expected"),
    ("A[I_Q, J]", {}, "the mesh has no axis Q; its axes are X, Y"),
    ("A[I_X, J_X]", {}, "mesh axis X is on both I and J"),
    ("A[I_X, J]", {"dims": "I=7,J=8"}, "X=2 cannot split I=7"),
    ("A[I_X, J]", {"dims": "I=8"}, "dim J of A"),
    ("A[I_X, J]", {"dims": "I=8,J=8,K=8"}, "there is a size for K, which A"),
    ("A[I_X, J]", {"dims": "I=8,J"}, "= and a number after J expected"),
    ("A[I_X, J]", {"mesh": "X=0"}, "X=0; it is a whole number from 1"),
    ("A[I_X, J]", {"dtype": "float17"}, "float17"),
    ("A[I_X, J]", {"on": "v5e:3x3"}, "v5e:3x3 is not a slice"),
    ("A[I_X, J]", {"on": "h100:8"}, "no torus to draw"),
    ("A[I_X, J] @ B[J, K]", {}, "the end expected, not @"),
]


def arguments(array="A[I_X, J_Y]", **others):
    return Args(**{"array": array, "mesh": "X=2,Y=2", "dims": "I=8,J=8"} | others)


def test_the_command_prints_the_picture_and_how_to_go_on(capsys):
    assert run(arguments()) == 0
    picture, end = capsys.readouterr().out.rsplit("\n\n", 1)
    assert picture == str(show("A[I_X, J_Y]", mesh="X=2,Y=2", dims="I=8,J=8"))
    assert end == " next   meshwright show 'A[I_X, J_Y]' --mesh X=2,Y=2 --dims I=8,J=8 --all\n"


def test_all_shows_every_sharding(capsys):
    assert run(arguments(all=True)) == 0
    assert "11 shardings of A" in capsys.readouterr().out


def test_the_picture_is_also_written_as_svg(tmp_path, capsys):
    path = tmp_path / "a.svg"
    assert run(arguments(svg=path, on="v5e:2x2")) == 0
    assert ElementTree.parse(path).getroot().get("role") == "img"
    assert f"wrote  {path}" in capsys.readouterr().out


def test_json_holds_the_devices_the_shardings_and_the_torus(capsys):
    assert run(arguments(json=True, all=True, on="v5e:2x2")) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["array"], data["local_shape"], len(data["devices"])) == ("A[I_X, J_Y]", [4, 4], 4)
    assert len(data["shardings"]) == 11
    assert data["torus"][0] == {"slice": 0, "x": 0, "y": 0, "z": 0, "core": 0, "coordinates": {"X": 0, "Y": 0}}


@pytest.mark.parametrize(("array", "others", "message"), MISTAKES)
def test_a_mistake_is_one_clear_error(array, others, message):
    with pytest.raises(MeshwrightError, match=message.replace("[", r"\[")):
        run(arguments(array, **others))


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(MeshwrightError, match="there is no directory"):
        run(arguments(svg=tmp_path / "missing" / "a.svg"))


def test_text_without_a_mesh_says_what_is_missing():
    with pytest.raises(MeshwrightError, match="needs a mesh and the sizes of its dims"):
        show("A[I_X]")


def test_a_mesh_shape_will_do_for_a_mesh():
    assert "mesh dp=1, fsdp=2" in str(show("W[D_fsdp, F]", mesh=MeshShape(fsdp=2), dims="D=8,F=8"))


@pytest.mark.parametrize("others", [{"mesh": "X=2"}, {"dims": "I=8"}, {"every": True}])
def test_a_live_array_brings_its_own_mesh_and_shape(others):
    with pytest.raises(MeshwrightError, match="go with text in the notation"):
        show(jax.device_put(np.zeros(4)), **others)


def test_an_array_without_a_mesh_is_not_laid_on_a_torus():
    with pytest.raises(MeshwrightError, match="needs an array on a mesh; this one is on none"):
        show(jax.device_put(np.zeros(4)), on="v5e:1x1")


def test_degrees_in_a_mapping_are_checked_as_in_text():
    with pytest.raises(MeshwrightError, match="X=0; it is a whole number from 1"):
        show("A[I_X]", mesh={"X": 0}, dims={"I": 4})


def test_a_tree_is_not_laid_on_a_torus():
    with pytest.raises(MeshwrightError, match="goes with one array"):
        show({"w": jax.device_put(np.zeros(4))}, on="v5e:4x4")


def test_a_live_array_is_shown_with_its_mesh_on_a_torus():
    mesh = jax.make_mesh((4, 2), ("X", "Y"))
    array = jax.device_put(np.zeros((8, 8), np.float32), jax.NamedSharding(mesh, jax.P("X", "Y")))
    text = str(show(array, on="v5e:2x4"))
    assert "float32  P('X', 'Y')   [8, 8]   mesh X=4, Y=2" in text
    assert "mesh X=4, Y=2 on v5e:2x4" in text


def test_text_in_the_notation_never_loads_jax():
    code = (
        "import sys\n"
        "from meshwright.cli.show.command import Args, run\n"
        "run(Args(array='A[I_X, J_Y]', mesh='X=2,Y=2', dims='I=8,J=8', all=True, on='v5e:2x2'))\n"
        "sys.exit('jax' in sys.modules or 'numpy' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)

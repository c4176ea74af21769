"""`meshwright inspect`: tables and findings of a function or a dump, in plain text of 100 columns and as JSON."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import inspect_programs
import jax
import pytest
from jax.sharding import AxisType

from meshwright.cli.main import main
from meshwright.description.hlo.text import hlo_text
from meshwright.errors import MeshwrightError
from meshwright.mesh import parse_axes

MESH = ["--mesh", "dp=2,tp=4"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def dump(tmp_path):
    """A file of the HLO text of `whole`, with the shardings of its arguments."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    file = tmp_path / "dump.txt"
    file.write_text(hlo_text(inspect_programs.whole(mesh).compile()))
    return file


def test_a_function_without_a_mistake_has_no_finding(capsys):
    assert main(["inspect", "inspect_programs:split", *MESH, "--axes", "auto"]) == 0
    shown = capsys.readouterr().out
    assert "inspect_programs:split · dp=2,tp=4 on cpu:8 · compiled by jaxlib" in shown
    assert "no finding" in shown
    assert "all-reduce" in shown
    assert "inspect_programs.py:17 (mlp/dot_general)" in shown
    assert "peak" in shown
    assert "100%" in shown


def test_a_mistake_is_told_with_its_cost_its_line_and_a_fix(capsys):
    assert main(["inspect", "inspect_programs:whole", *MESH, "--check"]) == 1
    shown = capsys.readouterr().out
    assert "1 finding" in shown
    assert "repeated work" in shown
    assert "all products are the same on all 4 devices along tp" in shown
    assert "inspect_programs.py:17" in shown
    assert "fix: " in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_the_arguments_that_are_state_can_be_named(capsys):
    words = ["inspect", "inspect_programs:gradients", *MESH, "--axes", "auto"]
    assert main(words) == 0
    assert "not donated" not in capsys.readouterr().out
    assert main([*words, "--state", "params"]) == 0
    shown = capsys.readouterr().out
    assert "not donated" in shown
    assert "--axes auto --state params --html report.html" in shown
    assert main([*words, "--state", "parms"]) == 2
    assert "state names 'parms'; the program's arguments are params, x" in capsys.readouterr().err


def test_json_has_the_record_and_the_findings(capsys):
    assert main(["inspect", "inspect_programs:whole", *MESH, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["record"]["mesh"] == {"dp": 2, "tp": 4}
    assert [found["kind"] for found in data["findings"]] == ["repeated work"]


def test_findings_are_checked_for_where_that_is_asked(capsys):
    assert main(["inspect", "inspect_programs:whole", *MESH]) == 0
    assert main(["inspect", "inspect_programs:split", *MESH, "--check"]) == 0
    assert "1 finding" in capsys.readouterr().out


def test_the_largest_buffers_at_the_peak_are_printed_where_that_is_asked(capsys):
    assert main(["inspect", "inspect_programs:split", *MESH, "--memory"]) == 0
    shown = capsys.readouterr().out
    assert "at the peak" in shown
    assert "params['w_in']" in shown
    assert main(["inspect", "inspect_programs:split", *MESH, "--memory", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["buffers"][0]["num_bytes"] > 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_dump_is_read_as_it_is_or_packed(dump, packed, capsys):
    if packed:
        file = dump.with_suffix(".txt.gz")
        file.write_bytes(gzip.compress(dump.read_bytes()))
        dump = file
    assert main(["inspect", str(dump), *MESH]) == 0
    shown = capsys.readouterr().out
    assert "finding 1  repeated work" in shown
    assert "memory" not in shown


def test_a_text_that_says_no_shardings_gets_them_from_the_dump_beside_it(dump, capsys):
    """Of what XLA dumps the optimized module has none from jaxlib 0.12 on, the one before optimization has."""
    text = re.sub(r", sharding=\{[^}]*\}+", "", dump.read_text())
    assert "sharding=" not in text
    file = dump.with_name("module_0000.jit_forward.cpu_after_optimizations.txt")
    file.write_text(text)
    assert main(["inspect", str(file), *MESH]) == 0
    alone = capsys.readouterr().out
    assert "no finding" in alone
    assert "note: the text does not say how the arguments are sharded" in alone
    dump.rename(dump.with_name("module_0000.jit_forward.before_optimizations.txt"))
    assert main(["inspect", str(file), *MESH]) == 0
    beside = capsys.readouterr().out
    assert "finding 1  repeated work" in beside
    assert "note: the text" not in beside


def test_a_dump_for_some_hardware_has_times(dump, capsys):
    assert main(["inspect", str(dump), *MESH, "--on", "cpu:8", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert found["cost_seconds"] > 0


MISTAKES = [
    (["inspect_programs:whole", "--mesh", "dp=2,dp=4"], "dp=2,dp=4' is not a list of axes"),
    (["inspect_programs:whole", "--mesh", "2,4"], "is not a list of axes, each once with its degree"),
    (["inspect_programs:absent", *MESH], "module inspect_programs has no 'absent'"),
    (["nowhere:whole", *MESH], "cannot import 'nowhere'"),
    ([":whole", *MESH], "':whole' is not module:function"),
    (["inspect_programs:", *MESH], "'inspect_programs:' is not module:function"),
    (["inspect_programs:__name__", *MESH], "is a str, not a function that takes a mesh"),
    (["does_not_parse:f", *MESH], "does_not_parse.py:1 does not parse: "),
    (["does_not_import:f", *MESH], "importing does_not_import fails: ZeroDivisionError: division by zero ("),
    (["inspect_programs:whole", "--mesh", "dp=1000000"], "1000000 devices are too many to simulate"),
    (["nowhere.txt", *MESH], "neither a file nor module:function"),
    (["inspect_programs:nothing", *MESH], "must return jax.jit(...).lower(...) or (function, args)"),
    (["inspect_programs:whole", *MESH, "--trace", "t.json"], "--trace needs --on a TPU or GPUs"),
    (["inspect_programs:whole", *MESH, "--on", "cpu:16"], "has 8 devices; cpu:16 has 16"),
]


@pytest.mark.parametrize(("words", "reason"), MISTAKES)
def test_a_mistake_in_the_call_is_one_line_and_code_2(words, reason, capsys, tmp_path, monkeypatch):
    (tmp_path / "does_not_parse.py").write_text("def f(:\n")
    (tmp_path / "does_not_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["inspect", *words]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_a_dump_for_another_number_of_devices_is_an_error(dump, capsys):
    assert main(["inspect", str(dump), "--mesh", "dp=4"]) == 2
    assert "runs on 8 devices; mesh dp=4 has 4" in capsys.readouterr().err


@pytest.mark.slow
def test_a_module_may_make_a_mesh_when_it_is_imported(tmp_path):
    """In a process of its own: it failed with "Number of devices 1 must be >= the product of mesh_shape (8,)"."""
    (tmp_path / "meshed.py").write_text(
        "import jax\nfrom inspect_programs import split\nMESH = jax.make_mesh((8,), ('x',))\n"
        "def program(mesh):\n    assert MESH.size == mesh.size\n    return split(mesh)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    path = os.pathsep.join(filter(None, (str(Path(inspect_programs.__file__).parent), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", "inspect", "meshed:program", *MESH, "--axes", "auto"],
        capture_output=True, text=True, cwd=tmp_path, env=environment | {"PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no finding" in done.stdout


def test_of_a_dump_the_axes_types_change_nothing(dump, capsys):
    assert main(["inspect", str(dump), *MESH, "--axes", "auto"]) == 2
    assert "is already compiled" in capsys.readouterr().err


def test_axes_keep_their_order():
    assert list(parse_axes("tp=4, data=2").items()) == [("tp", 4), ("data", 2)]
    with pytest.raises(MeshwrightError):
        parse_axes("")

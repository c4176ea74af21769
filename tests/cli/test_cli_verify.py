"""`meshwright verify` as people type it."""

import json
import re

import pytest

from meshwright.cli.main import main
from meshwright.proof.compiler import targets

TINY = ["verify", "tiny", "--on", "cpu:8", "--mesh", "1,2,4,1", "--batch", "8", "--seq-len", "64"]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """One compilation serves all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.slow
def test_verify_prints_rows_with_units_and_one_line_on_what_differs(capsys):
    assert main(TINY) == 0
    printed = capsys.readouterr()
    # On a busy machine a line says that it still compiles.
    assert all(line.startswith("compiling") for line in printed.err.splitlines())
    assert "all-gather fsdp forward" in printed.out
    assert "quantities are equal" in printed.out
    assert all(len(line) <= 100 for line in printed.out.splitlines())


@pytest.mark.slow
def test_verify_ends_with_1_where_a_difference_exceeds_the_tolerance(capsys):
    assert main([*TINY, "--tolerance", "1000"]) == 0
    assert main([*TINY, "--tolerance", "0.0001"]) == 1


@pytest.mark.slow
def test_verify_prints_every_row_as_json(capsys):
    assert main([*TINY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"predicted", "compiled", "rows", "differences"}
    rows = {row["quantity"]: row for row in found["rows"]}
    assert rows["flops"]["predicted"] == rows["flops"]["compiled"]
    assert rows["step"]["unit"] == "s"
    assert found["compiled"]["step_seconds"] == rows["step"]["compiled"]
    assert all(row in found["rows"] for row in found["differences"])


@pytest.mark.slow
def test_verify_writes_a_page(tmp_path, capsys):
    assert main([*TINY, "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "all-gather fsdp forward" in page


@pytest.mark.slow
def test_verify_lays_a_run_beside_its_own_plan_and_refuses_another(tmp_path, capsys):
    run = str(tmp_path / "run")
    step = ["tiny", "--on", "cpu:8", "--mesh", "1,2,4,1", "--batch", "8", "--seq-len", "64"]
    assert main(["train", *step, "--steps", "3", "-o", run]) == 0
    capsys.readouterr()
    assert main([*TINY, "--run", run]) == 0
    assert "measured" in capsys.readouterr().out
    assert main([*TINY[:-1], "128", "--run", run]) == 2
    assert "is a run of another workload" in capsys.readouterr().err


@pytest.mark.slow
def test_verify_compiles_each_value_of_a_sweep_and_says_why_one_has_no_plan(capsys):
    words = ["verify", "tiny", "--on", "cpu:8", "--mesh", "fsdp=-1", "--batch", "8", "--seq-len", "64"]
    assert main([*words, "--sweep", "2,3"]) == 0
    printed = capsys.readouterr().out
    (row,) = (line for line in printed.splitlines() if "cpu:2" in line)
    assert row.split()[:3] == ["2", "cpu:2", "fsdp=2"]
    assert re.search(r"([\d.]+ \wB) \| \1 ", row)  # The bytes of its collectives, predicted and compiled.
    assert "chips=3: batch 8 is not a multiple of dp*fsdp" in " ".join(printed.split())
    assert main([*words, "--sweep", "chips=2", "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert (point["value"], point["hardware"]) == (2, "cpu:2")
    assert point["predicted"]["flops"] == point["compiled"]["flops"]


MISTAKES = [
    (["verify", "tiny", "--batch", "8", "--sweep", "chips=2"], ["--sweep is of a model on --on CHIPS"]),
    ([*TINY, "--sweep", "batch=8,16"], ["--batch has no effect with --sweep"]),
    ([*TINY, "--sweep", "chips=8", "--html", "page.html"], ["--html has no effect with --sweep"]),
    ([*TINY, "--html", "/no/such/place/page.html"], ["no directory /no/such/place"]),
    ([*TINY, "--run", "/no/such/run"], ["no run in '/no/such/run'"]),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_a_mistake_is_found_before_anything_is_compiled(words, said, capsys, monkeypatch):
    monkeypatch.setattr("meshwright.proof.compiler.compile.CompileProcess", None)
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert all(word in printed for word in said)


@pytest.mark.parametrize(("on", "package"), [("v5e:4x4", "tpu-compiler"), ("h100:16", "gpu-compiler")])
def test_a_compiler_that_is_not_installed_is_named_with_the_command_that_installs_it(on, package, capsys, monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    words = ["verify", "tiny", "--on", on, "--mesh", "16,1,1,1", "--batch", "16", "--seq-len", "64"]
    assert main(words) == 2
    assert f"pip install meshwright[{package}]" in capsys.readouterr().err

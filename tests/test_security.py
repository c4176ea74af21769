"""What docs/security.md says of files from strangers: none of their code runs, and each ends in one error."""

import ast
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.cli.main import main

SOURCE = Path(__file__).parents[1] / "src" / "meshwright"
ALLOWED = {
    # Values that meshwright made itself: to and from its own processes, and copies of a function in one process.
    "pickle": {"execution/data/worker.py", "execution/data/workers.py", "proof/inspection/meshes.py"},
    "cloudpickle": {"proof/inspection/meshes.py"},
    # Code that the user names: a notebook's cell, a script, a lesson of the wheel; its source is parsed for `fix`.
    "exec": {"lessons/run.py", "proof/inspection/magic.py", "proof/inspection/run_script.py"},
    "eval": {"lessons/run.py", "proof/inspection/magic.py"},
    # With a loader that is made from the safe one.
    "yaml.load": {"planning/exchange/files.py"},
}
"""The files in which what could run a stranger's code is used, and why it does not."""

MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch"}


def uses(tree):
    """What a file uses that runs code, or reads what does."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ({one.name.split(".")[0] for one in names} & MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield module.split(".")[0]
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                yield name
            case ast.Attribute(value=ast.Name(id="yaml"), attr="load" | "full_load" | "unsafe_load" as name):
                yield f"yaml.{name}"
            case ast.Attribute(value=ast.Name(id="os"), attr="system" | "popen" as name):
                yield f"os.{name}"
            case ast.keyword(
                arg="shell" | "allow_pickle" | "trust_remote_code" as name, value=ast.Constant(value=True)
            ):
                yield name


def test_code_is_run_and_pickles_are_read_only_where_they_are_our_own_or_named_by_the_user():
    found = {}
    for path in SOURCE.rglob("*.py"):
        for name in uses(ast.parse(path.read_text())):
            found.setdefault(name, set()).add(path.relative_to(SOURCE).as_posix())
    assert found == ALLOWED


@pytest.mark.parametrize("tag", ["object/apply:pathlib.Path.touch", "object/new:os.system", "name:os.system"])
def test_yaml_that_names_python_objects_makes_none(tag, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = f"model: !!python/{tag} [made]\nformat: 1\n"
    for name in ("plan.yaml", "settings.yaml", "config.yaml"):
        (tmp_path / name).write_text(text)
    with pytest.raises(mw.MeshwrightError):
        mw.Plan.read("plan.yaml")
    for words in (
        ["plan", "--import", "settings.yaml", "--on", "v5e:4x4"],
        ["train", "tiny", "--on", "cpu:8", "--config", "config.yaml"],
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "plan.yaml", "settings.yaml"]


def test_the_page_on_security_names_what_is_there():
    text = (Path(__file__).parents[1] / "docs" / "security.md").read_text()
    assert "requirements.lock" in text
    lock = (Path(__file__).parents[1] / "requirements.lock").read_text()
    pinned = [line for line in lock.splitlines() if "==" in line and not line.startswith((" ", "#"))]
    assert pinned
    assert lock.count("--hash=sha256:") >= len(pinned)

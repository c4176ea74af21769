"""Runs whose data has a relative path, resumed from another folder than the one where they began."""

import json
import shutil

import pytest

from meshwright.errors import MeshwrightError
from meshwright.execution.data.sources import FileSource
from meshwright.execution.training.data.run_data import open_data
from meshwright.execution.training.library import new_run
from meshwright.execution.training.run_directory.resume import resumed_run
from meshwright.execution.training.run_directory.run import begin_run
from meshwright.planning.library import plan_to_run


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """The directory of a run that began in the folder `first`, on `texts` there; the current folder is `second`."""
    first, second, run = (tmp_path / name for name in ("first", "second", "run"))
    for folder in (first / "texts", second, run):
        folder.mkdir(parents=True)
    (first / "texts" / "a.txt").write_text("the run's text " * 100)
    monkeypatch.chdir(first)
    plan = plan_to_run("tiny", {"on": "cpu:1", "mesh": "dp=1", "batch": 2, "seq_len": 16})
    begin_run(run, new_run("tiny", plan, run, steps=2, settings={"data": "texts"}), 0)
    monkeypatch.chdir(second)
    return run


def resume(run, **options):
    config, lines = resumed_run(run, steps=None, change=options.pop("change", False), options=options)
    open_data(config.data, config.workload, None, seed=0)
    return config.data, lines


def files(data):
    """The files of the first source."""
    source = data.find(data.sources[0])
    assert isinstance(source, FileSource)
    return list(source.files)


def test_relative_data_is_found_from_any_folder(begun):
    data, _ = resume(begun)
    assert data.sources == ("texts",)
    assert files(data) == [begun.parent / "first" / "texts" / "a.txt"]
    assert data.find("texts").name == "texts"
    # The same file by its path from here is no change.
    assert resume(begun, data="../first/texts") == (data, [])


def test_other_data_by_a_path_from_here_is_a_change_to_it(begun):
    (begun.parent / "second" / "texts").mkdir()
    other = begun.parent / "second" / "texts" / "b.txt"
    other.write_text("another text " * 100)
    # A folder of the same name here is not what the run began with.
    assert files(resume(begun)[0])[0].name == "a.txt"
    with pytest.raises(MeshwrightError, match="was begun with"):
        resume(begun, data="texts")
    data, lines = resume(begun, data="texts", change=True)
    assert [path.name for path in files(data)] == ["b.txt"]
    assert len(lines) == 1


def test_data_that_moved_with_the_current_folder_is_found_there(begun):
    shutil.move(begun.parent / "first" / "texts", begun.parent / "second" / "texts")
    assert files(resume(begun)[0])[0].name == "a.txt"


def test_lost_data_is_named_with_both_places(begun):
    shutil.rmtree(begun.parent / "first" / "texts")
    with pytest.raises(MeshwrightError) as error:
        resume(begun)
    assert str(error.value) == (
        f"there is no 'texts' in {begun.parent / 'first'}, where the run began, nor in {begun.parent / 'second'}:"
        " config.json has it by its path from there; put it back in either, or continue with --data PATH --change"
    )


def test_a_run_of_before_has_no_folder(begun):
    config = json.loads((begun / "config.json").read_text())
    del config["data"]["folder"]
    (begun / "config.json").write_text(json.dumps(config))
    with pytest.raises(MeshwrightError, match="there is no file 'texts'"):
        resume(begun)

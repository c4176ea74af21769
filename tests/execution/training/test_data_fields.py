"""Templates of fields by source: which one each source of a mixture is read with, and what cannot be meant."""

import json
from dataclasses import replace

import numpy as np
import pytest
from data_files import write_lines
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.description.families.registry import PRESETS
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.data.encoding import find_encoder
from meshwright.execution.data.sources import find_files
from meshwright.execution.data.template import parse_templates
from meshwright.execution.data.tokenizing import Tokenizing, tokenize
from meshwright.execution.training.data.config import DataConfig
from meshwright.execution.training.data.run_data import check_templates, open_data
from meshwright.execution.training.library import new_run
from meshwright.execution.training.run_directory.run import config_from_data, read_config, read_metrics
from meshwright.execution.training.settings import with_settings
from meshwright.planning.library import plan_to_run

WORKLOAD = Workload(model=replace(PRESETS["tiny"], vocab=300), batch=2, seq_len=16)
QA = "[question],answer"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A corpus, questions with answers, records of two other fields, a text, and a store of tokens."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "wiki.jsonl", [{"text": "wiki"} for n in range(40)])
    write_lines(tmp_path / "qa.jsonl", [{"question": f"{n}?", "answer": f"{n}."} for n in range(30)])
    write_lines(tmp_path / "other.jsonl", [{"q": f"{n}", "a": "z"} for n in range(20)])
    write_lines(tmp_path / "a=1.jsonl", [{"q": f"{n}", "a": "z"} for n in range(20)])
    (tmp_path / "plain.txt").write_text("plain text " * 50)
    source = find_files(("wiki.jsonl",))
    tokenize(Tokenizing(source, find_encoder(source, None, None), "error", "bytes"), tmp_path / "store")
    return tmp_path


def learned(config):
    """By its name, the learned text of the first documents of each source's first row."""
    found = {}
    for rows in open_data(config, WORKLOAD, None, seed=0).training:
        row = rows.read(0)
        found[rows.name] = bytes(row["targets"][row["weights"] > 0].astype(np.uint8)).decode()
    return found


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ((), {}),
        ((QA,), {"": QA}),
        ((f"qa.jsonl={QA}", "text"), {"qa.jsonl": QA, "": "text"}),
        ((f"lang=en/qa.jsonl={QA}",), {"lang=en/qa.jsonl": QA}),
        (('["a=b "+q],a',), {"": '["a=b "+q],a'}),
        (('qa.jsonl=["a=b "+q],a',), {"qa.jsonl": '["a=b "+q],a'}),
        (('"x=\\" y"+a',), {"": '"x=\\" y"+a'}),
        (("my data, new/qa+more.jsonl=a",), {"my data, new/qa+more.jsonl": "a"}),
    ],
)
def test_a_template_names_its_source_before_the_last_equals_sign_outside_quotes(texts, found):
    assert parse_templates(texts) == found


@given(st.text(min_size=1, max_size=20).filter(lambda path: '"' not in path), st.sampled_from([QA, "text", '"="+a']))
def test_any_path_may_have_any_template(path, template):
    assert parse_templates([f"{path}={template}"]) == {path: template}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ("text", QA),
            rf"two templates for all sources: text and \{QA[:9]}\]?.*; name the source of one, as qa.jsonl=",
        ),
        (("qa.jsonl=a", "qa.jsonl=b"), "two templates for qa.jsonl: a and b; leave one out"),
        (("qa.jsonl=",), "a field is missing"),
        (("qa.jsonl=[question]",), "every part is in brackets"),
        (('qa.jsonl="open',), "a quote is not closed"),
    ],
)
def test_templates_that_cannot_be_meant_are_one_line(texts, message):
    with pytest.raises(MeshwrightError, match=message):
        DataConfig(fields=texts)


def test_each_source_is_read_by_its_own_template(folder):
    mixture = ("wiki.jsonl=0.5", "qa.jsonl=0.3", "other.jsonl=0.2")
    config = DataConfig(sources=mixture, fields=(f"qa.jsonl={QA}", "other.jsonl=[q],a"), rows="padded")
    found = {name: text.strip("0123456789") for name, text in learned(config).items()}
    assert found == {"wiki.jsonl": "iki\n", "qa.jsonl": ".\n", "other.jsonl": "z\n"}
    # What names no source is of those that have none of their own.
    config = replace(config, fields=(f"qa.jsonl={QA}", "text", "other.jsonl=[q],a"))
    assert learned(config)["other.jsonl"] == "z\n"
    with pytest.raises(MeshwrightError, match=r"other\.jsonl, line 1: the field text is missing; there are q, a"):
        open_data(replace(config, fields=(f"qa.jsonl={QA}", "text")), WORKLOAD, None, seed=0)


def test_a_store_in_the_cache_is_kept_where_only_the_template_of_another_source_changes(folder):
    config = DataConfig(sources=("wiki.jsonl", "qa.jsonl"), fields=(f"qa.jsonl={QA}",))
    before = open_data(config, WORKLOAD, None, seed=0).fingerprint
    stores = {path.parent: path.stat().st_mtime_ns for path in folder.glob("cache/meshwright/tokens/*/store.json")}
    assert len(stores) == 2
    other = replace(config, fields=("qa.jsonl=question,answer",))
    assert open_data(other, WORKLOAD, None, seed=0).fingerprint != before
    after = {path.parent: path.stat().st_mtime_ns for path in folder.glob("cache/meshwright/tokens/*/store.json")}
    assert len(after) == 3
    assert stores.items() <= after.items()
    assert open_data(config, WORKLOAD, None, seed=0).fingerprint == before


def test_what_is_held_out_does_not_depend_on_how_templates_are_given(folder):
    named = DataConfig(sources=("qa.jsonl",), fields=(f"qa.jsonl={QA}",), held_out=0.2)
    one, two = (open_data(each, WORKLOAD, None, seed=0) for each in (named, replace(named, fields=(QA,))))
    assert one.fingerprint == two.fingerprint
    assert [rows.count for rows in one.held_out] == [rows.count for rows in two.held_out]
    np.testing.assert_equal(one.held_out[0].read(0), two.held_out[0].read(0))


@pytest.mark.parametrize(
    ("sources", "fields", "message"),
    [
        (("wiki.jsonl", "qa.jsonl"), (f"qa.jsnl={QA}",), r"of --fields is 'qa\.jsnl'; did you mean qa\.jsonl\? it is"),
        (("plain.txt", "qa.jsonl"), ("plain.txt=text",), "plain.txt is text, which has no fields"),
        (("store", "qa.jsonl"), ("store=text",), "store is a store of tokens, which has no fields"),
        (("plain.txt", "store"), ("text",), "--fields is 'text', and no source has records that it is for"),
        (("qa.jsonl",), (f"qa.jsonl={QA}", "text"), "no source has records that it is for; leave it out"),
        ((), ("text",), "no source has records that it is for"),
    ],
)
def test_a_template_that_nothing_reads_is_an_error(folder, sources, fields, message):
    with pytest.raises(MeshwrightError, match=message):
        check_templates(DataConfig(sources=sources, fields=fields))


def test_sources_for_evaluation_have_templates_too(folder):
    config = DataConfig(sources=("wiki.jsonl",), fields=("other.jsonl=[q],a",))
    check_templates(config, ("other.jsonl",))
    check_templates(replace(config, fields=("text",)), ("plain.txt",))
    with pytest.raises(MeshwrightError, match=r"other\.jsonl'; did you mean"):
        check_templates(config, ("a=1.jsonl",))


def test_text_and_stores_of_a_mixture_have_no_part_in_a_template_for_all(folder):
    config = DataConfig(sources=("plain.txt", "store", "qa.jsonl"), fields=(QA,), rows="padded")
    check_templates(config)
    assert learned(config)["qa.jsonl"].endswith(".\n")


def test_the_library_takes_one_template_or_those_by_source(folder):
    plan = plan_to_run("tiny", {"on": "cpu:1", "batch": 2, "seq_len": 16})

    def fields(value):
        settings = {"data": ("wiki.jsonl", "qa.jsonl"), "fields": value}
        return new_run("tiny", plan, folder / "run", steps=1, settings=settings).data.fields

    assert fields(f"qa.jsonl={QA}") == fields({"qa.jsonl": QA}) == fields([f"qa.jsonl={QA}"]) == (f"qa.jsonl={QA}",)
    with pytest.raises(MeshwrightError, match="fields is 3"):
        fields(3)


def test_a_config_of_before_is_read(folder):
    plan = plan_to_run("tiny", {"on": "cpu:1", "batch": 2, "seq_len": 16})
    config = new_run("tiny", plan, folder / "run", steps=1, settings={"data": ("qa.jsonl",), "fields": QA})
    data = json.loads(json.dumps(config.to_json()))
    assert data["data"]["fields"] == [QA]
    assert config_from_data(data) == config
    assert config_from_data(data | {"data": data["data"] | {"fields": QA}}) == config
    without = config_from_data(data | {"data": data["data"] | {"fields": None}})
    assert without == with_settings(config, {"fields": ()})


@pytest.mark.slow
def test_a_run_counts_by_source_and_goes_on_with_its_own_templates_alone(folder):
    run, mixture = folder / "run", ("wiki.jsonl=0.5", "qa.jsonl=0.5")
    options = {"on": "cpu:8", "batch": 8, "seq_len": 32, "num_layers": 1, "data": mixture}
    mw.train("tiny", run, steps=1, fields={"qa.jsonl": QA}, **options)
    [row] = read_metrics(run)
    assert sorted(name for name, size in row["sources"].items() if size["documents"]) == ["qa.jsonl", "wiki.jsonl"]
    assert row["loss_tokens"] < sum(size["tokens"] for size in row["sources"].values())
    assert read_config(run).data.fields == (f"qa.jsonl={QA}",)
    with pytest.raises(MeshwrightError, match=r"fields is \('qa.jsonl=answer',\); .* was begun with .*--change"):
        mw.train(run, resume=True, steps=2, fields={"qa.jsonl": "answer"})
    said = r"^fields: \('qa.jsonl=answer',\) instead of \('qa.jsonl=\[question\],answer',\)$"
    with (
        pytest.warns(UserWarning, match=said),
        pytest.warns(UserWarning, match="^the data has the checksum .* allowed$"),
    ):
        mw.train(run, resume=True, steps=2, fields={"qa.jsonl": "answer"}, change=True)
    assert len(read_metrics(run)) == 2

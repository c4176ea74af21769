"""`meshwright inspect` in CI: ignored findings, baselines, SARIF, and exit codes."""

import json
import re

import jsonschema
import pytest

from meshwright.cli.main import main

PROGRAM = """import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P


def make(mesh):
    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def mlp(w_in, w_out, x):
        return jax.nn.relu(x @ w_in) @ w_out

    return mlp, (array((64, 128)), array((128, 64)), array((32, 64), "dp"))
"""
INSPECT = ["inspect", "wide.py:make", "--mesh", "dp=2,tp=4"]

TEXT = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
LOCATION = {
    "type": "object",
    "required": ["physicalLocation"],
    "properties": {
        "physicalLocation": {
            "type": "object",
            "required": ["artifactLocation", "region"],
            "properties": {
                "artifactLocation": {"type": "object", "required": ["uri"]},
                "region": {"type": "object", "properties": {"startLine": {"type": "integer", "minimum": 1}}},
            },
        }
    },
}
SARIF = {
    "type": "object",
    "required": ["version", "runs", "$schema"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["tool", "results"],
                "properties": {
                    "tool": {
                        "type": "object",
                        "required": ["driver"],
                        "properties": {
                            "driver": {
                                "type": "object",
                                "required": ["name", "rules"],
                                "properties": {
                                    "rules": {
                                        "type": "array",
                                        "uniqueItems": True,
                                        "items": {
                                            "type": "object",
                                            "required": ["id", "shortDescription", "help"],
                                            "properties": {"shortDescription": TEXT, "help": TEXT},
                                        },
                                    }
                                },
                            }
                        },
                    },
                    "results": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["message", "ruleId", "locations"],
                            "properties": {
                                "message": TEXT,
                                "level": {"enum": ["none", "note", "warning", "error"]},
                                "locations": {"type": "array", "minItems": 1, "items": LOCATION},
                            },
                        },
                    },
                },
            },
        },
    },
}
"""The fields of SARIF 2.1.0 that are required there or by GitHub's code scanning, of those that are written."""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The working directory, with a program in which nothing is split over tp."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wide.py").write_text(PROGRAM)
    return tmp_path


def test_an_ignored_finding_does_not_count_and_is_told_of(capsys):
    assert main([*INSPECT, "--check", "--ignore", "redundant-compute:*.py"]) == 0
    assert "no finding (1 ignored)" in capsys.readouterr().out
    assert main([*INSPECT, "--check", "--ignore", "redundant-compute:models/*.py", "padded-arrays"]) == 1
    shown = capsys.readouterr().out
    assert "1 finding" in shown
    assert "ignored" not in shown


def test_only_findings_that_are_not_in_the_baseline_count_also_after_lines_have_moved(folder, capsys):
    assert main([*INSPECT, "--write-baseline", "baseline.json"]) == 0
    assert main([*INSPECT, "--baseline", "baseline.json", "--check"]) == 0
    assert "no finding (1 in the baseline)" in capsys.readouterr().out
    (folder / "wide.py").write_text("# A line more.\n\n" + PROGRAM)
    assert main([*INSPECT, "--baseline", "baseline.json", "--check"]) == 0
    (folder / "wide.py").write_text(PROGRAM.replace("relu(x @ w_in) @ w_out", "relu(x @ w_in) @ w_out * 2.0"))
    assert main([*INSPECT, "--baseline", "baseline.json", "--check"]) == 1
    assert main([*INSPECT, "--baseline", "baseline.json", "--ignore", "redundant-compute", "--json"]) == 0
    data = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))
    assert [len(data[name]) for name in ("findings", "ignored", "in_baseline")] == [0, 1, 0]


def test_findings_are_written_as_sarif_with_file_and_line(folder):
    assert main([*INSPECT, "--check", "--sarif", "found.sarif"]) == 1
    log = json.loads((folder / "found.sarif").read_text())
    jsonschema.validate(log, SARIF)
    (run,) = log["runs"]
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert rules["redundant-compute"]["help"]["text"].endswith("docs/findings.md#redundant-compute")
    for rule in rules.values():  # one sentence on the mistake, without the names of a finding's fields
        assert re.fullmatch(r"[A-Z][^.]*\.", text := rule["fullDescription"]["text"].replace("e.g.", "")), text
    (result,) = run["results"]
    assert rules[result["ruleId"]] == run["tool"]["driver"]["rules"][result["ruleIndex"]]
    place = result["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("wide.py", 11)
    assert "the same on all 4 devices along tp" in result["message"]["text"]
    assert main([*INSPECT, "--check", "--sarif", "found.sarif", "--ignore", "redundant-compute"]) == 0
    assert json.loads((folder / "found.sarif").read_text())["runs"][0]["results"] == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--ignore", "redundant-computes"], "'redundant-computes' is not a finding; did you mean redundant-compute"),
        (["--ignore", "redundant-compute:"], "has no files behind the colon"),
        (["--baseline", "none.json"], "cannot read none.json: No such file or directory; --write-baseline none.json"),
        (["--baseline", "wide.py"], "wide.py is not a baseline"),
        (["--sarif", "none/found.sarif"], "cannot write none/found.sarif"),
    ],
)
def test_a_mistake_in_these_options_is_one_line_and_code_2(words, reason, capsys):
    assert main([*INSPECT, *words]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1

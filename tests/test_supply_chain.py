"""The bill of materials has every package of the lock, each with a licence that it may have."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SBOM = runpy.run_path(str(ROOT / ".ci" / "sbom.py"))


def test_every_package_of_the_lock_has_a_licence_that_is_allowed():
    packages = list(SBOM["locked"]())
    assert len(packages) > 100
    assert [(one.name, one.licence) for one in packages if not one.is_allowed] == []
    assert {one.name for one in packages} >= SBOM["REVIEWED"].keys(), "a review of a package that is gone"
    assert all(one.licence for one in packages)


@pytest.mark.parametrize(
    ("licence", "is_allowed"),
    [
        ("MIT", True), ("GPL-3.0-only", False), ("MIT OR GPL-3.0-only", True), ("MIT AND GPL-3.0-only", False),
        ("", False), ("(MIT)", False), ("AGPL-3.0-or-later", False), ("BSD License", True),
        ("Apache-2.0 OR BSD-2-Clause", True),
    ],
)  # fmt: skip
def test_a_licence_is_allowed_if_each_part_has_an_alternative_on_the_list(licence, is_allowed, monkeypatch):
    monkeypatch.setitem(
        SBOM["Package"].licence.fget.__globals__,
        "metadata",
        lambda name: {"License-Expression": licence} if licence else _Without(),
    )
    assert SBOM["Package"]("some", "1", ()).is_allowed is is_allowed


class _Without(dict):
    def get_all(self, name):
        return None


def test_the_bill_is_complete_and_the_same_each_time(tmp_path, monkeypatch, capsys):
    files = [tmp_path / "one.json", tmp_path / "other.json"]
    for file in files:
        monkeypatch.setattr(sys, "argv", ["sbom.py", "-o", str(file)])
        assert SBOM["main"]() == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    bill = json.loads(files[0].read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    refs = [one["bom-ref"] for one in bill["components"]]
    assert len(set(refs)) == len(refs)
    hashes = [each["content"] for one in bill["components"] for each in one["externalReferences"][0]["hashes"]]
    assert set(hashes) < set(re.findall(r"sha256:([0-9a-f]{64})", (ROOT / "requirements.lock").read_text()))
    by_ref = {one["ref"]: one["dependsOn"] for one in bill["dependencies"]}
    assert by_ref.keys() == {*refs, bill["metadata"]["component"]["bom-ref"]}
    assert {needed for needs in by_ref.values() for needed in needs} < set(refs)
    jax = next(ref for ref in refs if ref.startswith("pkg:pypi/jax@"))
    assert any(ref.startswith("pkg:pypi/jaxlib@") for ref in by_ref[jax])


AUDITED = {"name": "one", "version": "1.0", "vulns": []}
KNOWN = {"name": "two", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
SKIPPED = {"name": "three", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ([AUDITED], 0, "audit: 1 packages were checked\n"),
        ([AUDITED, KNOWN], 1, "two 2.0: PYSEC-1, fixed in 2.1\naudit: 2 packages were checked\n"),
        ([SKIPPED, AUDITED], 0, "audit: the advisories say nothing of 1 of 2 packages, as three, so nothing is known"),
        (None, 0, "audit: the advisories cannot be reached (ConnectionError: no route), so nothing is known"),
    ],
)  # fmt: skip
def test_an_audit_says_in_one_line_what_could_not_be_asked(found, code, said, monkeypatch, capsys, tmp_path):
    """Where PyPI's JSON cannot be reached, pip-audit skips every package and finds no vulnerabilities."""

    class Done:
        returncode = 0
        stdout = "" if found is None else json.dumps({"dependencies": found})
        stderr = "Traceback\nConnectionError: no route\n"

    (tmp_path / ".venv-audit" / "bin").mkdir(parents=True)
    (tmp_path / ".venv-audit" / "bin" / "pip-audit").touch()
    monkeypatch.setitem(SBOM["audit"].__globals__, "ROOT", tmp_path)
    monkeypatch.setattr(SBOM["subprocess"], "run", lambda *_, **__: Done)
    assert SBOM["audit"]() == code
    assert capsys.readouterr().out.startswith(said)

"""Findings as SARIF 2.1.0, the format from which code hosts annotate the lines of a change."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import meshwright
from meshwright.proof.inspection.baseline import finding_classes, finding_key, place_of
from meshwright.proof.inspection.finding import Finding

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif_log(findings: Sequence[Finding], subject: str) -> dict[str, Any]:
    """Return findings as a SARIF log with one run; a finding without a line is placed at the top of the subject's file.

    subject: what was inspected, as `module:function` or `file.py:function`.
    """
    classes = finding_classes()
    rules = [_rule(check, classes[check]) for check in sorted(classes)]
    order = {rule["id"]: number for number, rule in enumerate(rules)}
    # The file of `module:function` or `file.py:function`.
    module = subject.partition(":")[0]
    file = module if module.endswith(".py") else ""
    if not file and ":" in subject:
        with suppress(ImportError, ValueError):
            found = importlib.util.find_spec(module)
            file = (found.origin or "") if found else ""
    place = place_of(f"{file}:1") if file else None
    home = _location(place.file if place else "", 1)
    results = []
    for finding in findings:
        place = place_of(finding.source)
        results.append(
            {
                "ruleId": finding.id,
                "ruleIndex": order[finding.id],
                "level": "error" if finding.is_wrong else "warning",
                "message": {"text": f"{finding.evidence}. Fix: {finding.fix}."},
                "locations": _location(place.file, place.line) if place else home,
                "partialFingerprints": {"meshwright/v1": hashlib.sha256(finding_key(finding).encode()).hexdigest()},
                "properties": {"bytes": finding.bytes, "costSeconds": finding.cost_seconds},
            }
        )
    driver = {"name": "meshwright", "version": meshwright.__version__, "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(check: str, kind: type[Finding]) -> dict[str, Any]:
    page = f"docs/findings.md#{check}"
    text = inspect.cleandoc(kind.__doc__ or kind.kind).split("\n\n")[0]
    return {
        "id": check,
        "name": kind.__name__,
        "shortDescription": {"text": str(kind.kind)},
        "fullDescription": {"text": " ".join(text.split())},
        "help": {"text": f"What it means, an example and how to fix it: {page}"},
        "defaultConfiguration": {"level": "warning"},
    }


def _location(file: str, line: int) -> list[dict[str, Any]]:
    """Return the list of locations with one line of a file, empty without a file."""
    if not file:
        return []
    artifact = {"uri": Path(file).as_uri()} if Path(file).is_absolute() else {"uri": quote(file)}
    return [{"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line}}}]

"""Every benchmark can be started: its imports and its arguments are still what the code has."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda file: file.stem)
def test_a_benchmark_can_be_imported(file, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(file.parent), *sys.path])
    runpy.run_path(str(file), run_name="imported")

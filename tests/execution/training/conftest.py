"""Stores of tokens that runs make are kept in the test's own folder."""

import pytest


@pytest.fixture(autouse=True)
def token_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

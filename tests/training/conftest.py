"""Stores of tokens that runs make are kept in the test's own folder."""

import pytest


@pytest.fixture(autouse=True)
def token_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("meshwright.training.data.cache.cache_directory", lambda: tmp_path / "token_cache")

"""What a command prints to stderr while it works."""

import time

import pytest

from meshwright.cli import waiting as waits
from meshwright.cli.waiting import waiting
from meshwright.support.files import user_cache


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(waits, "EACH_LINE", 0.02)
    monkeypatch.setattr(waits, "KEPT_SECONDS", 0.1)


def printed(capsys, what, seconds):
    with waiting(what):
        time.sleep(seconds)
    return capsys.readouterr().err.splitlines()


def test_a_wait_says_how_long_the_last_one_took(capsys):
    assert printed(capsys, "compiling a", 0.15)[0] == "compiling a: 0 s so far"
    assert printed(capsys, "compiling b", 0.05)[0] == "compiling b: 0 s so far"
    # A short wait, of a program that is in the cache, does not replace it.
    for _ in range(2):
        first = printed(capsys, "compiling a", 0.05)[0]
        assert first.startswith("compiling a: 0 s so far (last time ")
    assert first.endswith("ms)")


def test_a_wait_that_ends_with_an_error_is_not_remembered(capsys):
    def stopped():
        time.sleep(0.12)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), waiting("compiling a"):
        stopped()
    assert not (user_cache() / waits.FILE).exists()


@pytest.mark.parametrize("text", ["", "[1]", '{"compiling a": "x"}', "{"])
def test_a_damaged_file_of_waits_is_replaced(capsys, text):
    user_cache().mkdir()
    (user_cache() / waits.FILE).write_text(text)
    assert printed(capsys, "compiling a", 0.15)[0] == "compiling a: 0 s so far"
    assert "(last time" in printed(capsys, "compiling a", 0.05)[0]


def test_only_the_latest_waits_are_kept(capsys, monkeypatch):
    monkeypatch.setattr(waits, "MOST_KEPT", 1)
    printed(capsys, "compiling a", 0.12)
    printed(capsys, "compiling b", 0.12)
    monkeypatch.setattr(waits, "KEPT_SECONDS", 1e9)
    assert "(last time" not in printed(capsys, "compiling a", 0.05)[0]
    assert "(last time" in printed(capsys, "compiling b", 0.05)[0]

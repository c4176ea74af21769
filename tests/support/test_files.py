"""Files are written whole or not at all, streams stay what they are, and every failure is one line."""

import os
import stat
import subprocess
import sys
import threading
import time

import pytest

from meshwright.errors import MeshwrightError
from meshwright.support.files import append_line, check_new_directory, check_output, write_file

FULL = os.makedev(1, 7)
"""The device that is always full, on Linux."""


def refused_paths(root):
    """What cannot be written, and the word that says why."""
    (root / "file").write_text("here")
    (root / "folder").mkdir()
    (root / "circle").symlink_to(root / "circle")
    return {
        root / "no" / "x": f"there is no directory {root / 'no'}",
        root / "file" / "x": "is not a directory",
        root / "folder": "it is a directory",
        root / ("x" * 300): "its name is too long",
        root / "circle": "circle",
        "/proc/x": "no file can be made in /proc",
        "": "without a name",
        "a\0b": "cannot write",
    }


def test_a_path_that_cannot_be_written_is_one_line_and_nothing_is_left(tmp_path):
    refused = refused_paths(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for path, words in refused.items():
        for act in (check_output, lambda path: write_file(path, "text")):
            with pytest.raises(MeshwrightError) as raised:
                act(path)
            assert words in str(raised.value)
            assert len(str(raised.value).splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "here"


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for path, words in {
        "": "without a name",
        tmp_path / "file": "is not a directory",
        tmp_path / "file" / "runs" / "a": "is not a directory",
        tmp_path / ("x" * 300) / "a": "too long",
        "/dev/null/x": "is not a directory",
        "/proc/x": "no file can be made in /proc",
    }.items():
        with pytest.raises(MeshwrightError) as raised:
            check_new_directory(path)
        assert words in str(raised.value)
        assert len(str(raised.value).splitlines()) == 1
    check_new_directory(tmp_path / "runs" / "a")
    check_new_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_is_replaced_through_a_link_and_keeps_its_permissions(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "target").chmod(0o640)
    (tmp_path / "link").symlink_to("target")
    write_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o640
    write_file(tmp_path / ("x" * 255), b"the longest name")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(MeshwrightError, match=r"the disk is full, .* are free"):
        write_file(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_a_pipe_that_is_read_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_output(tmp_path / "pipe")
    with pytest.raises(MeshwrightError, match="nothing reads this pipe yet"):
        write_file(tmp_path / "pipe", "text")
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    for _ in range(1000):
        try:
            write_file(tmp_path / "pipe", "text")
            break
        except MeshwrightError:  # The reader has not opened it yet.
            time.sleep(0.01)
    reader.join(10)
    assert found == ["text"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_device_stays_a_device(tmp_path):
    """`plan -o /dev/full` as root once replaced the device by a YAML file."""
    try:
        os.mknod(tmp_path / "full", 0o666 | stat.S_IFCHR, FULL)
        (tmp_path / "full").open("wb").close()
    except OSError:
        pytest.skip("only root makes devices")
    check_output(tmp_path / "full")
    with pytest.raises(MeshwrightError, match="the disk is full"):
        write_file(tmp_path / "full", "text")
    assert stat.S_ISCHR((tmp_path / "full").stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_the_output_of_a_process_is_written_in_order_whatever_it_is(tmp_path):
    code = "from meshwright.support.files import write_file; print('a'); write_file('/dev/stdout', 'b\\n'); print('c')"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "a\nb\nc\n"


def test_a_line_is_added_whole_or_not_at_all(tmp_path):
    append_line(tmp_path / "lines", "one")
    append_line(tmp_path / "lines", "two")
    assert (tmp_path / "lines").read_text() == "one\ntwo\n"
    with pytest.raises(MeshwrightError, match="there is no directory"):
        append_line(tmp_path / "no" / "lines", "one")

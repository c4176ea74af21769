"""Ctrl-C and SIGTERM end a command in one line, and with it the process that compiles for it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.cli.main import EXIT_CODES, _interrupt, main

ENDS = {
    signal.SIGINT: (130, "interrupted; the same command begins again\n"),
    signal.SIGTERM: (143, "ended by SIGTERM; the same command begins again\n"),
}


COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # Whoever runs the tests may ignore it.
from meshwright.cli.main import main
sys.exit(main())
"""


def start(words, tmp_path):
    """A command in a process group of its own, which a terminal's Ctrl-C would reach."""
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(found, process):
    """What a function finds in the end; the process must not end before."""
    until = time.monotonic() + 120
    while not (what := found()):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.02)
    return what


def wait_until_gone(number):
    """A compiler whose parent ended before it knew of its child ends when its own imports are done."""
    until = time.monotonic() + 60
    while Path(f"/proc/{number}").exists() and " Z " not in Path(f"/proc/{number}/stat").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)


def has_worked(process):
    """Whether a process has worked for half a second, and so is past Python's own start."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) > 0.5 * os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("number", ENDS)
def test_a_plan_that_is_interrupted_says_so_in_one_line(number, tmp_path):
    process = start(["plan", "deepseek-v3", "--on", "h100:2048", "--batch", "15360"], tmp_path)
    wait_for(lambda: has_worked(process), process)
    os.killpg(process.pid, number)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == ENDS[number]
    assert out == ""


@pytest.mark.slow
@pytest.mark.parametrize("number", ENDS)
def test_a_verification_that_is_interrupted_while_it_compiles_ends_its_compiler(number, tmp_path):
    words = ["verify", "tiny", "--on", "cpu:8", "--mesh", "fsdp=8", "--batch", "16", "--seq-len", "96"]
    process = start(words, tmp_path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    [compiler] = wait_for(lambda: children.read_text().split(), process)
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == ENDS[number]
    assert out == ""
    wait_until_gone(compiler)


@pytest.mark.slow
def test_a_verification_that_is_killed_takes_its_compiler_along(tmp_path):
    process = start(
        ["verify", "tiny", "--on", "cpu:8", "--mesh", "fsdp=8", "--batch", "16", "--seq-len", "96"], tmp_path
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    [compiler] = wait_for(lambda: children.read_text().split(), process)
    process.kill()
    process.communicate()
    wait_until_gone(compiler)


@pytest.mark.slow
@pytest.mark.parametrize("number", ENDS)
def test_an_interruption_while_jax_is_imported_is_no_traceback(number, tmp_path):
    process = start(["generate", str(tmp_path / "none")], tmp_path)
    maps = Path(f"/proc/{process.pid}/maps")
    wait_for(lambda: "jaxlib" in maps.read_text(), process)
    os.killpg(process.pid, number)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == ENDS[number]
    assert out == ""


def test_a_command_leaves_the_handlers_of_its_caller_alone(capsys):
    before = {number: signal.getsignal(number) for number in ENDS}
    assert main(["--version"]) == 0
    assert {number: signal.getsignal(number) for number in ENDS} == before
    assert {code for code, _ in ENDS.values()} < set(EXIT_CODES)
    with pytest.raises(KeyboardInterrupt):
        _interrupt(signal.SIGINT, sys._getframe())


def test_a_command_whose_stdout_is_closed_ends_well():
    """`>&-` in a shell: Python then has no stdout at all."""
    command = f"{sys.executable} -m meshwright plan tiny --on cpu:2 --batch 8 --seq-len 32 >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

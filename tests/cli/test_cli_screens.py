"""Screens at 60, 80, 100 and 140 columns and in a pipe: no number is cut or left out, no line is too long."""

import importlib
import re
from collections import Counter

import pytest

from meshwright.cli import tables
from meshwright.cli.main import main
from meshwright.cli.tables import table, wrap

V5P = ["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "512"]

SCREENS = [
    V5P,
    [*V5P, "--mesh", "fsdp=16,tp=4"],
    [*V5P, "--compare", "fsdp=64", "dp=8,fsdp=8", "fsdp=16,tp=4"],
    [*V5P, "--sweep", "chips=64..256"],
    ["plan", "llama3-70b", "--on", "h100:64", "--batch", "512", "--optimizer", "adamw"],
    ["plan", "llama3-8b", "--on", "v5e:2x2", "--batch", "8", "--num-layers", "16"],
    ["plan", "mixtral-8x7b", "--on", "h100:64", "--batch", "64"],
    ["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--ops"],
    ["plan", "llama3-8b", "--on", "v5e:4x4", "--serve", "decode", "--latency", "30ms"],
    ["plan", "llama3-405b", "--on", "h100:8", "--serve", "decode"],
    ["plan", "llama3-8b", "--on", "v5e:4x4", "--serve", "prefill"],
    ["plan", "resnet50", "--on", "a100-80gb:8", "--batch", "256"],
    ["matmul", "A[B_X, D] @ W[D_X, F] -> C[B_X, F]", "--mesh", "X=8", "--dims", "B=65536,D=8192,F=32768",
     "--on", "v5p:2x2x2"],
    ["collective", "all-reduce", "--mesh", "X=16", "--axis", "X", "--on", "v5e:16x16", "--bytes", "64M"],
    ["collective", "all-to-all", "--mesh", "X=32", "--axis", "X", "--on", "h100:32", "--bytes", "64Mi"],
    ["chips"],
    ["chips", "h100"],
    ["chips", "v5p"],
    ["verify", "tiny", "--on", "cpu:8", "--mesh", "2,2,2,1", "--batch", "16", "--seq-len", "64"],
]  # fmt: skip

NUMBER = re.compile(r"\d[\d.,]*\d|\d")
UNCUT = (" next", "asked for")
"""Lines that a terminal may break: commands to copy."""


WORK = [
    "meshwright.cli.plan.find_meshes",
    "meshwright.cli.plan.plan_one_mesh",
    "meshwright.cli.plan_sweep.run_sweep",
    "meshwright.cli.plan_serving.rank_serving",
    "meshwright.cli.plan_screen.nearby",
    "meshwright.cli.plan_screen.ways_to_fit",
    "meshwright.verification.verify_plan",
]
"""What takes time, and is the same at every width."""


@pytest.fixture
def done_once(monkeypatch):
    """Each piece of work is done once for all widths."""
    for place in WORK:
        module, _, name = place.rpartition(".")
        monkeypatch.setattr(place, kept(getattr(importlib.import_module(module), name)))


def kept(function):
    """A function that remembers its results; arguments are compared by what they print."""
    results = {}

    def call(*args, **options):
        key = repr([arg for arg in args if not callable(arg)] + sorted(options.items()))
        if key not in results:
            results[key] = function(*args, **options)
        return results[key]

    return call


def screen(words, columns, monkeypatch, capsys):
    """The lines of a command on a terminal so wide; None is a pipe."""
    monkeypatch.setattr(tables, "terminal_columns", lambda: columns)
    assert main(words) in (0, 1)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("words", SCREENS, ids=" ".join)
def test_no_number_is_cut_at_any_width(words, done_once, monkeypatch, capsys):
    wide = screen(words, 140, monkeypatch, capsys)
    numbers = Counter(NUMBER.findall(" ".join(wide)))
    for columns in (60, 80, 100, None):
        lines = screen(words, columns, monkeypatch, capsys)
        assert not [line for line in lines if re.search(r"\d\s?…|…\s?\d", line)]
        long = [line for line in lines if len(line) > (columns or 100) and not line.startswith(UNCUT)]
        assert not [line for line in long if " " in line.strip()], (columns, long)
        found = Counter(NUMBER.findall(" ".join(lines)))
        # Commands and the compiler's seconds are said once, whatever the width; a pair of columns may swap.
        missing = {number: count for number, count in (numbers - found).items() if not _is_a_time(number, wide)}
        assert not missing, (columns, missing)


def _is_a_time(number, lines):
    """Whether a number is the time that a compile took, another one at each run."""
    return any("compiled by" in line and number in line for line in lines)


def test_a_table_folds_its_words_then_puts_them_under_then_stacks():
    made = table(
        ("", "mesh", "step", "loses because"),
        [("1", "fsdp=64", "10.3 s", "-"), ("2", "tp=64", "1,234 ms", "tp communication: +528 us a step")],
        left=(1, 3),
    )
    assert [line for _, line in made.lines(80)] == [
        "   mesh         step  loses because",
        "1  fsdp=64    10.3 s  -",
        "2  tp=64    1,234 ms  tp communication: +528 us a step",
    ]
    assert [line for _, line in made.lines(40)] == [
        "   mesh         step",
        "1  fsdp=64    10.3 s",
        "2  tp=64    1,234 ms",
        "     loses because: tp communication:",
        "       +528 us a step",
    ]
    assert [line for _, line in made.lines(18)] == [
        "1  mesh fsdp=64",
        "     step 10.3 s",
        "2  mesh tp=64",
        "     step 1,234 ms",
        "     loses",
        "       because: tp",
        "       communication:",
        "       +528 us a",
        "       step",
    ]


def test_a_number_stays_with_its_unit():
    assert wrap("it takes 40.1 GB of 95.7 GB", 22) == ["it takes 40.1 GB of", "95.7 GB"]


@pytest.mark.parametrize("words", [["plan", "llama3-70b", "--on", "v5e:2x4", "--batch", "8"]])
def test_what_is_wrong_is_red_and_said(words, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = screen(words, 100, monkeypatch, capsys)
    (line,) = (line for line in lines if "DOES NOT FIT" in line)
    assert "\x1b[1;31m" in line

"""Screens of every command at 60, 80, 100 and 140 columns and in a pipe: no number is cut or left out, no line is too
long, and what is said to be typed next can be typed."""

import re
import shlex
from collections import Counter
from shutil import copytree

import pytest
from screens import SCREENS, make_folder, screen

from meshwright.cli.main import COMMANDS, command_module, main
from meshwright.cli.words.read import read_words
from meshwright.pictures.tables import table
from meshwright.pictures.text import next_line, wrap

NUMBER = re.compile(r"\d[\d.,]*\d|\d")
UNCUT = (" next", "   or   ", "$ ", "  meshwright ", "  mesh = ")
"""How lines begin that a terminal may break: commands and code to copy."""

FITTED = ("train",)
"""Screens with a bar, whose lines leave out what is said elsewhere on the screen where they have no place for it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("screens"))


def test_every_command_has_a_screen_and_a_help_screen():
    assert {*COMMANDS} <= {name for name in COMMANDS if any([*words[: name.count(" ") + 1]] == name.split()
                           for words in SCREENS.values())}  # fmt: skip
    assert {f"{name} --help" for name in COMMANDS} <= {*SCREENS}


@pytest.mark.parametrize("name", SCREENS)
def test_no_number_is_cut_at_any_width(name, folder):
    wide = screen(name, 140, folder)
    numbers = Counter(NUMBER.findall(" ".join(line for line in wide if " left  loss" not in line)))
    for columns in (60, 80, 100, None):
        lines = screen(name, columns, folder)
        assert not [line for line in lines if re.search(r"\d\s?…|…\s?\d", line)]
        long = [line for line in lines if len(line) > (columns or 100) and not line.startswith(UNCUT)]
        assert not [line for line in long if " " in line.strip()], (columns, long)
        found = Counter(NUMBER.findall(" ".join(lines)))
        missing = {*numbers} - {*found} if name in FITTED else {*(numbers - found)}
        assert not {number for number in missing if not _is_a_time(number, wide)}, (columns, missing)


def _is_a_time(number, lines):
    """Whether a number is the time that a command itself took, another one at each run."""
    return any(line.startswith("done in") and number in line for line in lines)


def test_what_comes_next_can_be_typed_where_names_have_spaces(folder):
    for name in ("plan mesh", "verify plan", "train", "demo"):
        text = "\n".join(screen(name, 100, folder))
        for line in re.findall(r"(?:next   |\$ )meshwright (.*?)(?:   .*)?$", text, re.MULTILINE):
            words = shlex.split(line)
            assert not [word for word in words if word.startswith(("plans/", "runs/"))], line
        assert re.search(r"'my (plans|runs)/", text), text
    assert "'A[I_X, J_Y]'" in "\n".join(screen("show", 100, folder))


GOES_ON = ("plan kept", "plan run", "verify", "verify run", "verify plan", "verify tpu", "inspect", "inspect plan",
           "inspect tpu", "report", "eval", "eval task", "matmul", "matmul run", "collective", "collective gpus",
           "collective run", "show", "show plan", "show all")  # fmt: skip
"""Screens that end with a whole command, filled in with what was typed."""


@pytest.mark.parametrize("name", GOES_ON)
def test_a_screen_ends_with_a_command_that_can_be_typed(name, folder):
    text = "\n".join(screen(name, 140, folder)).rstrip()
    line = text[text.rindex(" next   meshwright ") :].split("\n")[0]
    _, _, *words = re.split(r"   or  |   \(", line)[0].split(maxsplit=1)[1].partition(" ")
    command, *rest = shlex.split(words[0])
    kind = command_module(command)
    read, _ = read_words(rest, kind.args_of(rest) if hasattr(kind, "args_of") else kind.Args, kinds={}, hints={})
    asked = [word for word in SCREENS[name] if word.startswith(("--mesh", "--on", "--dims", "--data"))]
    assert command != SCREENS[name][0] or {*asked} <= {*rest}
    assert read is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "my plans/none.yaml"], "`meshwright plan … -o 'my plans/none.yaml'`"),
        (["generate", "my runs/begun"], "`meshwright train 'my runs/begun' --resume`"),
        (["train", *SCREENS["train"][1:-1], "my runs/held"], "`meshwright train 'my runs/held' --resume`"),
    ],
)
def test_an_error_quotes_the_command_it_names(words, said, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for name in ("begun", "held"):
        copytree("runs/tiny", f"my runs/{name}", dirs_exist_ok=True)
    (folder / "my runs/held/checkpoints/1").mkdir(parents=True, exist_ok=True)
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_table_folds_its_words_then_puts_them_under_then_stacks():
    made = table(
        ("", "mesh", "step", "loses because"),
        [("1", "fsdp=64", "10.3 s", "-"), ("2", "tp=64", "1,234 ms", "tp communication: +528 us a step")],
        left=(1, 3),
        folds=-1,
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


def test_a_command_to_go_on_with_is_never_broken(monkeypatch):
    assert next_line("meshwright verify p.yaml", "--top 3", note="fsdp=4") == (
        "\n next   meshwright verify p.yaml   or  --top 3   (fsdp=4)"
    )
    monkeypatch.setattr("meshwright.pictures.text.terminal_columns", lambda: 30)
    assert next_line("meshwright verify p.yaml", "--top 3", note="fsdp=4").splitlines() == [
        "",
        " next   meshwright verify p.yaml",
        "   or   --top 3",
        "        (fsdp=4)",
    ]


def test_what_is_wrong_is_red_and_said(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["plan", "llama3-70b", "--on", "v5e:2x4", "--batch", "8"]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "DOES NOT FIT" in line)
    assert "\x1b[1;31m" in line

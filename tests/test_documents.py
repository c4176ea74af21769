"""Every block of README.md and docs/*.md runs, in order, in a fresh folder, and prints what stands under it.

A fence says what a block is:

- ```console: lines after `$ ` are commands, run as a shell does; a comment `# exit code 1` behind one says how it ends.
  Lines below are its output; `…` alone stands for lines left out. Words are compared as they are and numbers to 2%.
  `measured` behind `console`: numbers are not compared. `matrix`: compiles for hardware that is not there, and runs by
  `make matrix` alone; `exhaustive`: for hundreds of devices, and runs by `make exhaustive`.
- ```python runs in one process with the other python blocks of its document.
- ```toml FILE and the like write a file.
- ```sh is how to install, and ```text is no command: neither runs.

After a screen has changed: `make outputs`, or python tests/test_documents.py docs/plan.md … for some, writes the
outputs anew; where `…` ends one, as many lines as it had. With --matrix those of `matrix` blocks too, as
`make outputs` does.
"""

import contextlib
import doctest
import importlib
import io
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

import meshwright
from meshwright.cli.demo import _story
from meshwright.cli.main import main
from meshwright.description.hlo.versions import TESTED

ROOT = Path(__file__).parents[1]
XLA_FLAGS = os.environ.get("XLA_FLAGS", "")
DOCUMENTS = sorted(path.relative_to(ROOT) for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
FILES = ("toml", "py", "yaml")
"""The languages of blocks that are files."""

EXIT_CODE = re.compile(r"\s+# exit code (\d+)$")
IN_PROCESS = ("plan", "matmul", "collective", "chips", "show", "report")
IN_PROCESS += ("verify", "train", "export", "generate", "eval")
"""Commands that need no process of their own, unless they are of a function, whose module they import."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and the words behind that, its text, and where the text starts in the document."""

    language: str
    words: tuple[str, ...]
    text: str
    start: int


@dataclass(frozen=True)
class Step:
    """A command of a document, how it is to end, and the output under it, which is None where none is shown."""

    command: str
    exit_code: int
    output: str | None
    is_measured: bool


def blocks(text):
    found = []
    for fence in FENCE.finditer(text):
        language, *words = fence[1].split() or [""]
        found.append(Block(language, tuple(words), fence[2], fence.start(2)))
    return found


def steps(block):
    """The commands of a console block."""
    assert block.text.startswith("$ "), f"a console block begins with a command, not {block.text[:40]!r}"
    found = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, *output = re.split(r"(?<!\\)\n", part, maxsplit=1)
        code = EXIT_CODE.search(command)
        shown = "".join(output)
        found.append(
            Step(
                EXIT_CODE.sub("", command),
                int(code[1]) if code else 0,
                shown.strip("\n") if shown.strip() else None,
                "measured" in block.words,
            )
        )
    return found


class Shell:
    """A fresh folder in which the commands of one document run, 100 columns wide and without colours.

    As in a clone, the benchmarks and the published runs are there.
    """

    def __init__(self, folder):
        self.folder = folder
        bin_folder = folder.parent / f"{folder.name}-bin"
        for path in (folder, bin_folder):
            path.mkdir()
        (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
        (folder / "tests").symlink_to(ROOT / "tests")
        (folder / "docs" / "pictures").mkdir(parents=True)
        for name, words in {"meshwright": "-m meshwright", "python": ""}.items():
            script = bin_folder / name
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
            script.chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(meshwright.__file__).parents[1]),
            "PYTHONIOENCODING": "utf-8",
            "COLUMNS": "100",
            "NO_COLOR": "1",
            # Tests that ran before may have asked for another number of devices.
            "XLA_FLAGS": XLA_FLAGS,
        }

    def run(self, command):
        """The exit code, and what was printed: results, or where the call was wrong the error; progress is neither."""
        command = command.replace("\\\n", " ")
        words = shlex.split(command, comments=True) if not re.search(r"[|;&><$*\n]", command) else []
        needs_none = words[:1] == ["meshwright"] and words[1] in IN_PROCESS and not {"--run", "--bench"} & {*words}
        if needs_none and not any(re.fullmatch(r"[\w./]+:[a-z_]\w*", word) for word in words):
            return self._run_here(words[1:])
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + (done.stderr if done.returncode > 1 else "")

    def _run_here(self, words):
        printed, errors = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(errors),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv("COLUMNS", "100")
            patch.setenv("NO_COLOR", "1")
            code = main(words)
        return code, printed.getvalue() + (errors.getvalue() if code > 1 else "")


def stable(text, *, is_measured=False):
    """The lines of an output without what differs from one run to the next."""
    text = re.sub(r"^compiling ….*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"(compiled by .*) in [\d.]+ m?s( \(cached\))?", r"\1 in TIME", text)
    # A document was printed with the first of the tested versions; the others must print the same but for their number.
    for package, number in ((package, number) for row in TESTED for package, number in row.items()):
        text = text.replace(f"compiled by {package} {number} in", f"compiled by {package} TESTED in")
    if is_measured:
        # A number with its unit, whose prefix goes with its size; a chart of the loss is drawn of blocks.
        text = re.sub(r"[+-]?\d[\d.,]*(/\d+)?( ?[kMG]?tok/s| [mu]?s\b|%)?", "N", re.sub("[▁-█]+", "", text))
    return [" ".join(line.split()) if is_measured else line.rstrip() for line in text.strip("\n").splitlines()]


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
BARS = re.compile(r"[▁-█]+")


def is_same(shown, printed):
    """Whether two lines have the same words and the same numbers to 2%; bars are drawn of numbers beside them."""
    one, other = (" ".join(BARS.sub("", line).split()) for line in (shown, printed))
    if NUMBER.sub("N", one) != NUMBER.sub("N", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    values = ([float(number.replace(",", "")) for number in pair] for pair in pairs)
    return all(math.isclose(*pair, rel_tol=0.02) for pair in values)


def difference(shown, printed):
    """The first line of a document that a command did not print; None where all are there."""
    at = 0
    skips = False
    for line in shown:
        if line == "…":
            skips = True
            continue
        if skips:
            at = next((number for number in range(at, len(printed)) if is_same(line, printed[number])), len(printed))
        if at >= len(printed) or not is_same(line, printed[at]):
            return f"{line!r}, where it printed {printed[at] if at < len(printed) else 'no such line'!r}"
        at, skips = at + 1, False
    return None if skips or at == len(printed) else f"the end, where it printed {printed[at]!r}"


def test_a_number_may_move_by_2_percent_and_a_word_not_at_all():
    shown = ["step 1,204 ms, 42.1% MFU", "…", "fsdp=16 is the best"]
    assert difference(shown, ["step 1,213 ms,  42.3% MFU", "between", "fsdp=16 is the best"]) is None
    for line in ("step 1,250 ms, 42.1% MFU", "step 1,204 ms, 42.1% mfu", "step 1,204 us, 42.1% MFU"):
        assert difference(shown, [line, "fsdp=16 is the best"]) is not None
    assert difference(shown, ["step 1,204 ms, 42.1% MFU", "fsdp=17 is the best"]) is not None


def run_blocks(found, folder):
    """Run the blocks of a document; a list of what is not as it says."""
    shell, namespace, wrong = Shell(folder), {}, []
    for block in found:
        if block.language == "console":
            for step in steps(block):
                code, printed = shell.run(step.command)
                if code != step.exit_code:
                    wrong.append(f"$ {step.command}\nended with {code}:\n{printed[-2000:]}")
                elif step.output is not None:
                    options = {"is_measured": step.is_measured}
                    if first := difference(stable(step.output, **options), stable(printed, **options)):
                        wrong.append(f"$ {step.command}\nthe document has {first}")
        elif block.language == "python":
            # As a reader's own Python does: Flax and optax mix dtypes.
            promotion = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
            with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), promotion[0], promotion[1]:
                sys.path.insert(0, str(folder))  # as a script's folder is
                exec(compile(block.text, "a block of a document", "exec"), namespace)
                sys.path.remove(str(folder))
        elif block.language in FILES:
            (folder / block.words[0]).write_text(block.text)
    return wrong


LONG = (
    "README.md",
    "docs/data.md",
    "docs/eight_gpus.md",
    "docs/finetune.md",
    "docs/frameworks.md",
    "docs/inspect.md",
    "docs/numbers.md",
    "docs/plan.md",
    "docs/preference.md",
    "docs/python.md",
    "docs/run_directory.md",
    "docs/training.md",
    "docs/verify.md",
    "docs/weights.md",
    "docs/your_own_program.md",
)
"""Documents whose commands take over 5 s, which tests of commands run too: `make matrix` runs them."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mesh .* takes the first")  # Of the devices of this process.
@pytest.mark.parametrize(
    "document",
    [pytest.param(path, marks=pytest.mark.matrix if str(path) in LONG else ()) for path in DOCUMENTS],
    ids=str,
)
def test_the_commands_of_a_document_do_what_it_says(document, tmp_path):
    found = [block for block in blocks((ROOT / document).read_text()) if not {"matrix", "exhaustive"} & {*block.words}]
    assert not (wrong := run_blocks(found, tmp_path / "here")), "\n\n".join(wrong)


COMPILING = [
    pytest.param(path, when, marks=getattr(pytest.mark, when), id=str(path) if when == "matrix" else f"{path}-{when}")
    for path in DOCUMENTS
    for when in ("matrix", "exhaustive")
    if re.search(rf"^```.* {when}$", (ROOT / path).read_text(), re.MULTILINE)
]


@pytest.mark.filterwarnings("ignore:mesh .* takes the first")
@pytest.mark.parametrize(("document", "when"), COMPILING)
def test_the_compiling_commands_of_a_document_do_what_it_says(document, when, tmp_path):
    every = blocks((ROOT / document).read_text())
    found = [block for block in every if when in block.words or block.language in FILES]
    assert not (wrong := run_blocks(found, tmp_path / "here")), "\n\n".join(wrong)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_block_says_what_it_is(document):
    for block in blocks((ROOT / document).read_text()):
        kinds = {"console": ("measured", "matrix", "exhaustive"), "python": (), "sh": (), "text": ()}
        if block.language in kinds:
            assert {*block.words} <= {*kinds[block.language]}, block
        else:
            assert block.language in FILES, block
            assert len(block.words) == 1, block
        if block.language == "sh":
            assert all(re.match(r"make |git |pip |\. |#|$", line) for line in block.text.splitlines()), block.text
        if block.language == "text":
            assert "$ " not in block.text, f"a command that does not run: {block.text}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_of_a_document_lead_somewhere(document):
    text = (ROOT / document).read_text()
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert link.startswith("https://") or (ROOT / document).parent.joinpath(link).exists(), link


def test_the_pictures_are_what_their_commands_draw(tmp_path):
    block, *_ = blocks((ROOT / "docs/pictures/README.md").read_text())
    assert not run_blocks([block], tmp_path / "here")
    drawn = tmp_path / "here/docs/pictures"
    texts, there = (
        {path.name: path.read_text() for path in place.glob("*.svg")} for place in (drawn, ROOT / "docs/pictures")
    )
    assert texts == there
    assert (drawn / "plan.png").exists()  # another matplotlib draws it a little otherwise


def test_the_demo_page_shows_what_make_demo_runs():
    said = [
        step.command
        for block in blocks((ROOT / "docs/demo.md").read_text())
        if block.language == "console"
        for step in steps(block)
    ]
    assert said == [f"meshwright {command}" for _, command in _story("runs/demo")]


def modules_with_examples():
    """The modules whose docstrings have examples."""
    root = Path(meshwright.__file__).parent
    paths = sorted(path for path in root.rglob("*.py") if ">>> " in path.read_text())
    return [".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__") for path in paths]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_docstrings_print_what_they_say(name):
    module = importlib.import_module(name)
    done = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, raise_on_error=False)
    assert done.attempted, f"{name} has examples that doctest does not find"
    assert not done.failed


def renew(document, folder, *, with_matrix):
    """Write the outputs of a document's commands anew; with_matrix: those that compile for other hardware too."""
    text, shell = document.read_text(), Shell(folder)
    for block in blocks(text):
        if block.language in FILES:
            (folder / block.words[0]).write_text(block.text)
        if block.language != "console" or ({"matrix", "exhaustive"} & {*block.words} and not with_matrix):
            continue
        parts = []
        for step in steps(block):
            code, printed = shell.run(step.command)
            if code != step.exit_code:
                print(f"{document}: {step.command} ended with {code}:\n{printed}")
            ending = f"   # exit code {step.exit_code}" if step.exit_code else ""
            lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
            shown = step.output
            if shown is not None:
                kept = shown.strip("\n").splitlines()
                if kept == ["…"] or "…" in kept[:-1]:
                    print(f"by hand, {document}: {step.command}")
                else:
                    shown = "\n".join([*lines[: len(kept) - 1], "…"] if kept[-1] == "…" else lines)
            gap = "\n" if shown is not None and len(shown.splitlines()) > 3 else ""
            parts.append(f"$ {step.command}{ending}\n" + (f"{gap}{shown}\n\n" if shown is not None else ""))
        text = text.replace(f"\n{block.text}```", f"\n{''.join(parts).rstrip()}\n```")
    document.write_text(text)


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    for argument in (argument for argument in sys.argv[1:] if argument != "--matrix"):
        with TemporaryDirectory() as temporary:
            renew(Path(argument).absolute(), Path(temporary) / "here", with_matrix="--matrix" in sys.argv)

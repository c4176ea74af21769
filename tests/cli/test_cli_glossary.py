"""Every term that stands on a screen of a command is in docs/glossary.md.

Terms are the words that are neither plain English (tests/data/plain_words.txt), nor units, nor names: of chips and
models, of files and options, of arrays and their dims.
"""

import re
from pathlib import Path

import pytest
from screens import SCREENS, make_folder, screen

from meshwright.families import PRESETS
from meshwright.families.load import RESNETS
from meshwright.hardware import chip_names
from meshwright.inspection.finding import FindingKind
from meshwright.viz.words import DIFFERENCES

ROOT = Path(__file__).parents[2]
WORD = re.compile(r"(?<!\w)[A-Za-z][A-Za-z0-9]+(?:[-'][A-Za-z0-9]+)*")
COMMANDS = ("$ ", "  meshwright ", " next", "   or ")
"""How lines begin that are to be typed."""

NAMES = re.compile(
    r"\S*\[[^\]]*\]\S*"  # arrays in the notation
    r"|\bd?W[a-z]\w*|\S+\.\w\S*"  # arrays of a model
    r"|\S*[/\\=_:]\S+|--\S+"  # files, options, meshes, notation
    r"|\bICI [xyz]+\b"
    r"|(?<!\w)[FB]\d+[a-z]?\b|\b[mvz]\d+\b"  # slots of a pipeline, and how a plan is run
    r"|\b[kMGTP]?i?(?:B|bit|flop|op|tok)\b|\b[kMG]i\b|\b[num]?s\b"  # units
)
"""What is a name or a unit, and no word."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("screens"))


def words_of(lines):
    """The words of a screen. Of a citation there are none."""
    is_source = False
    for line in lines:
        is_source = bool(line.strip()) and (is_source or line.startswith("  source: "))
        if not is_source and not line.startswith(COMMANDS):
            yield from (word.lower().removesuffix("'s") for word in WORD.findall(NAMES.sub(" ", line)))


def singular(word):
    """A noun's singular, near enough to compare."""
    return re.sub(r"(?<=ch|sh|ss)es$|(?<=[^s])s$", "", re.sub("ies$", "y", word))


def terms():
    """The words that the glossary explains: those that are bold, or written as code."""
    text = (ROOT / "docs/glossary.md").read_text()
    bold = " ".join(" ".join(pair) for pair in re.findall(r"\*\*(.+?)\*\*|`(.+?)`", text))
    return {singular(word.lower()) for word in WORD.findall(bold)}


def plain_words():
    return {singular(word) for word in (ROOT / "tests/data/plain_words.txt").read_text().split()}


NAMED = {singular(name.lower()) for name in (*chip_names(), *PRESETS, *RESNETS, "llama-3-8b", "sxm5")}


def is_known(word, known):
    """Whether a word, or each of those that hyphens join in it, is known."""
    return singular(word) in known or all(singular(part) in known or part.isdigit() for part in word.split("-"))


def unexplained(lines):
    known = terms() | plain_words() | NAMED
    return sorted({word for word in words_of(lines) if not is_known(word, known)})


HOW = "explain these in docs/glossary.md, or add what is plain English to tests/data/plain_words.txt"


@pytest.mark.parametrize("name", SCREENS)
def test_every_term_on_a_screen_is_in_the_glossary(name, folder):
    assert not unexplained(screen(name, 140, folder)), HOW


def test_every_term_in_a_reason_for_a_difference_is_in_the_glossary():
    assert not unexplained(DIFFERENCES.values()), HOW


def test_a_term_that_is_not_explained_is_noticed():
    assert unexplained([" why    tp=4 hides 2 frobnicated shards of Wkey, 8.00 GB"]) == ["frobnicated"]


def test_every_kind_of_finding_is_in_the_document_of_inspect():
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/inspect.md").read_text(), re.MULTILINE)
    assert {kind.value for kind in FindingKind} <= {*rows}

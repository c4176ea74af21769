"""The pages of the site, in the order of its contents.

Each part of a document is on one page. `documents.Site` raises where a section of a document is on none.
"""

from __future__ import annotations

from documents import ROOT, Page, Site, sections_of
from reference import api_pages, api_table, chip_pages, command_pages, command_table

from meshwright.lessons.lesson import lessons

LESSONS = [lesson.file for lesson in lessons()]
FRAMEWORKS = [one.anchor for one in sections_of("docs/frameworks.md") if one.level == 3]
ERRORS = [one.anchor for one in sections_of("docs/troubleshooting.md") if one.level in (2, 3)]
FINDINGS = [one.anchor for one in sections_of("docs/findings.md") if one.level == 3]


def _documents(folder: str, *names: str) -> list[Page]:
    """Return a page for each of some documents of docs."""
    return [Page(f"{folder}/{name.replace('_', '-')}", (f"docs/{name}.md",)) for name in names]


START = [
    Page("start/index", ("site/start.md",)),
    Page(
        "start/three-commands",
        tuple(
            f"README.md#{name}"
            for name in ("start", "three-commands", "your-own-jax-program", "export-generate-serve", "what-to-type")
        ),
        title="Three commands",
    ),
    *_documents("start", "eight_gpus"),
    Page("start/frameworks/index", ("docs/frameworks.md",)),
    *(Page(f"start/frameworks/{name}", (f"docs/frameworks.md#{name}",)) for name in FRAMEWORKS),
    *_documents("start", "demo"),
]

LEARN = [
    Page("learn/index", ("docs/learn.md",)),
    *(Page(f"learn/{path.stem}", (str(path.relative_to(ROOT)),)) for path in LESSONS),
]

DO = [
    Page("do/index", ("site/do.md",)),
    *_documents("do", "plan", "verify", "your_own_program", "inspect", "data", "training", "finetune", "preference"),
    *_documents("do", "long_context", "launch", "reliability", "weights", "serving", "security", "python"),
    Page("do/hardware", ("docs/hardware.md",)),
]

LOOK_UP = [
    Page("look-up/index", ("site/look-up.md",)),
    Page("look-up/commands/index", ("docs/commands.md",), title="Commands", text=command_table()),
    *command_pages("look-up/commands"),
    Page("look-up/findings/index", ("docs/findings.md",)),
    *(Page(f"look-up/findings/{name}", (f"docs/findings.md#{name}",)) for name in FINDINGS),
    Page("look-up/errors/index", ("docs/troubleshooting.md",)),
    *(Page(f"look-up/errors/{name}", (f"docs/troubleshooting.md#{name}",)) for name in ERRORS),
    *_documents("look-up", "notation"),
    Page("look-up/api/index", title="The Python API", text=api_table()),
    *api_pages("look-up/api"),
    Page("look-up/chips/index", ("site/chips.md",)),
    *chip_pages("look-up/chips"),
    *_documents("look-up", "models", "run_directory", "record"),
    Page("look-up/pictures", ("docs/pictures/README.md",)),
    *_documents("look-up", "glossary"),
]

UNDERSTAND = [
    Page("understand/index", ("site/understand.md",)),
    *_documents("understand", "numbers"),
    Page("understand/how-far-to-believe-it", ("README.md#how-far-to-believe-it",)),
    Page("understand/assumptions", ("docs/plan.md#what-is-assumed",), title="What a plan assumes"),
    Page("understand/published-steps", ("docs/verify.md#comparison-with-published-steps",)),
    Page("understand/one-gpu", ("docs/hardware.md#what-one-gpu-measured",)),
    Page(
        "understand/your-own-program",
        ("docs/your_own_program.md#how-good-the-figures-are",),
        title="How good the figures of your own program are",
    ),
    Page("understand/serving", ("docs/serving.md#how-it-works",), title="How the server works"),
    Page("understand/architecture", ("ARCHITECTURE.md",)),
    Page("understand/contributing", ("CONTRIBUTING.md",)),
    Page("understand/changes", ("CHANGELOG.md",)),
]


def make_site() -> Site:
    """Return all pages of the site."""
    home = Page("index", ("README.md#", "site/home.md"))
    return Site([home, *START, *LEARN, *DO, *LOOK_UP, *UNDERSTAND])

"""The site builds without a warning, loads nothing from another host, and has a page for every document, command and
finding. The lessons are not executed: `make site` does that, and tests/lessons runs them with their solutions.
"""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

import meshwright
import meshwright.proof.inspection.run_checks  # imports every check
from meshwright.cli.main import COMMANDS
from meshwright.lessons.lesson import lessons
from meshwright.proof.inspection.finding import Finding

ROOT = Path(__file__).parents[1]

LOADED = {"script": "src", "img": "src", "link": "href", "source": "src", "iframe": "src", "object": "data"}
"""The attribute by which an element loads a file; of `link` those with a `rel` that is no mere reference."""


class Loads(HTMLParser):
    """What a page loads, and where its links lead."""

    def __init__(self):
        super().__init__()
        self.loads, self.links, self.anchors = [], [], set()

    def handle_starttag(self, tag, attrs):
        """Note an element's file, link and id."""
        given = dict(attrs)
        if given.get("id"):
            self.anchors.add(given["id"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        name = LOADED.get(tag)
        if name and given.get(name) and given.get("rel") not in ("next", "prev", "index", "search"):
            self.loads.append(given[name])


def read(path):
    page = Loads()
    page.feed(path.read_text(encoding="utf-8"))
    return page


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    output = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, ROOT / "site/build.py", "--without-lessons", "-o", output],
        env=os.environ | {"PYTHONPATH": str(Path(meshwright.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return output / "html"


@pytest.fixture(scope="module")
def pages(site):
    """The pages of the site, by path."""
    return {str(path.relative_to(site)): read(path) for path in sorted(site.rglob("*.html"))}


def documents():
    """The documents of the project that readers are meant to find."""
    return [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    ]


def reachable(pages):
    """The pages to which links lead from the index."""
    found, ahead = {"index.html"}, ["index.html"]
    while ahead:
        name = ahead.pop()
        for link in pages[name].links:
            to = unquote(urlsplit(urljoin(name, link)).path)
            if to in pages and to not in found:
                found.add(to)
                ahead.append(to)
    return found


def test_every_document_has_a_place_on_the_site(monkeypatch):
    """A section that is on no page is an error of `Site` itself; this needs no Sphinx."""
    monkeypatch.syspath_prepend(str(ROOT / "site"))
    from pages import make_site

    missing = {str(path.relative_to(ROOT)) for path in documents()} - make_site().documents
    assert missing == set()


def test_every_exception_that_reaches_a_caller_is_among_the_errors():
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"^class ([A-Z]\w+Error)\((?:MeshwrightError|ValueError)\)", sources, re.MULTILINE))
    headings = re.findall(r"^### (.*)", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    # The reading of data catches it, and counts it or raises a MeshwrightError with the record's place.
    assert named - {"BadRecordError"} == {word for line in headings for word in line.split() if word.endswith("Error")}


@pytest.mark.matrix
def test_nothing_is_loaded_from_another_host(site, pages):
    foreign = [(name, load) for name, page in pages.items() for load in page.loads if urlsplit(load).netloc]
    assert foreign == []
    imported = re.compile(r"(@import|url\()\s*['\"]?(https?:)?//")
    assert [path for path in site.rglob("*.css") if imported.search(path.read_text())] == []


@pytest.mark.matrix
def test_every_link_within_the_site_leads_somewhere(site, pages):
    lost = []
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(urljoin(name, link))
            path, anchor = unquote(parts.path), unquote(parts.fragment)
            if parts.scheme or not path:
                continue
            if not (site / path).exists() or (anchor and path in pages and anchor not in pages[path].anchors):
                lost.append((name, link))
    assert lost == []


@pytest.mark.matrix
def test_the_index_leads_to_every_page_and_all_that_is_to_have_one_has(pages):
    wanted = [f"look-up/commands/{name.replace(' ', '-')}.html" for name in COMMANDS]
    wanted += [f"look-up/findings/{found.id}.html" for found in Finding.__subclasses__()]
    wanted += [f"look-up/chips/{chip.name}.html" for chip in meshwright.chips().chips]
    wanted += [f"look-up/api/{name}.html" for name in meshwright.__all__ if name != "__version__"]
    wanted += [f"learn/{lesson.file.stem}.html" for lesson in lessons()]
    assert {*wanted} <= pages.keys()
    assert {*pages} - reachable(pages) <= {"genindex.html", "py-modindex.html", "search.html"}


@pytest.mark.matrix
def test_every_heading_of_every_document_is_on_a_page(pages):
    shown = set().union(*(page.anchors for page in pages.values()))
    headings = {
        (path.name, re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"))
        for path in documents()
        for title in re.findall(
            r"^#{2,4} (.+)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S), re.M
        )
    }
    assert sorted((name, anchor) for name, anchor in headings if anchor not in shown) == []

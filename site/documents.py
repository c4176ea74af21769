"""Cut the project's Markdown documents into sections, and give each section a page of the site.

A source is written as `docs/plan.md` (what no other page has of it), `docs/plan.md#what-is-assumed` (one section, by
the anchor that GitHub gives its heading) or `README.md#` (what stands before the first section).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from meshwright.lessons.lesson import Lesson, lessons

ROOT = Path(__file__).parents[1]

_FENCE = re.compile(r"^(```+)")
_HEADING = re.compile(r"^(#{1,6}) (.+)$")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FILE_FENCE = re.compile(r"^```(toml|py|yaml) (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """A page of the site.

    path: its path without the suffix, as `do/plan`. sources: the parts of documents that it consists of. title: its
    heading; by default that of its first source. text: Markdown made by `site/reference.py`, before the sources.
    """

    path: str
    sources: tuple[str, ...] = ()
    title: str = ""
    text: str = ""


@dataclass(frozen=True)
class Section:
    """A heading of a document, and the lines up to the next heading of its level."""

    level: int
    title: str
    anchor: str
    first: int
    end: int


def anchor_of(title: str) -> str:
    """Return the anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@cache
def lines_of(document: str) -> tuple[str, ...]:
    """Return the lines of a document."""
    return tuple((ROOT / document).read_text(encoding="utf-8").splitlines())


@cache
def sections_of(document: str) -> tuple[Section, ...]:
    """Return the sections of a document in order."""
    found: list[tuple[int, int, str]] = []
    fence = ""
    lines = lines_of(document)
    for number, line in enumerate(lines):
        if mark := _FENCE.match(line):
            fence = "" if fence and line.startswith(fence) else fence or mark[1]
        elif not fence and (heading := _HEADING.match(line)):
            found.append((number, len(heading[1]), heading[2]))
    return tuple(
        Section(
            level,
            title,
            anchor_of(title),
            first,
            next((at for at, deep, _ in found[place + 1 :] if deep <= level), len(lines)),
        )
        for place, (first, level, title) in enumerate(found)
    )


def section_named(source: str) -> Section:
    """Return the section that a source `document#anchor` names. Raises ValueError if there is none."""
    document, _, anchor = source.partition("#")
    sections = sections_of(document)
    if not anchor:
        first = next((section.first for section in sections if section.level == 2), len(lines_of(document)))
        return Section(1, sections[0].title, sections[0].anchor, sections[0].first, first)
    for section in sections:
        if section.anchor == anchor:
            return section
    raise ValueError(f"{document} has no section {anchor!r}; it has {', '.join(one.anchor for one in sections)}")


class Site:
    """Pages, and where each section of each document is among them."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self.pages = {page.path: page for page in pages}
        if len(self.pages) < len(pages):
            raise ValueError("two pages have the same path")
        # For each document: its sources' spans of lines, with their pages; a whole document has what is left.
        self._spans: dict[str, list[tuple[Section | None, str]]] = {}
        for page in pages:
            for source in page.sources:
                section = section_named(source) if "#" in source else None
                self._spans.setdefault(source.partition("#")[0], []).append((section, page.path))
        for document in self._spans:
            self._check_complete(document)

    @property
    def documents(self) -> set[str]:
        """The documents that the pages are made of."""
        return {*self._spans}

    def _check_complete(self, document: str) -> None:
        """Raise if a section of a document is on no page, or a document is given whole to two."""
        whole = [path for section, path in self._spans[document] if section is None]
        if len(whole) > 1:
            raise ValueError(f"{document} is on {whole}")
        lost = [one.anchor for one in sections_of(document) if one.level > 1 and not self._page_of(document, one.first)]
        if lost:
            raise ValueError(f"{document} has sections on no page: {', '.join(lost)}")

    def _page_of(self, document: str, line: int) -> str | None:
        """Return the page that has a line of a document: of sections within each other, the innermost one's."""
        within = [(span.first, path) for span, path in self._spans[document] if span and span.first <= line < span.end]
        if within:
            return max(within)[1]
        return next((path for span, path in self._spans[document] if span is None), None)

    def children(self, path: str) -> list[str]:
        """Return the pages below an `index`: those of its folder, and the indexes of the folders in it."""
        folder, _, name = path.rpartition("/")
        if name != "index" or not folder:
            return []
        below = [one for one in self.pages if one.startswith(f"{folder}/") and one != path]
        return [one for one in below if one[len(folder) + 1 :].removesuffix("/index").count("/") == 0]

    def write(self, target: Path) -> None:
        """Write all pages to a folder, with the pictures and files that they link to; others are removed there."""
        self._target = target
        self._written: set[Path] = set()
        for page in self.pages.values():
            self._put(target / f"{page.path}.md", self._text(page))
        for path in sorted(target.rglob("*"), reverse=True):
            if path.is_file() and path not in self._written:
                path.unlink()

    def _put(self, path: Path, text: str) -> None:
        """Write a file unless it is there already: Sphinx reads anew what is newer."""
        self._written.add(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")

    def _text(self, page: Page) -> str:
        """Return the Markdown of a page."""
        for lesson in lessons():
            if page.sources == (str(lesson.file.relative_to(ROOT)),):
                return self._lesson(page, lesson)
        if self._is_renamed(page):
            section = section_named(page.sources[0])
            body = self._part(page, page.sources[0], under=0).partition("\n")[2]
            parts = [f"({section.anchor})=\n# {page.title}\n{body}"]
        else:
            parts = [f"# {page.title}"] if page.title else []
            parts += [page.text.strip()] if page.text else []
            parts += [self._part(page, source, under=int(bool(page.title))) for source in page.sources]
        toctree = self._toctree(page)
        return "\n\n".join([*parts, *toctree]).strip() + "\n"

    def _lesson(self, page: Page, lesson: Lesson) -> str:
        """Return a lesson as it is, with a line below its title that links to its notebook."""
        notebook = f"files/lessons/{lesson.file.stem}.ipynb"
        self._put(self._target / notebook, lesson.notebook())
        link = f"{{download}}`a notebook <{self._relative(page.path, notebook)}>`"
        line = (
            f"*Lesson {lesson.number}, {lesson.minutes} minutes, {len(lesson.exercises)} exercises.* Work through it as"
            f" {link} (also `meshwright learn {lesson.number} --to .`). This page shows it as you get it, with nothing"
            " answered."
        )
        title = f"# {lesson.title}\n"
        return lesson.file.read_text(encoding="utf-8").replace(title, f"{title}\n{line}\n", 1)

    @staticmethod
    def _is_renamed(page: Page) -> bool:
        """Whether a page is one section, with a title of its own instead of the section's."""
        return bool(page.title) and not page.text and len(page.sources) == 1 and "#" in page.sources[0]

    def _toctree(self, page: Page) -> list[str]:
        """Return the list of the pages below an index, hidden where the page's own text links to them."""
        if page.path == "index":
            folders = [one.partition("/")[0] for one in self.pages if one.count("/") == 1 and one.endswith("/index")]
            below = [f"{name.capitalize().replace('-', ' ')} </{name}/index>" for name in folders]
        else:
            below = [f"/{one}" for one in self.children(page.path)]
        if not below:
            return []
        hidden = [] if page.path.count("/") == 1 else [":hidden:"]
        return ["\n".join(["```{toctree}", ":maxdepth: 1", *hidden, "", *below, "```"])]

    def _part(self, page: Page, source: str, *, under: int) -> str:
        """Return a source's text with headings below `under` and links to pages.

        A section that has a page of its own is a link to it.
        """
        document, _, _ = source.partition("#")
        lines = lines_of(document)
        starts = {one.first: one for one in sections_of(document)}
        span = section_named(source) if "#" in source else Section(1, "", "", starts[min(starts)].first, len(lines))
        shift = under + 1 - span.level if span.level > 1 else 0
        kept: list[str] = []
        number = span.first
        while number < span.end:
            section = starts.get(number)
            owner = self._page_of(document, number)
            if section and owner != page.path and number > span.first:
                link = f"- [{section.title}](page:{owner}){self._kind(lines[number + 1 : section.end])}"
                kept += [link] if kept and kept[-1].startswith("- [") else ["", link]
                number = section.end
                continue
            if section:
                if under and number == span.first and span.level == 1:
                    kept.append("")  # The title of the page stands for that of the document.
                else:
                    kept += ["", "#" * (section.level + shift) + f" {section.title}", ""]
            else:
                kept.append(lines[number])
            number += 1
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()
        return _FILE_FENCE.sub(r"```{code-block} \1\n:caption: \2\n", self._linked(page, document, text))

    @staticmethod
    def _kind(lines: Sequence[str]) -> str:
        """Return what a section says it is, in the form `: name`, if its first words are emphasised: `*name.*`."""
        named = re.match(r"\*([^*]+)\.\*", "\n".join(lines).strip())
        return f": {named[1]}" if named else ""

    def _linked(self, page: Page, document: str, text: str) -> str:
        """Return a text whose links to documents, anchors and files are those of the site; code is left alone."""

        def replaced(link: re.Match[str]) -> str:
            target, title = self._target_of(page, document, link[3])
            # A document that is named by its file is named by its title here.
            path = link[3].partition("#")[0]
            text = title if title and link[2] in (path, Path(path).name) else link[2]
            return f"{link[1]}[{text}]({target})"

        parts = re.split(r"(^```+.*?^```+$)", text, flags=re.MULTILINE | re.DOTALL)
        return "".join(part if place % 2 else _LINK.sub(replaced, part) for place, part in enumerate(parts))

    def _target_of(self, page: Page, document: str, link: str) -> tuple[str, str]:
        """Return where a link of a document leads on the site, and the title of that section, empty for a file."""
        if link.startswith("https://"):
            return link, ""
        if link.startswith("page:"):
            return f"{self._relative(page.path, link.removeprefix('page:'))}.md", ""
        path, _, anchor = link.partition("#")
        if document.startswith("site/") and path.removesuffix(".md") in self.pages:
            return self._relative(page.path, link), ""
        to = os.path.normpath(Path(document).parent / path) if path else document
        if to in self._spans:
            section = section_named(f"{to}#{anchor}") if anchor else sections_of(to)[0]
            owner = self._page_of(to, section.first)
            if owner is None:
                raise ValueError(f"{document} links to {link}, which is on no page")
            is_title = self.pages[owner].sources[0] == f"{to}#{anchor}" and not self.pages[owner].title
            behind = f"#{anchor}" if anchor and not is_title else ""
            return f"{self._relative(page.path, owner)}.md{behind}", section.title
        copy = self._target / "files" / to
        if copy not in self._written:
            self._written.add(copy)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / to, copy)
        return self._relative(page.path, f"files/{to}"), ""

    @staticmethod
    def _relative(page: str, to: str) -> str:
        return os.path.relpath(to, Path(page).parent)

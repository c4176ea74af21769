"""Findings that are accepted: those of ignored checks, and those in a baseline file.

A baseline identifies a finding by its check, the file and text of its source line, and its mesh axes. Line numbers are
not compared, so code may move within its file.
"""

from __future__ import annotations

import json
import linecache
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import MeshwrightError, did_you_mean, near_names
from meshwright.proof.inspection.finding import Finding
from meshwright.support.files import write_file

_SOURCE = re.compile(r"(?P<file>[^(].*?):(?P<line>\d+)(?: \((?P<scopes>.*)\))?")
_VERSION = 1


class Place(NamedTuple):
    """A place in the source.

    file: relative to the working directory, or to the directory of installed packages. code: the line's text, or the
    name scopes if the file does not exist.
    """

    file: str
    line: int
    code: str


class Ignore(NamedTuple):
    """A check to ignore in the files that match a glob pattern; in all files if `files` is None."""

    id: str
    files: str | None


@dataclass(frozen=True)
class Accepted:
    """The findings that do not count.

    ignores: the ignored checks. baseline: how many findings a baseline has of each `finding_key`; None without one.
    """

    ignores: tuple[Ignore, ...] = ()
    baseline: Counter[str] | None = None

    def split(self, findings: Iterable[Finding]) -> tuple[tuple[Finding, ...], ...]:
        """Return three tuples of findings: those that count, the ignored ones, and those in the baseline."""
        counted, ignored, known = [], [], []
        left = Counter(self.baseline or ())
        for finding in findings:
            key = finding_key(finding)
            if any(_is_ignored(finding, ignore) for ignore in self.ignores):
                ignored.append(finding)
            elif left[key] > 0:
                left[key] -= 1
                known.append(finding)
            else:
                counted.append(finding)
        return tuple(counted), tuple(ignored), tuple(known)


NOTHING_ACCEPTED = Accepted()


def read_accepted(ignore: str | Sequence[str], baseline: str | Path | None) -> Accepted:
    """Return the findings to accept.

    ignore: one or several ids of checks, each as `ID`, or `ID:GLOB` for the source files that match. baseline: a file
    by `write_baseline`.
    """
    ignores = tuple(map(_read_ignore, [ignore] if isinstance(ignore, str) else ignore))
    return Accepted(ignores, None if baseline is None else _read_baseline(Path(baseline)))


def write_baseline(findings: Iterable[Finding], file: str | Path) -> None:
    """Write findings as a baseline: JSON that is meant to be committed."""
    data = sorted(map(_identity, findings), key=lambda one: json.dumps(one, sort_keys=True))
    write_file(file, json.dumps({"meshwright_baseline": _VERSION, "findings": data}, indent=1) + "\n")


def place_of(source: str) -> Place | None:
    """Parse the text of `Finding.source` (file:line, scopes); None if it names no line."""
    found = _SOURCE.fullmatch(source)
    if found is None:
        return None
    path, line = Path(found["file"]), int(found["line"])
    linecache.checkcache(str(path))
    code = " ".join(linecache.getline(str(path), line).split())
    file = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return Place(file.as_posix().rpartition("/site-packages/")[2], line, code or found["scopes"] or "")


def finding_classes() -> dict[str, type[Finding]]:
    """Return every subclass of `Finding` by its `id`."""

    def below(kind: type[Finding]) -> Iterator[type[Finding]]:
        for one in kind.__subclasses__():
            yield one
            yield from below(one)

    return {one.id: one for one in below(Finding)}


def _read_ignore(text: str) -> Ignore:
    check, colon, files = text.partition(":")
    if check not in (known := finding_classes()):
        near = did_you_mean(near_names(check, known))
        raise MeshwrightError(f"{check!r} is not a finding; {near}the findings are {', '.join(sorted(known))}")
    if colon and not files:
        raise MeshwrightError(f"{text!r} has no files behind the colon; it is ID or ID:GLOB, as {check}:models/*.py")
    return Ignore(check, files or None)


def _is_ignored(finding: Finding, ignore: Ignore) -> bool:
    """Whether `ignore` applies to a finding. If it was merged from several places, the files of all must match."""
    if finding.id != ignore.id or ignore.files is None:
        return finding.id == ignore.id
    places = [place_of(source) for source in (finding.source, *finding.elsewhere)]
    return all(place is not None and fnmatchcase(place.file, ignore.files) for place in places)


def _identity(finding: Finding) -> dict[str, Any]:
    """Return what identifies a finding: its check, its place without the line number, axes and `merged_by` fields."""
    place, found = place_of(finding.source), {"id": finding.id}
    if place is not None:
        found |= {"file": place.file, "code": place.code}
    names = {name: getattr(finding, name, None) for name in ("axes", "axis", *finding.merged_by)}
    return found | {name: value for name, value in names.items() if value and isinstance(value, (str, tuple))}


def finding_key(finding: Finding) -> str:
    """Return `_identity` as text, which is equal for findings that a baseline does not distinguish."""
    return json.dumps(_identity(finding), sort_keys=True)


def _read_baseline(file: Path) -> Counter[str]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise MeshwrightError(f"cannot read {file}: {error.strerror}; --write-baseline {file} writes it") from None
    except ValueError as error:
        raise MeshwrightError(f"{file} is not a baseline: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict) or not isinstance(found := data.get("findings"), list):
        raise MeshwrightError(f"{file} is not a baseline: it has no list of findings; --write-baseline writes one")
    if (version := data.get("meshwright_baseline")) != _VERSION:
        raise MeshwrightError(f"{file} is a baseline of version {version!r}; this meshwright reads {_VERSION}")
    return Counter(json.dumps(one, sort_keys=True) for one in found)

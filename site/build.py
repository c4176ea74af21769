"""Build the site: `make site`, or python site/build.py [--without-lessons] [-o DIRECTORY].

Writes the pages as Markdown to DIRECTORY/pages, and HTML to DIRECTORY/html. The lessons are executed, and their outputs
are kept in DIRECTORY/outputs until the code of the project changes; --without-lessons shows them without outputs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path

from documents import ROOT
from sphinx.cmd.build import main as sphinx


def code_digest() -> str:
    """Return a digest of all that a lesson's outputs depend on: every file of the package."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src/meshwright").rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    """Write the pages, and run Sphinx on them with warnings as errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build/site")
    parser.add_argument("--without-lessons", action="store_true")
    parser.add_argument("--jobs", default="2")
    args = parser.parse_args()
    from pages import make_site

    output = args.output.absolute()
    make_site().write(output / "pages")
    os.environ["MESHWRIGHT_SITE_CACHE"] = str(output / "outputs" / code_digest())
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    options = ["-W", "--keep-going", "-n", "-q"]
    # All pages anew: Sphinx does not notice changes of the code that pages are made from.
    options += ["-E", "-a", "-j", args.jobs, "-c", str(ROOT / "site"), "-d", str(output / "doctrees")]
    if args.without_lessons:
        options += ["-D", "nb_execution_mode=off", "-D", "suppress_warnings=myst-nb.lexer"]
    return sphinx([*options, str(output / "pages"), str(output / "html")])


if __name__ == "__main__":
    sys.exit(main())

"""How Sphinx builds the site from the pages that `site/build.py` writes. Nothing is loaded from another host."""

import os
import re
from typing import Any

from sphinx.ext.napoleon import Config, GoogleDocstring

project = "meshwright"
html_title = "meshwright"
html_show_sphinx = False
html_show_copyright = False

extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["files"]  # What pages link to, and no pages themselves.
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False

smartquotes = False  # --option has two hyphens.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
default_role = "literal"  # `name` in a docstring is code; `read_docstring` marks it where that fails.

autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
add_module_names = False
# Signatures name types of JAX and NumPy, which no page here describes.
nitpick_ignore_regex = [("py:.*", ".*")]

# The lessons run, at most one minute a cell, and what they print is kept until the code of the project changes.
nb_execution_mode = "cache"
nb_execution_cache_path = os.environ.get("MESHWRIGHT_SITE_CACHE", "")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_ipywidgets_js = {}


def _as_literal(code: re.Match[str]) -> str:
    return f"``{code[1]}``" + (f"\\ {code[2]}" if code[2] else "")


def read_docstring(app: Any, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring in Google's style into reStructuredText.

    Napoleon as an extension would read a property's `what it is: more` as its type and a text.
    """
    marked = [re.sub(r"(?<!`)`([^`]+)`(?!`)(\w?)", _as_literal, line) for line in lines]
    kind = "method" if what in ("property", "attribute", "data") else what
    lines[:] = GoogleDocstring(marked, Config(), what=kind, name=name, obj=of).lines()


def setup(app: Any) -> None:
    """Register what reads docstrings."""
    app.connect("autodoc-process-docstring", read_docstring)

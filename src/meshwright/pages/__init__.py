"""A page about a step that needs nothing else: figures side by side, what moves over which axes, timeline, findings."""

from meshwright.pages.document import write_page
from meshwright.pages.inspected import inspection_page
from meshwright.pages.verified import verify_page

__all__ = ["inspection_page", "verify_page", "write_page"]

"""Pages of the KV cache: which are free, and who holds the others."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """The pages 0 to count - 1 of one group of layers, each with a count of its references.

    None among pages, here and wherever a list has an entry for each page of a text, stands for a page that is not held.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count

    @property
    def num_free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Take free pages, each with one reference; None, and no page is taken, where fewer are free."""
        if count > len(self._free):
            return None
        at = len(self._free) - count
        taken = self._free[at:]
        del self._free[at:]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int | None]) -> None:
        """Add a reference to each page.

        Raises:
            RuntimeError: a page that nobody holds.
        """
        for page in pages:
            if page is not None:
                if not self._references[page]:
                    raise RuntimeError(f"page {page} is shared, and nobody holds it")
                self._references[page] += 1

    def release(self, pages: Iterable[int | None]) -> None:
        """Drop a reference to each page; a page without any is free.

        Raises:
            RuntimeError: a page that nobody holds.
        """
        for page in pages:
            if page is not None:
                if not self._references[page]:
                    raise RuntimeError(f"page {page} is released, and nobody holds it")
                self._references[page] -= 1
                if not self._references[page]:
                    self._free.append(page)

    def num_references(self, page: int) -> int:
        """How many hold a page."""
        return self._references[page]


def first_needed_page(position: int, window: int | None, page_size: int) -> int:
    """The first page of a text that its token at `position` reads, and so do those after it: pages before can go.

    Args:
        window: how many tokens a query attends to, its own included; None for all before it.
    """
    return 0 if window is None else max(0, position - window + 1) // page_size

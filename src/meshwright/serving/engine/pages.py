"""Pages of the KV cache: free pages and reference counts."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """The numbers (0 to count - 1) of a shard's pages for the layers of one attention window, with reference counts.

    In a list of a sequence's pages, None is a page that was released.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count

    @property
    def num_free(self) -> int:
        """The number of pages without a reference."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Return the numbers of `count` free pages, each with one reference from now on; None if fewer are free."""
        if count > len(self._free):
            return None
        at = len(self._free) - count
        allocated = self._free[at:]
        del self._free[at:]
        for page in allocated:
            self._references[page] = 1
        return allocated

    def share(self, pages: Iterable[int | None]) -> None:
        """Add a reference to each page.

        Raises:
            RuntimeError: a page has no reference.
        """
        for page in pages:
            if page is not None:
                if not self._references[page]:
                    raise RuntimeError(f"page {page} is shared, but it is free")
                self._references[page] += 1

    def release(self, pages: Iterable[int | None]) -> None:
        """Drop a reference to each page. A page without references is free.

        Raises:
            RuntimeError: a page has no reference.
        """
        for page in pages:
            if page is not None:
                if not self._references[page]:
                    raise RuntimeError(f"page {page} is released, but it is free")
                self._references[page] -= 1
                if not self._references[page]:
                    self._free.append(page)

    def num_references(self, page: int) -> int:
        """Return the number of references to a page."""
        return self._references[page]


def first_needed_page(position: int, window: int | None, page_size: int) -> int:
    """Return the index, in its sequence, of the first page that the token at `position` or a later token reads.

    window: number of tokens that a query attends to, including its own; None for all earlier tokens.
    """
    return 0 if window is None else max(0, position - window + 1) // page_size

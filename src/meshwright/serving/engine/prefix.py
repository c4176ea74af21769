"""The prefix cache: pages of sequences that were computed before, found by their tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from meshwright.serving.engine.pages import PagePool, first_needed_page


class Hit(NamedTuple):
    """The longest cached prefix of a sequence. The caller holds a reference to every page in it.

    Layers are grouped by attention window; each group has its own pages.

    Args:
        length: tokens of the prefix.
        pages: for each group, the full pages of the prefix; None for a page that later tokens do not read.
        copies: for each group, the page within which the prefix ends; None if later tokens do not read it. The sequence
            continues in a copy of this page, and the caller releases the page once it is copied. Empty if the prefix
            ends at the end of a page.
    """

    length: int
    pages: list[list[int | None]]
    copies: list[int | None]


class _Node:
    """A full page of tokens, which follow the tokens of the node's ancestors. The root of a tree has no tokens.

    Args:
        key: the tokens of the page.
        pages: for each group, the number of the cached page; None if it is not cached.
    """

    __slots__ = ("children", "key", "keys", "pages", "parent", "salt")

    def __init__(self, salt: Hashable, key: tuple[int, ...], parent: _Node | None, pages: list[int | None]) -> None:
        self.salt = salt
        self.key = key
        self.parent = parent
        self.pages = pages
        self.children: dict[tuple[int, ...], _Node] = {}
        # Sorted, so that the keys with the longest common prefix are next to the insertion point.
        self.keys: list[tuple[int, ...]] = []


class PrefixCache:
    """Trees whose nodes are full pages of tokens. The cache holds a reference to each of its pages.

    There is one tree for each salt, a value that sequences must have in common to share pages.

    Layers are grouped by attention window, and a node has a page for each group. A node may lack the page of a group
    with a window: then no prefix can end where the window would read that page.

    Args:
        page_size: tokens of a page.
        pools: the pages of each group.
        windows: for each group, the number of tokens that a query attends to, including its own; None for all earlier
            ones.

    Attributes:
        num_lookups: calls of `match`.
        num_hits: calls that found a prefix.
        num_tokens: tokens of the sequences looked up, over all calls.
        num_cached_tokens: tokens of the prefixes found, over all calls.
        num_nodes: number of nodes in all trees, without the roots.
    """

    def __init__(self, page_size: int, pools: Sequence[PagePool], windows: Sequence[int | None]) -> None:
        self._page_size = page_size
        self._pools = pools
        self._windows = windows
        self._roots: dict[Hashable, _Node] = {}
        # For each group, the nodes that have its page, least recently used first.
        self._used: list[OrderedDict[_Node, None]] = [OrderedDict() for _ in pools]
        self.num_lookups = self.num_hits = self.num_tokens = self.num_cached_tokens = self.num_nodes = 0

    def match(self, tokens: Sequence[int], *, limit: int, salt: Hashable = None, min_copied: int = 1) -> Hit:
        """Return the longest cached prefix for which every group has all pages that later tokens read.

        Args:
            limit: maximum tokens of the prefix; for a prompt one less than its tokens, because the last must be
                computed.
            salt: only sequences that were inserted with an equal salt are found.
            min_copied: minimum number of matching tokens (from 1) for which a page that matches in part is copied;
                `page_size` for no copies.
        """
        limit = min(limit, len(tokens))
        path, runs, depth = self._longest(tokens, limit, salt)
        length, copied = depth * self._page_size, None
        for above in range(len(path) - 1, depth - 1, -1):
            begin = above * self._page_size
            rest = tuple(tokens[begin : min(begin + self._page_size, limit)])
            copied, agreeing = self._most_alike(path[above], rest, above, runs[above], min_copied)
            if copied is not None:
                depth, length = above, begin + agreeing
                break
        self.num_lookups += 1
        self.num_tokens += len(tokens)
        self.num_hits += length > 0
        self.num_cached_tokens += length
        return self._take(path[1 : depth + 1], copied, length)

    def longest(self, tokens: Sequence[int], limit: int, salt: Hashable = None) -> int:
        """Return the number of tokens of the longest cached prefix of full pages. Takes no references; see `match`."""
        return self._longest(tokens, min(limit, len(tokens)), salt)[2] * self._page_size

    def insert(self, tokens: Sequence[int], pages: Sequence[Sequence[int | None]], salt: Hashable = None) -> None:
        """Add a sequence's computed full pages. Pages that are already cached stay, and missing ones are added.

        Args:
            tokens: the sequence; tokens after the last full page are ignored.
            pages: for each group, an entry for each page of tokens; None for a page released because it left the
                window.
            salt: the salt with which `match` finds the sequence.

        Raises:
            RuntimeError: None is given for a page of a group without a window.
        """
        if len(tokens) < self._page_size:
            return
        node = self._roots.setdefault(salt, _Node(salt, (), None, []))
        path: list[_Node] = []
        for at in range(len(tokens) // self._page_size):
            key = tuple(tokens[at * self._page_size : (at + 1) * self._page_size])
            if key not in node.children:
                if any(w is None and of_group[at] is None for w, of_group in zip(self._windows, pages, strict=True)):
                    raise RuntimeError(f"page {at} of a text is missing in a group of layers without a window")
                node.children[key] = _Node(salt, key, node, [None] * len(self._pools))
                insort(node.keys, key)
                self.num_nodes += 1
            node = node.children[key]
            path.append(node)
            for group, of_group in enumerate(pages):
                page = of_group[at]
                if page is not None and node.pages[group] is None:
                    self._pools[group].share((page,))
                    node.pages[group] = page
                    self._used[group][node] = None
        for at in reversed(range(len(path))):
            for group, of_group in enumerate(pages):
                if of_group[at] is not None:
                    self._used[group].move_to_end(path[at])

    def evict(self, group: int, count: int) -> int:
        """Free up to `count` pages of a group that only the cache references. Return how many were freed.

        The least recently used pages are freed first; a page that is in use counts as most recently used again. A leaf
        is removed with its pages of all groups. An inner node can only lose the page of a group with a window.
        """
        pool, used = self._pools[group], self._used[group]
        freed = passed = 0
        while freed < count and passed < len(used):
            node = next(iter(used))
            page = node.pages[group]
            assert page is not None
            if pool.num_references(page) > 1 or (node.children and self._windows[group] is None):
                used.move_to_end(node)
                passed += 1
                continue
            if node.children:
                self._drop(node, group)
            else:
                self._remove(node)
            freed += 1
            passed = 0  # The parent may have become a leaf.
        return freed

    def clear(self) -> None:
        """Remove all nodes, and release their pages."""
        for group, used in enumerate(self._used):
            self._pools[group].release(node.pages[group] for node in used)
            used.clear()
        self._roots.clear()
        self.num_nodes = 0

    def _longest(self, tokens: Sequence[int], limit: int, salt: Hashable) -> tuple[list[_Node], list[list[int]], int]:
        """Find the longest usable prefix, in full pages of the first `limit` tokens.

        Returns:
            The path of cached nodes from the root on; the run of each node in the path; and the depth in the path of
            the longest usable prefix. A node's run has, for each group, the index (in the sequence) of the first of the
            consecutive cached pages that end at the node.
        """
        path, runs = [self._roots.get(salt) or _Node(salt, (), None, [])], [[0] * len(self._pools)]
        for page, at in enumerate(range(0, limit - self._page_size + 1, self._page_size)):
            child = path[-1].children.get(tuple(tokens[at : at + self._page_size]))
            if child is None:
                break
            path.append(child)
            runs.append(self._extend(runs[-1], child, page))
        return path, runs, max(d for d, run in enumerate(runs) if self._is_enough(d * self._page_size, run))

    def _extend(self, run: list[int], node: _Node, at: int) -> list[int]:
        """Return the run of a child `node`, whose page has index `at` in the sequence, from its parent's run."""
        return [at + 1 if page is None else first for page, first in zip(node.pages, run, strict=True)]

    def _is_enough(self, length: int, run: list[int]) -> bool:
        """Whether a run has all pages before position `length` that the tokens from this position on read."""
        needed = (first_needed_page(length, window, self._page_size) for window in self._windows)
        return all(first <= need for first, need in zip(run, needed, strict=True))

    def _most_alike(
        self, node: _Node, rest: tuple[int, ...], at: int, run: list[int], least: int
    ) -> tuple[_Node | None, int]:
        """Return the usable child that shares the most leading tokens with `rest`, and their number.

        Args:
            node: the parent.
            rest: the next tokens of the sequence, at most a page.
            at: index of the child's page in the sequence.
            run: the parent's run.
            least: minimum number of shared tokens. If no child has as many, the result is (None, least - 1).
        """
        found, most = None, least - 1
        begin = bisect_left(node.keys, rest)
        # Keys farther from the insertion point share fewer leading tokens with `rest`.
        for numbers in (range(begin, len(node.keys)), range(begin - 1, -1, -1)):
            for number in numbers:
                key = node.keys[number]
                agreeing = next((i for i, (a, b) in enumerate(zip(key, rest, strict=False)) if a != b), len(rest))
                if agreeing <= most:
                    break
                child = node.children[key]
                if self._is_enough(at * self._page_size + agreeing, self._extend(run, child, at)):
                    found, most = child, agreeing
                    break
        return found, most

    def _take(self, path: list[_Node], copied: _Node | None, length: int) -> Hit:
        """Return the hit for a path. Take references to the pages that later tokens read; mark these as just used.

        Args:
            path: the nodes of the prefix's full pages, without the root.
            copied: the node of the page within which the prefix ends; None if it ends at the end of a page.
            length: tokens of the prefix.
        """
        pages: list[list[int | None]] = []
        copies: list[int | None] = []
        for group, (pool, used, window) in enumerate(zip(self._pools, self._used, self._windows, strict=True)):
            first = first_needed_page(length, window, self._page_size)
            of_group = [node.pages[group] if at >= first else None for at, node in enumerate(path)]
            pool.share(of_group)
            pages.append(of_group)
            if copied is not None:
                page = copied.pages[group] if first <= len(path) else None
                pool.share((page,))
                copies.append(page)
                if page is not None:
                    used.move_to_end(copied)
            for node in reversed(path[first:]):
                used.move_to_end(node)
        return Hit(length, pages, copies)

    def _drop(self, node: _Node, group: int) -> None:
        """Release a node's page of a group, if it has one."""
        if node.pages[group] is not None:
            self._pools[group].release((node.pages[group],))
            node.pages[group] = None
            del self._used[group][node]

    def _remove(self, node: _Node) -> None:
        """Release a leaf's pages and remove it from its tree."""
        for group in range(len(self._pools)):
            self._drop(node, group)
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        del parent.keys[bisect_left(parent.keys, node.key)]
        self.num_nodes -= 1
        if parent.parent is None and not parent.children:
            del self._roots[node.salt]

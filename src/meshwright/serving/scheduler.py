"""Which texts get a step, and which pages: continuous batching with prompts in chunks (arXiv:2309.06180, 2308.16369).

The texts that came first are kept: where pages run out, first those that only the prefix cache holds are freed, then
the text that came last loses its pages and waits to be read again. So the oldest text always goes on, and none waits
for ever.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from meshwright.serving.pages import PagePool, first_needed_page
from meshwright.serving.prefix import PrefixCache
from meshwright.serving.settings import EngineLayout
from meshwright.serving.text import Text


class Slice(NamedTuple):
    """The tokens of one text in a step.

    Args:
        at: its row of the step. start: the position of its first token. tokens: those that are known; none where the
            step takes the one that was chosen last.
        is_chosen: whether a token is chosen after the last. drawn: the tokens chosen of the text before.
    """

    text: Text
    at: int
    row: int
    start: int
    tokens: list[int]
    is_chosen: bool
    drawn: int


class PageCopy(NamedTuple):
    """A page to copy before a step, of one shard and window."""

    shard: int
    window: int
    source: int
    target: int


@dataclass(frozen=True)
class Step:
    """One step on the devices.

    Args:
        is_chunk: whether it reads prompts; else it decodes.
        rows: of each shard. width: the entries of its page tables. length: the tokens of a row.
        is_scored: whether it reads a prompt for its log probabilities and hidden states.
    """

    slices: list[Slice]
    is_chunk: bool
    rows: int
    width: int
    length: int
    is_scored: bool = False
    copies: list[PageCopy] = field(default_factory=list)


@dataclass
class Counters:
    """What happened so far."""

    preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Scheduler:
    """The queue, the rows and the pages of an engine; nothing here runs on a device."""

    def __init__(self, layout: EngineLayout, *, on_admitted: Callable[[Text], None] = lambda text: None) -> None:
        self.layout = layout
        self.counters = Counters()
        self.waiting: deque[Text] = deque()
        self.running: list[Text] = []
        self.pools = [[PagePool(count) for count in layout.pages] for _ in range(layout.shards)]
        self.prefixes = [PrefixCache(layout.page_size, pools, layout.windows) for pools in self.pools]
        self._free_rows = [
            list(range((shard + 1) * layout.rows - 1, shard * layout.rows - 1, -1)) for shard in range(layout.shards)
        ]
        self._tables = [np.zeros((layout.shards * layout.rows, layout.widths[-1]), np.int32) for _ in layout.windows]
        self._copies = list[PageCopy]()
        self._on_admitted = on_admitted

    @property
    def num_pages(self) -> int:
        """The pages of the layers that keep most, of all shards."""
        return max(self.layout.pages) * self.layout.shards

    @property
    def num_free_pages(self) -> int:
        """Of `num_pages` those that nobody holds."""
        most = self.layout.pages.index(max(self.layout.pages))
        return sum(pools[most].num_free for pools in self.pools)

    def add(self, text: Text) -> None:
        """Queue a text."""
        self.waiting.append(text)

    def end(self, text: Text) -> None:
        """Take a text that is done out of its row; its pages go, but for those that later prompts may begin with."""
        if text.row is None:
            if text in self.waiting:
                self.waiting.remove(text)
            return
        self._leave(text)

    def steps(self) -> Iterable[Step]:
        """The next steps: a token of every text that is read, and a chunk of prompts."""
        if (decode := self._decode()) is not None:
            yield decode
        if (chunk := self._chunk()) is not None:
            yield chunk

    def chosen(self, text: Text, tokens: list[int]) -> None:
        """The tokens that a step chose for a text, once they are read: more than one where drafts were right."""
        text.unread -= 1
        text.tokens += tokens
        text.computed += len(tokens) - 1 if text.row is not None else 0

    def tables(self, step: Step) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each window the first page of each slice of a step, and the entries of its table."""
        found = []
        rows = np.array([part.row for part in step.slices])
        starts = np.array([part.start for part in step.slices])
        for window, table, entries in zip(
            self.layout.windows, self._tables, self.layout.entries(step.width, step.length), strict=True
        ):
            if window is None:
                first = np.zeros(len(rows), np.int32)
                found.append((first, table[rows, :entries]))
                continue
            first = np.maximum(starts - window + 1, 0) // self.layout.page_size
            places = np.minimum(first[:, None] + np.arange(entries)[None], table.shape[1] - 1)
            found.append((first, table[rows[:, None], places]))
        return found

    def _decode(self) -> Step | None:
        """A token of every text that is read, with the drafts that there are for it."""
        slices = list[Slice]()
        for text in list(self.running):
            limit = text.request.max_tokens - text.num_made
            if text.row is None or not text.is_read or text.is_scored or limit < 1 or self._is_switching(text):
                continue
            if text.needs_its_tokens and text.unread:
                continue
            room = min(limit - 1, self.layout.context - text.computed - 1, self.layout.num_drafts)
            drafts = text.drafts.draft(room) if text.drafts is not None and room > 0 else []
            if not self._hold(text, text.computed + 1 + len(drafts)):
                continue
            known = [] if text.unread else [text.tokens[-1]]
            drawn = text.num_made
            slices.append(Slice(text, 0, text.row, text.computed, [*known, *drafts], True, drawn))
        # A text that was decoded may have lost its row to an older one.
        slices = [part for part in slices if part.text.row is not None]
        if not slices:
            return None
        for part in slices:
            part.text.computed += 1
            part.text.unread += 1
            self._free_behind(part.text)
        end = max(part.start + max(1, len(part.tokens)) for part in slices)
        by_shard = [[part for part in slices if part.text.shard == shard] for shard in range(self.layout.shards)]
        rows = next(rows for rows in self.layout.decoded if rows >= max(map(len, by_shard)))
        placed = [
            part._replace(at=shard * rows + place)
            for shard, parts in enumerate(by_shard)
            for place, part in enumerate(parts)
        ]
        length = 1 + self.layout.num_drafts
        return Step(placed, False, rows, self._width(end), length, copies=self._taken_copies())

    def _chunk(self) -> Step | None:
        """Tokens of prompts, in the chunk shape that does most in its time."""
        self._admit()
        by_shard: list[list[Text]] = [[] for _ in range(self.layout.shards)]
        is_scored = None
        for text in self.running:
            if text.unread or text.computed >= len(text.tokens) or (text.is_read and not text.is_scored):
                continue
            if is_scored is None:
                is_scored = text.is_scored
            if text.is_scored == is_scored:
                by_shard[text.shard].append(text)
        if is_scored is None:
            return None

        def taken(chunk: tuple[int, int]) -> float:
            """The tokens of prompts that it takes, for each that it takes the time of."""
            rows, length = chunk
            count = sum(min(length, len(text.tokens) - text.computed) for texts in by_shard for text in texts[:rows])
            return count / (self.layout.chunk_overhead + rows * length)

        # There is one program for scoring.
        chunks = self.layout.chunks[:1] if is_scored else self.layout.chunks
        rows, length = max(chunks, key=taken)
        slices = list[Slice]()
        for shard, texts in enumerate(by_shard):
            for place, text in enumerate(texts[:rows]):
                if text.row is None:
                    continue
                count = min(length, len(text.tokens) - text.computed)
                if not self._hold(text, text.computed + count):
                    continue
                is_last = text.computed + count == len(text.tokens)
                is_chosen = is_last and not is_scored
                tokens = text.tokens[text.computed : text.computed + count]
                at = shard * rows + place
                slices.append(Slice(text, at, text.row, text.computed, tokens, is_chosen, text.num_made))
        slices = [part for part in slices if part.text.row is not None]
        if not slices:
            return None
        for part in slices:
            part.text.computed += len(part.tokens)
            part.text.unread += part.is_chosen
            self.counters.prompt_tokens += len(part.tokens)
            if part.text.is_scored and part.text.computed == len(part.text.request.prompt):
                # Scoring chooses no token: the one after the prompt is chosen by decoding its last token again.
                part.text.is_scored, part.text.computed = False, part.text.computed - 1
            self._offer(part.text)
            self._free_behind(part.text)
        end = max(part.start + len(part.tokens) for part in slices)
        width = self.layout.widths[-1] if is_scored else self._width(end)
        return Step(slices, True, rows, width, length, bool(is_scored), self._taken_copies())

    def _width(self, end: int) -> int:
        """The entries of tables for texts of `end` tokens."""
        pages = -(-end // self.layout.page_size)
        return next(width for width in self.layout.widths if width >= pages)

    def _taken_copies(self) -> list[PageCopy]:
        copies, self._copies = self._copies, []
        return copies

    def _is_switching(self, text: Text) -> bool:
        """Whether a text has become so long that it is read anew, with other frequencies (LongRoPE)."""
        switch = self.layout.switch
        if switch is None or text.computed < switch or text.read_length > switch:
            return False
        if not text.unread:
            text.computed, text.read_length, text.inserted = 0, len(text.tokens), 0
            self._release(text)
        return True

    def _admit(self) -> None:
        """Give rows to texts that wait, as long as there are rows, and pages for all of their tokens so far."""
        while self.waiting:
            text = self.waiting[0]
            if text.unread or (
                text.first is not None and text.first.row is not None and not self._is_begun(text.first)
            ):
                return
            shards = [shard for shard, rows in enumerate(self._free_rows) if rows]
            if not shards or not self._seat(text, shards):
                return
            self.waiting.popleft()
            insort(self.running, text, key=lambda other: other.order)
            self._on_admitted(text)

    @staticmethod
    def _is_begun(text: Text) -> bool:
        """Whether a text's prompt is read, so that others of the same prompt find its pages."""
        return text.computed >= len(text.request.prompt) or text.done is not None

    def _seat(self, text: Text, shards: list[int]) -> bool:
        """Give a text a row, and the pages that are cached of it; False where pages are missing."""
        layout, length = self.layout, len(text.tokens)
        text.read_length = length if layout.switch is not None else len(text.request.prompt)
        limit = 0 if text.is_scored or not layout.prefix_cache else length - 1
        shard = max(shards, key=lambda number: self._worth(text, number, limit))
        hit = self.prefixes[shard].match(text.tokens, limit=limit, salt=self._salt(text)) if limit else None
        text.pages = [list(pages) for pages in hit.pages] if hit else [[] for _ in layout.windows]
        text.freed = [0] * len(layout.windows)
        text.computed = text.inserted = hit.length if hit else 0
        text.shard = shard
        copies = hit.copies if hit else []
        # The text writes into the page that its prefix ends inside, so that it has one of its own in every window.
        targets = [page[0] if (page := self._take(shard, window, 1)) else None for window in range(len(copies))]
        needed = length - (text.computed - text.computed % layout.page_size if copies else text.computed)
        if None in targets or not self._has_room(shard, needed):
            for window, pages in enumerate(text.pages):
                pool = self.pools[shard][window]
                pool.release(pages)
                pool.release([copies[window], targets[window]] if copies else [])
            text.pages = []
            return False
        for window, (source, target) in enumerate(zip(copies, targets, strict=True)):
            text.pages[window].append(target)
            if source is not None and target is not None:
                self._copies.append(PageCopy(shard, window, source, target))
                self.pools[shard][window].release([source])
        text.row = self._free_rows[shard].pop()
        for window, pages in enumerate(text.pages):
            self._tables[window][text.row, : len(pages)] = [page or 0 for page in pages]
        if text.cached is None:
            text.cached = text.computed
            self.counters.cached_tokens += text.computed
        return True

    def _worth(self, text: Text, shard: int, limit: int) -> float:
        """How good a shard is for a text: the share of it that is cached, less the share of the rows that are taken."""
        if self.layout.shards == 1:
            return 0.0
        known = self.prefixes[shard].longest(text.tokens, limit, self._salt(text)) if limit else 0
        return known / len(text.tokens) + len(self._free_rows[shard]) / self.layout.rows

    def _salt(self, text: Text) -> object:
        """What tells prompts apart whose equal tokens have other keys, as frequencies depend on a text's length."""
        if self.layout.switch is not None:
            return text.read_length > self.layout.switch
        if self.layout.stretched_from is not None:
            return max(text.read_length, self.layout.stretched_from)
        return None

    def _has_room(self, shard: int, tokens: int) -> bool:
        """Whether there are pages for so many more tokens; those of the prefix cache alone are freed."""
        size = self.layout.page_size
        for window, pool in enumerate(self.pools[shard]):
            kept = self.layout.windows[window]
            # Layers with a window free pages while a prompt is read.
            count = -(-min(tokens, tokens if kept is None else kept + self._longest_chunk) // size) + 1
            missing = min(count, self.layout.pages[window]) - pool.num_free
            if missing > 0 and self.prefixes[shard].evict(window, missing) < missing:
                return False
        return True

    @property
    def _longest_chunk(self) -> int:
        return max(length for _, length in self.layout.chunks)

    def _hold(self, text: Text, length: int) -> bool:
        """Give a text pages for `length` tokens, if need be those of younger ones; False where it lost its own."""
        count = -(-length // self.layout.page_size)
        for window, held in enumerate(text.pages):
            while (missing := count - len(held)) > 0:
                taken = self._take(text.shard, window, missing)
                if taken is not None:
                    assert text.row is not None
                    self._tables[window][text.row, len(held) : len(held) + len(taken)] = taken
                    held += taken
                    continue
                youngest = next(other for other in reversed(self.running) if other.shard == text.shard)
                self._preempt(youngest)
                if youngest is text:
                    return False
        return True

    def _take(self, shard: int, window: int, count: int) -> list[int] | None:
        """Free pages, or such that only the prefix cache holds."""
        pool = self.pools[shard][window]
        taken = pool.take(count)
        if taken is None:
            self.prefixes[shard].evict(window, count - pool.num_free)
            taken = pool.take(count)
        return taken

    def _preempt(self, text: Text) -> None:
        """Take a text's row and pages; it waits before those that came later, and is read again."""
        self._leave(text)
        text.computed = 0
        self.counters.preempted += 1
        place = next((at for at, other in enumerate(self.waiting) if other.order > text.order), len(self.waiting))
        self.waiting.insert(place, text)

    def _leave(self, text: Text) -> None:
        assert text.row is not None
        self._offer(text)
        self._release(text)
        self._free_rows[text.shard].append(text.row)
        self.running.remove(text)
        text.row = None

    def _release(self, text: Text) -> None:
        for pool, pages in zip(self.pools[text.shard], text.pages, strict=True):
            pool.release(pages)
        # What was to be copied for it is not needed; pages have numbers of their own in each shard and window.
        self._copies = [
            copy for copy in self._copies if copy.shard != text.shard or copy.target not in text.pages[copy.window]
        ]
        text.pages, text.freed = [[] for _ in self.layout.windows], [0] * len(self.layout.windows)

    def _offer(self, text: Text) -> None:
        """Offer a text's whole pages of known tokens to the prefix cache."""
        size = self.layout.page_size
        whole = min(text.computed, len(text.tokens)) // size
        if not self.layout.prefix_cache or whole * size <= text.inserted:
            return
        text.inserted = whole * size
        tokens = text.tokens[: whole * size]
        self.prefixes[text.shard].insert(tokens, [pages[:whole] for pages in text.pages], salt=self._salt(text))

    def _free_behind(self, text: Text) -> None:
        """Free the pages that have left the windows of later tokens."""
        for window, width in enumerate(self.layout.windows):
            if width is not None:
                held, first = text.pages[window], first_needed_page(text.computed, width, self.layout.page_size)
                behind = range(text.freed[window], min(first, len(held)))
                self.pools[text.shard][window].release([held[at] for at in behind])
                for at in behind:
                    held[at] = None
                text.freed[window] = max(text.freed[window], behind.stop)

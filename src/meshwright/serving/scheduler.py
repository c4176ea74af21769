"""The scheduler: continuous batching with chunked prefill (arXiv:2309.06180, 2308.16369), and allocation of pages.

Oldest first. If pages run out, pages that only the prefix cache references are evicted; after these the youngest
sequence is preempted: it loses its pages, and its prompt and tokens are computed again later. So the oldest sequence
always makes progress, and no sequence starves.
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
from meshwright.serving.sequence import TokenSequence
from meshwright.serving.settings import EngineLayout


class Slice(NamedTuple):
    """One sequence's row in a step.

    Args:
        at: its row of the step. start: the position of its first token. tokens: those that are known; none where the
            step takes the one that was chosen last.
        is_chosen: whether a token is chosen after the last. drawn: the tokens chosen of the sequence before.
    """

    sequence: TokenSequence
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

    def __init__(
        self, layout: EngineLayout, *, on_admitted: Callable[[TokenSequence], None] = lambda sequence: None
    ) -> None:
        self.layout = layout
        self.counters = Counters()
        self.waiting: deque[TokenSequence] = deque()
        self.running: list[TokenSequence] = []
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

    def add(self, sequence: TokenSequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def end(self, sequence: TokenSequence) -> None:
        """Free the row and the pages of a sequence that is done; the prefix cache keeps its own references."""
        if sequence.row is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        self._free_row(sequence)

    def steps(self) -> Iterable[Step]:
        """The next steps: a decode step of all sequences whose prompts are computed, and a chunk of prompts."""
        if (decode := self._decode()) is not None:
            yield decode
        if (chunk := self._chunk()) is not None:
            yield chunk

    def append_tokens(self, sequence: TokenSequence, tokens: list[int]) -> None:
        """Add the tokens that a step chose, once they are on the host: several if drafts were accepted."""
        sequence.in_flight -= 1
        sequence.tokens += tokens
        sequence.computed += len(tokens) - 1 if sequence.row is not None else 0

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
        """A decode step: the newest token of every prefilled sequence, and its draft tokens."""
        slices = list[Slice]()
        for sequence in list(self.running):
            limit = sequence.request.max_tokens - sequence.num_generated
            if (
                sequence.row is None
                or not sequence.is_prefilled
                or sequence.is_scored
                or limit < 1
                or self._restart_at_switch(sequence)
            ):
                continue
            if sequence.needs_last_tokens and sequence.in_flight:
                continue
            room = min(limit - 1, self.layout.context - sequence.computed - 1, self.layout.num_drafts)
            drafts = sequence.drafts.draft(room) if sequence.drafts is not None and room > 0 else []
            if not self._allocate_pages(sequence, sequence.computed + 1 + len(drafts)):
                continue
            known = [] if sequence.in_flight else [sequence.tokens[-1]]
            drawn = sequence.num_generated
            slices.append(Slice(sequence, 0, sequence.row, sequence.computed, [*known, *drafts], True, drawn))
        # A sequence that was decoded may have lost its row to an older one.
        slices = [part for part in slices if part.sequence.row is not None]
        if not slices:
            return None
        for part in slices:
            part.sequence.computed += 1
            part.sequence.in_flight += 1
            self._free_out_of_window(part.sequence)
        end = max(part.start + max(1, len(part.tokens)) for part in slices)
        by_shard = [[part for part in slices if part.sequence.shard == shard] for shard in range(self.layout.shards)]
        rows = next(rows for rows in self.layout.decoded if rows >= max(map(len, by_shard)))
        placed = [
            part._replace(at=shard * rows + place)
            for shard, parts in enumerate(by_shard)
            for place, part in enumerate(parts)
        ]
        length = 1 + self.layout.num_drafts
        return Step(placed, False, rows, self._width(end), length, copies=self._pop_copies())

    def _chunk(self) -> Step | None:
        """A prefill step: the chunk shape with the most prompt tokens for its estimated time."""
        self._admit()
        by_shard: list[list[TokenSequence]] = [[] for _ in range(self.layout.shards)]
        is_scored = None
        for sequence in self.running:
            if (
                sequence.in_flight
                or sequence.computed >= len(sequence.tokens)
                or (sequence.is_prefilled and not sequence.is_scored)
            ):
                continue
            if is_scored is None:
                is_scored = sequence.is_scored
            if sequence.is_scored == is_scored:
                by_shard[sequence.shard].append(sequence)
        if is_scored is None:
            return None

        def throughput(chunk: tuple[int, int]) -> float:
            """Prompt tokens in a chunk of this shape, over its cost in tokens, padding and weight reads included."""
            rows, length = chunk
            count = sum(
                min(length, len(sequence.tokens) - sequence.computed)
                for sequences in by_shard
                for sequence in sequences[:rows]
            )
            return count / (self.layout.chunk_overhead + rows * length)

        # There is one program for scoring.
        chunks = self.layout.chunks[:1] if is_scored else self.layout.chunks
        rows, length = max(chunks, key=throughput)
        slices = list[Slice]()
        for shard, sequences in enumerate(by_shard):
            for place, sequence in enumerate(sequences[:rows]):
                if sequence.row is None:
                    continue
                count = min(length, len(sequence.tokens) - sequence.computed)
                if not self._allocate_pages(sequence, sequence.computed + count):
                    continue
                is_last = sequence.computed + count == len(sequence.tokens)
                is_chosen = is_last and not is_scored
                tokens = sequence.tokens[sequence.computed : sequence.computed + count]
                at = shard * rows + place
                slices.append(
                    Slice(sequence, at, sequence.row, sequence.computed, tokens, is_chosen, sequence.num_generated)
                )
        slices = [part for part in slices if part.sequence.row is not None]
        if not slices:
            return None
        for part in slices:
            part.sequence.computed += len(part.tokens)
            part.sequence.in_flight += part.is_chosen
            self.counters.prompt_tokens += len(part.tokens)
            if part.sequence.is_scored and part.sequence.computed == len(part.sequence.request.prompt):
                # Scoring chooses no token: the one after the prompt is chosen by decoding its last token again.
                part.sequence.is_scored, part.sequence.computed = False, part.sequence.computed - 1
            self._cache_prefix(part.sequence)
            self._free_out_of_window(part.sequence)
        end = max(part.start + len(part.tokens) for part in slices)
        width = self.layout.widths[-1] if is_scored else self._width(end)
        return Step(slices, True, rows, width, length, bool(is_scored), self._pop_copies())

    def _width(self, end: int) -> int:
        """The entries of tables for sequences of `end` tokens."""
        pages = -(-end // self.layout.page_size)
        return next(width for width in self.layout.widths if width >= pages)

    def _pop_copies(self) -> list[PageCopy]:
        copies, self._copies = self._copies, []
        return copies

    def _restart_at_switch(self, sequence: TokenSequence) -> bool:
        """Whether a sequence is at the length where LongRoPE's frequencies change; if so it is computed anew."""
        switch = self.layout.switch
        if switch is None or sequence.computed < switch or sequence.prefill_length > switch:
            return False
        if not sequence.in_flight:
            sequence.computed, sequence.prefill_length, sequence.inserted = 0, len(sequence.tokens), 0
            self._release_pages(sequence)
        return True

    def _admit(self) -> None:
        """Admit waiting sequences while there are free rows, and pages for all of their tokens."""
        while self.waiting:
            sequence = self.waiting[0]
            if sequence.in_flight or (
                sequence.first is not None
                and sequence.first.row is not None
                and not self._is_prompt_computed(sequence.first)
            ):
                return
            shards = [shard for shard, rows in enumerate(self._free_rows) if rows]
            if not shards or not self._assign_row(sequence, shards):
                return
            self.waiting.popleft()
            insort(self.running, sequence, key=lambda other: other.order)
            self._on_admitted(sequence)

    @staticmethod
    def _is_prompt_computed(sequence: TokenSequence) -> bool:
        """Whether the prefix cache has a sequence's prompt, for others of the same prompt."""
        return sequence.computed >= len(sequence.request.prompt) or sequence.done is not None

    def _assign_row(self, sequence: TokenSequence, shards: list[int]) -> bool:
        """Assign a row to a sequence, with the cached pages of its prefix; False if pages are missing."""
        layout, length = self.layout, len(sequence.tokens)
        sequence.prefill_length = length if layout.switch is not None else len(sequence.request.prompt)
        limit = 0 if sequence.is_scored or not layout.prefix_cache else length - 1
        shard = max(shards, key=lambda number: self._shard_score(sequence, number, limit))
        hit = (
            self.prefixes[shard].match(sequence.tokens, limit=limit, salt=self._prefix_salt(sequence))
            if limit
            else None
        )
        sequence.pages = [list(pages) for pages in hit.pages] if hit else [[] for _ in layout.windows]
        sequence.freed = [0] * len(layout.windows)
        sequence.computed = sequence.inserted = hit.length if hit else 0
        sequence.shard = shard
        copies = hit.copies if hit else []
        # The sequence writes into the page that its prefix ends inside, so that it has one of its own in every window.
        targets = [page[0] if (page := self._allocate(shard, window, 1)) else None for window in range(len(copies))]
        needed = length - (sequence.computed - sequence.computed % layout.page_size if copies else sequence.computed)
        if None in targets or not self._has_free_pages(shard, needed):
            for window, pages in enumerate(sequence.pages):
                pool = self.pools[shard][window]
                pool.release(pages)
                pool.release([copies[window], targets[window]] if copies else [])
            sequence.pages = []
            return False
        for window, (source, target) in enumerate(zip(copies, targets, strict=True)):
            sequence.pages[window].append(target)
            if source is not None and target is not None:
                self._copies.append(PageCopy(shard, window, source, target))
                self.pools[shard][window].release([source])
        sequence.row = self._free_rows[shard].pop()
        for window, pages in enumerate(sequence.pages):
            self._tables[window][sequence.row, : len(pages)] = [page or 0 for page in pages]
        if sequence.cached is None:
            sequence.cached = sequence.computed
            self.counters.cached_tokens += sequence.computed
        return True

    def _shard_score(self, sequence: TokenSequence, shard: int, limit: int) -> float:
        """How well a shard suits a sequence: the share of its tokens that is cached, plus the share of free rows."""
        if self.layout.shards == 1:
            return 0.0
        known = self.prefixes[shard].longest(sequence.tokens, limit, self._prefix_salt(sequence)) if limit else 0
        return known / len(sequence.tokens) + len(self._free_rows[shard]) / self.layout.rows

    def _prefix_salt(self, sequence: TokenSequence) -> object:
        """A key beside the tokens, for models whose rotary frequencies depend on a sequence's length."""
        if self.layout.switch is not None:
            return sequence.prefill_length > self.layout.switch
        if self.layout.stretched_from is not None:
            return max(sequence.prefill_length, self.layout.stretched_from)
        return None

    def _has_free_pages(self, shard: int, tokens: int) -> bool:
        """Whether pages for so many more tokens are free, after evictions from the prefix cache."""
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

    def _allocate_pages(self, sequence: TokenSequence, length: int) -> bool:
        """Grow a sequence's pages to `length` tokens, preempting younger ones; False if it was preempted itself."""
        count = -(-length // self.layout.page_size)
        for window, pages in enumerate(sequence.pages):
            while (missing := count - len(pages)) > 0:
                new = self._allocate(sequence.shard, window, missing)
                if new is not None:
                    assert sequence.row is not None
                    self._tables[window][sequence.row, len(pages) : len(pages) + len(new)] = new
                    pages += new
                    continue
                youngest = next(other for other in reversed(self.running) if other.shard == sequence.shard)
                self._preempt(youngest)
                if youngest is sequence:
                    return False
        return True

    def _allocate(self, shard: int, window: int, count: int) -> list[int] | None:
        """Allocate pages, evicting from the prefix cache if too few are free; None if that is not enough."""
        pool = self.pools[shard][window]
        pages = pool.allocate(count)
        if pages is None:
            self.prefixes[shard].evict(window, count - pool.num_free)
            pages = pool.allocate(count)
        return pages

    def _preempt(self, sequence: TokenSequence) -> None:
        """Preempt a sequence: free its row and pages, and queue it in order of arrival to be computed again."""
        self._free_row(sequence)
        sequence.computed = 0
        self.counters.preempted += 1
        place = next((at for at, other in enumerate(self.waiting) if other.order > sequence.order), len(self.waiting))
        self.waiting.insert(place, sequence)

    def _free_row(self, sequence: TokenSequence) -> None:
        assert sequence.row is not None
        self._cache_prefix(sequence)
        self._release_pages(sequence)
        self._free_rows[sequence.shard].append(sequence.row)
        self.running.remove(sequence)
        sequence.row = None

    def _release_pages(self, sequence: TokenSequence) -> None:
        for pool, pages in zip(self.pools[sequence.shard], sequence.pages, strict=True):
            pool.release(pages)
        # What was to be copied for it is not needed; pages have numbers of their own in each shard and window.
        self._copies = [
            copy
            for copy in self._copies
            if copy.shard != sequence.shard or copy.target not in sequence.pages[copy.window]
        ]
        sequence.pages, sequence.freed = [[] for _ in self.layout.windows], [0] * len(self.layout.windows)

    def _cache_prefix(self, sequence: TokenSequence) -> None:
        """Insert a sequence's full pages into the prefix cache."""
        size = self.layout.page_size
        whole = min(sequence.computed, len(sequence.tokens)) // size
        if not self.layout.prefix_cache or whole * size <= sequence.inserted:
            return
        sequence.inserted = whole * size
        tokens = sequence.tokens[: whole * size]
        self.prefixes[sequence.shard].insert(
            tokens, [pages[:whole] for pages in sequence.pages], salt=self._prefix_salt(sequence)
        )

    def _free_out_of_window(self, sequence: TokenSequence) -> None:
        """Release pages that no later token's attention window reaches."""
        for window, width in enumerate(self.layout.windows):
            if width is not None:
                held, first = sequence.pages[window], first_needed_page(sequence.computed, width, self.layout.page_size)
                behind = range(sequence.freed[window], min(first, len(held)))
                self.pools[sequence.shard][window].release([held[at] for at in behind])
                for at in behind:
                    held[at] = None
                sequence.freed[window] = max(sequence.freed[window], behind.stop)

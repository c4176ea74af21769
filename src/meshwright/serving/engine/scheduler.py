"""The scheduler: continuous batching with chunked prefill (arXiv:2309.06180, 2308.16369), and allocation of pages.

A row is a place in the batch. A sequence has an owner (the client) and a group (all prompts and completions of one HTTP
request). A free row goes to the owner with the fewest rows; among its sequences to the group with the fewest rows; then
to the oldest sequence. If no row is free, a group without a row preempts a sequence: the youngest of another group of
its owner that has several rows, or of another owner that has at least two rows more than its own. If pages run out,
pages that only the prefix cache references are evicted; then the youngest sequence of the owner and group with most
rows is preempted: it loses its pages and is computed again later. The oldest sequence of a group is preempted last, so
that no sequence starves.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from meshwright.serving.engine.pages import PagePool, first_needed_page
from meshwright.serving.engine.prefix import PrefixCache
from meshwright.serving.engine.sequence import TokenSequence
from meshwright.serving.engine.settings import EngineLayout
from meshwright.serving.engine.shares import RowShares, in_turns


class SequenceRow(NamedTuple):
    """One sequence's row in a step."""

    sequence: TokenSequence
    at: int  # The row's index in the step.
    row: int  # The sequence's row in the engine.
    start: int  # Position in the sequence of the first token.
    tokens: list[int]  # Token ids; empty if the only token is the newest one, which is still on the devices.
    is_chosen: bool  # Whether a token is chosen after the last one.
    drawn: int  # Number of tokens chosen for the sequence before this step.


class PageCopy(NamedTuple):
    """A page to copy before a step, within the pages of one shard and attention window."""

    shard: int
    window: int  # Index in `EngineLayout.windows`.
    source: int  # Page number.
    target: int


@dataclass(frozen=True)
class EngineStep:
    """One step on the devices."""

    slices: list[SequenceRow]
    is_chunk: bool  # Whether it processes chunks of prompts; if not, it decodes.
    rows: int  # Rows of each shard.
    width: int  # Entries of a page table for all pages of the longest sequence.
    length: int  # Tokens of each row, with padding.
    is_scored: bool = False  # Whether it processes prompts for their log probabilities and hidden states.
    copies: list[PageCopy] = field(default_factory=list)  # To make before the step.

    @property
    def has_logprobs(self) -> bool:
        """Whether a request in the step asks for log probabilities."""
        return self.is_scored or any(part.sequence.request.logprobs is not None for part in self.slices)


@dataclass
class Totals:
    """Totals since the engine started."""

    preempted: int = 0  # Preemptions.
    prompt_tokens: int = 0  # Tokens processed in chunks, those of preempted sequences again.
    cached_tokens: int = 0  # Prompt tokens found in the prefix cache.


class Scheduler:
    """The queue, the rows and the pages of an engine; nothing here runs on a device.

    Args:
        on_admitted: called with a sequence when it gets a row.
        on_error: called with a sequence and the exception that it caused, to end it; None to raise the exception.
        can_score: returns whether the program of a scoring step is compiled.
    """

    def __init__(
        self,
        layout: EngineLayout,
        *,
        on_admitted: Callable[[TokenSequence], None] = lambda sequence: None,
        on_error: Callable[[TokenSequence, Exception], None] | None = None,
        can_score: Callable[[EngineStep], bool] = lambda step: True,
    ) -> None:
        self.layout = layout
        self.counters = Totals()
        self.waiting: deque[TokenSequence] = deque()
        self.running: list[TokenSequence] = []
        self.pools = [[PagePool(count) for count in layout.pages] for _ in range(layout.shards)]
        self.prefixes = [PrefixCache(layout.page_size, pools, layout.windows) for pools in self.pools]
        self._free_rows = [
            list(range((shard + 1) * layout.rows - 1, shard * layout.rows - 1, -1)) for shard in range(layout.shards)
        ]
        self._tables = [np.zeros((layout.shards * layout.rows, layout.widths[-1]), np.int32) for _ in layout.windows]
        self._copies = list[PageCopy]()
        self._on_admitted, self._on_error, self._can_score = on_admitted, on_error, can_score
        self._was_scored = False
        """Whether the last chunk was of scored prompts; chunks of scored and of other prompts alternate."""
        self._shares = RowShares()
        self._is_settled = False
        """Whether no waiting sequence may preempt a running one for its row."""

    @property
    def num_pages(self) -> int:
        """Number of pages over all shards, for the attention window with most pages; each window has its own."""
        return max(self.layout.pages) * self.layout.shards

    @property
    def num_free_pages(self) -> int:
        """Number of free pages among those that `num_pages` counts."""
        most = self.layout.pages.index(max(self.layout.pages))
        return sum(pools[most].num_free for pools in self.pools)

    def add(self, sequence: TokenSequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)
        self._is_settled = False

    def end(self, sequence: TokenSequence) -> None:
        """Free the row and pages of a finished sequence; the prefix cache keeps its own references."""
        if sequence.row is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            if sequence.pages:
                self._release_pages(sequence)
            return
        self._free_row(sequence)

    def steps(self) -> Iterable[EngineStep]:
        """Yield a decode step of the sequences with computed prompts, and a chunk of prompts, if any are ready."""
        if (decode := self._decode()) is not None:
            yield decode
        if (chunk := self._chunk()) is not None:
            yield chunk

    def append_tokens(self, sequence: TokenSequence, tokens: list[int]) -> None:
        """Add the tokens that a step chose for a sequence, once on the host. Several if drafts were accepted."""
        sequence.in_flight -= 1
        self._is_settled &= sequence.row is not None
        sequence.tokens += tokens
        sequence.computed += len(tokens) - 1 if sequence.row is not None else 0

    def tables(self, step: EngineStep) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the page tables of a step.

        Returns:
            For each attention window: for each of the step's `slices`, the index in the sequence of the first page in
            its table [n], and the page numbers of the table [n, entries].
        """
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

    def _decode(self) -> EngineStep | None:
        """Return a decode step: the newest token of every prefilled sequence, and its drafts; None if none is ready."""
        slices = list[SequenceRow]()
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
            try:
                drafts = sequence.drafts.draft(room) if sequence.drafts is not None and room > 0 else []
            except Exception as error:
                self._blame(sequence, error)
                continue
            if not self._allocate_pages(sequence, sequence.computed + 1 + len(drafts)):
                continue
            known = [] if sequence.in_flight else [sequence.tokens[-1]]
            drawn = sequence.num_generated
            slices.append(SequenceRow(sequence, 0, sequence.row, sequence.computed, [*known, *drafts], True, drawn))
        # Allocating for a later sequence may have preempted an earlier one.
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
        return EngineStep(placed, False, rows, self._width(end), length, copies=self.pop_copies())

    def _chunk(self) -> EngineStep | None:
        """Return a prefill step, alternately of scored and of other prompts; None if no sequence is ready."""
        self._admit()
        ready = [
            sequence
            for sequence in self.running
            if not sequence.in_flight
            and sequence.computed < len(sequence.tokens)
            and (sequence.is_scored or not sequence.is_prefilled)
        ]
        kinds = sorted({sequence.is_scored for sequence in ready}, key=lambda kind: kind == self._was_scored)
        found = (self._chunk_of([each for each in ready if each.is_scored == kind], is_scored=kind) for kind in kinds)
        return next((step for step in found if step is not None), None)

    def _chunk_of(self, ready: list[TokenSequence], *, is_scored: bool) -> EngineStep | None:
        """Return the prefill step of `ready` sequences with the most prompt tokens per cost; None if it cannot run."""
        by_shard: list[list[TokenSequence]] = [[] for _ in range(self.layout.shards)]
        for sequence in in_turns(ready):
            by_shard[sequence.shard].append(sequence)

        def throughput(chunk: tuple[int, int]) -> float:
            """Prompt tokens in a chunk of this shape, per token of its cost: tokens with padding, and weight reads."""
            rows, length = chunk
            count = sum(
                min(length, len(sequence.tokens) - sequence.computed)
                for sequences in by_shard
                for sequence in sequences[:rows]
            )
            return count / (self.layout.chunk_overhead + rows * length)

        rows, length = max(self.layout.chunks, key=throughput)
        taken = [sequence for sequences in by_shard for sequence in sequences[:rows]]
        end = max(min(sequence.computed + length, len(sequence.tokens)) for sequence in taken)
        step = EngineStep([], True, rows, self._width(end), length, is_scored)
        if is_scored and not self._can_score(step):
            return None
        slices = list[SequenceRow]()
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
                at, start, drawn = shard * rows + place, sequence.computed, sequence.num_generated
                slices.append(SequenceRow(sequence, at, sequence.row, start, tokens, is_chosen, drawn))
        # Allocating for one sequence may have preempted another.
        slices = [part for part in slices if part.sequence.row is not None]
        if not slices:
            return None
        for part in slices:
            part.sequence.computed += len(part.tokens)
            part.sequence.in_flight += part.is_chosen
            self.counters.prompt_tokens += len(part.tokens)
            if part.sequence.is_scored and part.sequence.computed == len(part.sequence.request.prompt):
                # Scoring chooses no token: decoding the prompt's last token again chooses the first one.
                # A state of linear attention cannot go back by a token: it is computed again.
                again = 0 if self.layout.has_state else part.sequence.computed - 1
                part.sequence.is_scored, part.sequence.computed = False, again
            self._cache_prefix(part.sequence)
            self._free_out_of_window(part.sequence)
        self._was_scored = is_scored
        return replace(step, slices=slices, copies=self.pop_copies())

    def _width(self, end: int) -> int:
        """Return the smallest page-table width for which programs are compiled and that fits `end` tokens."""
        pages = -(-end // self.layout.page_size)
        return next(width for width in self.layout.widths if width >= pages)

    def pop_copies(self) -> list[PageCopy]:
        """Return the pages to copy before the next step, and clear the list."""
        copies, self._copies = self._copies, []
        return copies

    def put_back(self, copies: list[PageCopy]) -> None:
        """Queue again the copies that a step did not make."""
        self._copies = [*copies, *self._copies]

    def _restart_at_switch(self, sequence: TokenSequence) -> bool:
        """Whether a sequence reached the length where LongRoPE's frequencies change, so that it is computed again.

        Its pages are released once no step of it is in flight.
        """
        switch = self.layout.switch
        if switch is None or sequence.computed < switch or sequence.prefill_length > switch:
            return False
        if not sequence.in_flight:
            sequence.computed, sequence.prefill_length, sequence.inserted = 0, len(sequence.tokens), 0
            self._release_pages(sequence)
        return True

    def _blame(self, sequence: TokenSequence, error: Exception) -> None:
        """End the sequence that caused `error` by `on_error`, or raise it. Call while the exception is handled."""
        if self._on_error is None:
            raise error
        self._on_error(sequence, error)

    def _admit(self) -> None:
        """Admit waiting sequences while there are rows, and pages for all their tokens."""
        while self.waiting and (any(self._free_rows) or not self._is_settled):
            found = [sequence for sequence in self.waiting if self._may_begin(sequence)]
            if not found:
                return
            sequence = min(found, key=self._shares.sort_key)
            try:
                while not self._assign_row(sequence):
                    if (victim := self._shares.displaced_by(sequence, self.running)) is None:
                        self._is_settled = True
                        return
                    self._preempt(victim)
                self.waiting.remove(sequence)
                insort(self.running, sequence, key=lambda other: other.order)
                self._shares.count(sequence, 1)
                self._on_admitted(sequence)
            except Exception as error:
                self._blame(sequence, error)

    def _may_begin(self, sequence: TokenSequence) -> bool:
        """Whether a waiting sequence's tokens are all on the host, and no other sequence is computing its prompt."""
        first = sequence.first
        if first is not None and first.row is not None and first.done is None:
            return not sequence.in_flight and first.computed >= len(first.request.prompt)
        return not sequence.in_flight

    def _assign_row(self, sequence: TokenSequence) -> bool:
        """Assign a row to a sequence, with its cached prefix's pages; False if no row or too few pages are free."""
        layout, length = self.layout, len(sequence.tokens)
        shards = [shard for shard, rows in enumerate(self._free_rows) if rows]
        if not shards:
            return False
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
        # The sequence writes into the page where its prefix ends, so it needs its own copy in every window.
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
        """Return how well a shard suits a sequence: the share of its tokens cached plus the share of rows free."""
        if self.layout.shards == 1:
            return 0.0
        known = self.prefixes[shard].longest(sequence.tokens, limit, self._prefix_salt(sequence)) if limit else 0
        return known / len(sequence.tokens) + len(self._free_rows[shard]) / self.layout.rows

    def _prefix_salt(self, sequence: TokenSequence) -> Hashable:
        """Return a sequence's salt in the prefix cache: (request's salt, adapter, what sets RoPE's frequencies)."""
        of_length = None
        if self.layout.switch is not None:
            of_length = sequence.prefill_length > self.layout.switch
        elif self.layout.stretched_from is not None:
            of_length = max(sequence.prefill_length, self.layout.stretched_from)
        return sequence.request.cache_salt, sequence.request.adapter, of_length

    def _has_free_pages(self, shard: int, tokens: int) -> bool:
        """Whether pages for this many more tokens are free, after evictions from the prefix cache."""
        size = self.layout.page_size
        for window, pool in enumerate(self.pools[shard]):
            kept = self.layout.windows[window]
            longest = max(length for _, length in self.layout.chunks)
            # Layers with a window free pages during prefill.
            count = -(-min(tokens, tokens if kept is None else kept + longest) // size) + 1
            missing = min(count, self.layout.pages[window]) - pool.num_free
            if missing > 0 and self.prefixes[shard].evict(window, missing) < missing:
                return False
        return True

    def _allocate_pages(self, sequence: TokenSequence, length: int) -> bool:
        """Allocate a sequence's pages up to `length` tokens, preempting others; False if it was preempted itself."""
        count = -(-length // self.layout.page_size)
        for window, pages in enumerate(sequence.pages):
            while (missing := count - len(pages)) > 0:
                new = self._allocate(sequence.shard, window, missing)
                if new is not None:
                    assert sequence.row is not None
                    self._tables[window][sequence.row, len(pages) : len(pages) + len(new)] = new
                    pages += new
                    continue
                victim = max((o for o in self.running if o.shard == sequence.shard), key=self._shares.sort_key)
                self._preempt(victim)
                if victim is sequence:
                    return False
        return True

    def _allocate(self, shard: int, window: int, count: int) -> list[int] | None:
        """Allocate pages, evicting from the prefix cache if too few are free. Return their numbers; None if too few."""
        pool = self.pools[shard][window]
        pages = pool.allocate(count)
        if pages is None:
            self.prefixes[shard].evict(window, count - pool.num_free)
            pages = pool.allocate(count)
        return pages

    def _preempt(self, sequence: TokenSequence) -> None:
        """Preempt a sequence: free its row and pages, and queue it, in order of arrival, to be computed again."""
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
        self._shares.count(sequence, -1)
        sequence.row, self._is_settled = None, False

    def _release_pages(self, sequence: TokenSequence) -> None:
        for pool, pages in zip(self.pools[sequence.shard], sequence.pages, strict=True):
            pool.release(pages)
        # Drop its pending copies; page numbers are per shard and window.
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
        """Release the sequence's pages that no later token attends to, in layers with a window."""
        for window, width in enumerate(self.layout.windows):
            if width is not None:
                held, first = sequence.pages[window], first_needed_page(sequence.computed, width, self.layout.page_size)
                behind = range(sequence.freed[window], min(first, len(held)))
                self.pools[sequence.shard][window].release([held[at] for at in behind])
                for at in behind:
                    held[at] = None
                sequence.freed[window] = max(sequence.freed[window], behind.stop)
